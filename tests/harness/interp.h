/*
 * interp.h - executes schedules of all ranks in one thread, in a random but seeded order.
 *
 * Shares nothing with the engine or a fabric: it takes the op list at its word. Every stream of every rank is a queue; a step runs
 * one item (run, segment, put, post) of a random stream whose head may go on, or delivers a random packet of the wire (order is
 * kept only within lane, sender, receiver and context). Memory starts as 0xFF (NaN in every format), inboxes as zero.
 * It fails, with a text, on: a wait that nothing can end, a JOIN without RECORD, an access outside a bank or to memory that
 * a rank may not touch, a counter that falls, a call tag that differs, rail signals left over when all has run.
 */
#ifndef HARNESS_INTERP_H
#define HARNESS_INTERP_H

#include "schedule/schedule.h"

typedef struct interp interp;

/* The plan must outlive it. NULL when out of memory. */
interp *interp_create(const tide_plan *plan, uint64_t seed);
void interp_destroy(interp *t);

/* First byte of a bank on a rank; the node's one landing when the plan says multicast. */
uint8_t *interp_memory(interp *t, int region, uint32_t bank, uint32_t rank);

/* Enqueues a schedule, or a fragment of it, on its rank; it must live until interp_run returns. Events IN and GATE are this point of
 * the rank's caller stream. READ advances the reduce-scatter parity and applies the steps; NET belongs to the oldest READ
 * without one, whose arguments it keeps (`args` is ignored). ALL is READ then NET for a reduce-scatter, everything for an
 * all-gather. STASH: a schedule of schedule_build_stash. */
enum interp_part { INTERP_ALL, INTERP_READ, INTERP_NET, INTERP_STASH };
typedef struct interp_args {
    void *const *args; /* s->n_args pointers, copied; NULL when there are none */
    float alpha;
    int accumulate;
} interp_args;
int interp_enqueue(interp *t, const schedule *s, int part, const interp_args *args);

/* Appends to the rank's caller stream: wait for the group's latest READY, READ_DONE or DONE, then fn (may be NULL), which
 * returns 0 when it likes what it sees. event < 0: no wait. */
typedef int (*interp_fn)(void *context, uint32_t rank);
int interp_consume(interp *t, uint32_t rank, int event, uint32_t group, interp_fn fn, void *context);
/* Records FREE of a landing slot at this point of the caller stream (tide_slot_release). */
int interp_free_slot(interp *t, uint32_t rank, uint32_t slot);

/* All of these return 0, or nonzero with interp_error set; after a failure every call fails. */
int interp_steps(interp *t, uint64_t n); /* at most n steps; being blocked is no error */
int interp_run(interp *t);               /* until everything has run */

int interp_fail(interp *t, const char *format, ...) __attribute__((format(printf, 2, 3))); /* returns -1 */
const char *interp_error(const interp *t); /* "" while healthy */
uint64_t interp_random(interp *t);         /* the interpreter's own generator, for choices that the seed should replay */

#endif
