/*
 * link.h - how ranks of several machines hear of each other: TCP in a star around rank 0, one connection a rank. Barriers,
 * failures, deaths, which calls were made, where a rank waits; never a byte of data.
 *
 *     rank r -> 0   came to barrier k, has made calls 1..s, failed, rank q died, rail gave up, question, answer, goodbye
 *     0 -> rank r   all came to barrier k,                  failed, rank q died, rail gave up, question, answer, goodbye
 *
 * Rank 0 hears of a death by the end of a connection without a goodbye, and tells the others; they hear of rank 0's in the
 * same way. Each rank has one thread that sleeps in a poll. What is to be said is kept as state, not as a queue, and put
 * into a connection's buffer when there is room: nothing grows with what others do or leave undone.
 */
#ifndef TIDE_LINK_H
#define TIDE_LINK_H

#include "fabric/fabric.h"

typedef struct fab_link fab_link;

/* What its rank is told, by the link's thread. None may wait for anything that a call of this page holds up. */
typedef struct fab_link_hooks {
    void (*passed)(void *context, uint32_t count); /* all ranks have come to this barrier */
    void (*gave_up)(void *context, uint64_t set_up, uint64_t rails); /* some rank of each of these; bit i: rail i */
    void (*failed)(void *context, const tide_failure *failure);
    void (*died)(void *context, uint32_t rank);
    bool (*has_left)(void *context, uint32_t rank); /* in order, as memory shared with it says; false: not known */
    void (*where)(void *context, uint64_t *call, uint64_t *op); /* this rank last waited */
} fab_link_hooks;

/* C  Connects all ranks; at most a minute, or the deadline. status: this rank's so far; all return alike, and in a failure
 * nothing stays open. */
int fab_link_meet(const fab_open *desc, int status, fab_link **out);
/* Starts the thread. */
int fab_link_start(fab_link *l, const fab_link_hooks *hooks, void *context);
/* In order: from here on its end is no death. May be called again. */
void fab_link_leave(fab_link *l);
/* The thread ends: after a leave, or as if this rank had died. Waits up to a second for the others to hear the goodbye.
 * What the rank wants said from now on is not. */
void fab_link_stop(fab_link *l);
void fab_link_free(fab_link *l); /* after a stop, or without a start; NULL is fine */

/* Which calls this rank has made: a running hash over the first `sequence`. */
typedef struct fab_link_calls { uint64_t sequence, hash; } fab_link_calls;
enum { FAB_LINK_EVERY = 64 }; /* sequences at which calls are compared */
/* At such a sequence. */
void fab_link_called(fab_link *l, const fab_link_calls *calls);
/* This rank has come to barrier `count`, counted from 1. */
void fab_link_barrier(fab_link *l, uint32_t count, const fab_link_calls *calls);
/* This rank has failed in this set-up, counted from 1 and alike on all ranks, of its rail. */
void fab_link_give_up(fab_link *l, uint64_t set_up, uint32_t rail);
/* This rank has failed: the others are told, unless they have told it. */
void fab_link_fail(fab_link *l, const tide_failure *failure);

/* Questions wait up to half a second for the answer, so not from the link's thread; false: none came. */
bool fab_link_where(fab_link *l, uint32_t rank, uint64_t *call, uint64_t *op);
/* The first rank that has not come to barrier `count`; UINT32_MAX: all have. */
bool fab_link_missing(fab_link *l, uint32_t count, uint32_t *rank);

/* ---- link_meet.c: how connections come about ---------------------------------------------------- */

/* C  sockets: of rank 0 n_ranks, [r] that of rank r, [0] -1; of the others one, that of rank 0. Non-blocking; a machine that
 * vanishes ends them within half a minute. */
int fab_link_connect(const fab_open *desc, int status, int *sockets);

#endif
