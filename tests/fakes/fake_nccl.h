/*
 * fake_nccl.h - NCCL without a network, to be put under the function table (nccl_library_fake), on top of the fake driver.
 *
 * Ranks are threads of one process; each has the fake device whose context is current when it makes its communicator. A
 * communicator is one serial queue, whatever streams its calls name: an operation runs when its stream has come to it and
 * the communicator's earlier operations have ended. A stream stands in a put until it is delivered. The puts and signals of
 * a group are one operation, in which order holds for one peer and context only; every wait is an operation of its own.
 * Signals are counted for each (peer, signal, context) and never reset. What the seed of the fake driver decides: the order
 * among peers and contexts, how a put's bytes are cut up, when it comes to pass.
 *
 * Making a communicator, registering a window and finalizing wait for all ranks of the communicator, without a limit: when
 * one does not come, the others stand there until their communicator is aborted, or until fake_nccl_stop. Aborting does not
 * free a stream that stands in a wait, and does not return before that stream has gone on, as seen with GPUs of one machine.
 *
 * It refuses what NCCL refuses, each of which has a contract test that also runs on a real NCCL (`tide nccl-rules`). What
 * NCCL leaves undefined or this project forbids is a complaint of the fake driver: work on the legacy stream, a call without the communicator's context, two streams in one group, a call while another thread's
 * group holds operations of the communicator, a put of nothing, more puts in a group than a network card holds, windows
 * that outlive their memory or their communicator, a put into what the peer has given up.
 */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include "fake_cuda.h"
#include "fabric/nccl/library.h"

enum { FAKE_NCCL_MAX_RANKS = 32, FAKE_NCCL_IN_FLIGHT = 128 }; /* puts of a group that a network card holds */

typedef struct fake_nccl_options {
    int version;
    uint32_t delay;      /* a put or signal is put off by at most so many steps of the scheduler */
    bool null_windows;   /* no symmetric memory: registering succeeds and gives NULL */
    bool no_host_rma;    /* communicators without one-sided calls */
    bool shared_devices; /* ranks of a communicator may be on one device */
    bool abort_releases; /* an abort ends what streams stand in; else it does not return before that has ended by itself */
} fake_nccl_options;
#define FAKE_NCCL_OPTIONS ((fake_nccl_options){NCCL_OLDEST, 0, false, false, false, false})

/* Between fake_cuda_start and fake_cuda_stop. The table is good until stop. */
const nccl_library *fake_nccl_start(const fake_nccl_options *options);
/* Ends it: calls that stand somewhere return NCCL_INTERNAL_ERROR, blocked streams go free, then it waits until no call is
 * inside. Returns the number of leaks, after a line on stderr. */
int fake_nccl_stop(void);
/* Communicators, windows, open groups; text may be NULL: "2 communicators, 1 windows". */
int fake_nccl_leaks(char *text, size_t bytes);

/* ---- faults: each replaces the earlier one of its kind; n = 0: none ---- */

/* From now on the n-th call (1: next) fails, which `function` ("ncclPutSignal"; NULL: any) says. A call that gives something
 * back does so nevertheless; one that waits for other ranks does not come to them. GetErrorString, GetLastError and
 * CommGetAsyncError do not count. */
void fake_nccl_fail(const char *function, uint64_t n, nccl_result result);
/* The n-th call stands still until stop, before it has done anything. */
void fake_nccl_hang(const char *function, uint64_t n);
/* The n-th put or signal from now on is delivered, but its stream stands in it for good. */
void fake_nccl_lose_completion(uint64_t n);
/* The n-th put or signal arrives, but the receiver never counts it. */
void fake_nccl_lose_signal(uint64_t n);
/* When the n-th operation from now on would end, its communicator has the asynchronous error instead and stands still. */
void fake_nccl_async_error(uint64_t n, nccl_result result);
bool fake_nccl_failed(void);     /* a fault of any kind has come */
uint64_t fake_nccl_calls(void);  /* that counted, since start */

#endif
