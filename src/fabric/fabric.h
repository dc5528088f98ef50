/*
 * fabric.h - what a backend offers: a device (memory, streams, copies, sums, local signals) and a rail (puts and signals
 * between nodes). A fabric sees resolved pointers and words only; it never decides what moves where.
 */
#ifndef TIDE_FABRIC_H
#define TIDE_FABRIC_H

#include "base/base.h"

typedef struct fab_device fab_device;

/* An address that may depend on the call: `base` itself, or args[arg] + base when arg >= 0. */
typedef struct fab_ptr {
    uintptr_t base;
    int32_t arg;
    int32_t zero; /* 1: source of a fill */
} fab_ptr;

typedef struct fab_run { fab_ptr src, dst; uint64_t width, rows, src_pitch, dst_pitch; } fab_run; /* width in items */
typedef struct fab_source { fab_ptr at; uint64_t row_pitch; uint32_t dtype, multimem; } fab_source;
typedef struct fab_segment { fab_ptr dst; uint64_t dst_pitch, elems; uint32_t rows, first_source, n_sources; } fab_segment;

/* Collective opening of a device: ranks find each other through the all-gather callback. */
typedef struct fab_open {
    uint32_t rank, n_ranks, node_size; /* node_size: resolved, divides n_ranks */
    int device;
    tide_allgather_fn allgather;
    void *allgather_context;
    const tide_options *options;
} fab_open;
int fab_host_open(const fab_open *desc, fab_device **out);

/* Every rank's contribution `status` is exchanged; returns TIDE_OK only if all are OK, else the lowest failing rank's code and
 * text on all ranks alike. The building block of "all or none". */
int fab_agree(const fab_open *desc, int status);

/* The device and rail vtables and the host device's own types follow here (owner: src/fabric). */

#endif
