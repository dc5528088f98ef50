/* rules_nccl_order.c - rules of what runs when: streams, the queue of a communicator; and of communicators that are aborted. */
#include <stdlib.h>

#include "cli/rules_nccl.h"

enum { HALF = NCCL_RULES_HALF };

/* ---- streams and the queue ------------------------------------------------------------------- */

/* A put goes when its stream comes to it, and what the stream does after a wait finds the data. */
static enum outcome rule_stream_order(nccl_side *r)
{
    MUST(nccl_rules_fill(r, 0, 4096, 21 + (unsigned)r->rank));
    MUST(nccl_rules_gate(r, 0, 0));
    GIVES(r->d->MemcpyAsync(r->memory.at + 8192, r->memory.at, 4096, r->stream[0]), CU_OK);
    NCCL_GIVES(nccl_rules_put(r, 0, r->next, 8192, HALF, 4096, 0, 0, 0), NCCL_OK);
    NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 0, 0, 1), NCCL_OK);
    GIVES(r->d->MemcpyAsync(r->memory.at + HALF + 8192, r->memory.at + HALF, 4096, r->stream[1]), CU_OK);
    MUST(nccl_rules_blocked(r, 0) && nccl_rules_blocked(r, 1) && nccl_rules_meet(r));
    nccl_rules_open(r, 0);
    MUST(nccl_rules_dry(r, 0) && nccl_rules_dry(r, 1));
    MUST(nccl_rules_holds(r, HALF + 8192, 4096, 21 + (unsigned)r->previous));
    return OK;
}

/* The stream writes over the source right behind the put. */
static enum outcome rule_source_reusable(nccl_side *r)
{
    for (unsigned i = 0; i < 8; i++) {
        MUST(nccl_rules_fill(r, 0, HALF, i + (unsigned)r->rank) && nccl_rules_meet(r));
        NCCL_GIVES(nccl_rules_put(r, 0, r->next, 0, HALF, HALF, 0, 0, 0), NCCL_OK);
        GIVES(r->d->MemsetD8Async(r->memory.at, 0xee, HALF, r->stream[0]), CU_OK);
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 0, 0, 0), NCCL_OK);
        MUST(nccl_rules_dry(r, 0) && nccl_rules_holds(r, HALF, HALF, i + (unsigned)r->previous) && nccl_rules_meet(r));
    }
    return OK;
}

/* The sender's stream has passed the put: is all of it at the receiver, which has waited for nothing? */
static enum outcome rule_delivered(nccl_side *r)
{
    bool there = true;
    for (unsigned i = 0; i < 8; i++) {
        MUST(nccl_rules_fill(r, 0, HALF, 50 + i) && nccl_rules_meet(r));
        NCCL_GIVES(nccl_rules_put(r, 0, r->next, 0, HALF, HALF, 0, 0, 0), NCCL_OK);
        MUST(nccl_rules_dry(r, 0) && nccl_rules_meet(r));
        there = there && nccl_rules_holds(r, HALF, HALF, 50 + i);
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 0, 0, 0), NCCL_OK);
        MUST(nccl_rules_dry(r, 0) && nccl_rules_holds(r, HALF, HALF, 50 + i) && nccl_rules_meet(r));
    }
    snprintf(r->note, sizeof r->note, there ? "it is there" : "it comes later");
    return OK;
}

/* Rank 0 waits on one stream, then puts on another; rank 1 signals when it is asked to. */
static enum outcome wait_then_put(nccl_side *r, int put_on, bool passes)
{
    if (r->rank == 0) {
        MUST(nccl_rules_fill(r, 0, 4096, 3));
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, 1, 0, 0, 0), NCCL_OK);
        NCCL_GIVES(nccl_rules_put(r, put_on, 1, 0, HALF, 4096, 0, 0, 1), NCCL_OK);
        if (passes)
            MUST(nccl_rules_dry(r, 1));
        else
            MUST(nccl_rules_blocked(r, 1));
        MUST(nccl_rules_blocked(r, 0) && nccl_rules_meet(r) && nccl_rules_meet(r));
        MUST(nccl_rules_dry(r, 0) && nccl_rules_dry(r, 1));
        return OK;
    }
    MUST(nccl_rules_meet(r));
    if (r->rank == 1) {
        MUST(nccl_rules_holds(r, HALF, 4096, 3) == passes);
        NCCL_GIVES(r->n->Signal(0, 0, 0, 0, r->comm[0], r->stream[0]), NCCL_OK);
        NCCL_GIVES(nccl_rules_wait(r, put_on, 1, 0, 0, 0, 0), NCCL_OK);
        MUST(nccl_rules_dry(r, 0) && nccl_rules_holds(r, HALF, 4096, 3));
    }
    MUST(nccl_rules_meet(r));
    return OK;
}
static enum outcome rule_wait_before_put(nccl_side *r) { return wait_then_put(r, 0, false); }
static enum outcome rule_wait_beside_put(nccl_side *r) { return wait_then_put(r, 1, true); }

/* An operation whose stream has not come to it holds up the communicator's later ones? */
static enum outcome rule_late_stream(nccl_side *r)
{
    if (r->rank == 0) {
        bool blocked;
        MUST(nccl_rules_gate(r, 0, 0));
        NCCL_GIVES(nccl_rules_put(r, 0, 1, 0, HALF, 64, 0, 0, 0), NCCL_OK);
        NCCL_GIVES(nccl_rules_put(r, 0, 1, 0, HALF, 64, 0, 1, 1), NCCL_OK);
        blocked = nccl_rules_blocked(r, 1);
        snprintf(r->note, sizeof r->note, blocked ? "it does" : "it does not");
        nccl_rules_open(r, 0);
        MUST(nccl_rules_dry(r, 0) && nccl_rules_dry(r, 1));
    }
    MUST(nccl_rules_meet(r));
    if (r->rank == 1) {
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, 0, 0, 0, 0), NCCL_OK);
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, 0, 0, 1, 0), NCCL_OK);
        MUST(nccl_rules_dry(r, 0));
    }
    return OK;
}

const nccl_rule nccl_rules_of_order[] = {
    {"puts and waits are in their stream's order", 1, rule_stream_order},
    {"the source may be written over behind the put", 1, rule_source_reusable},
    {"when the sender's stream has passed, the data", 1, rule_delivered},
    {"a put stands behind an earlier wait of its communicator", 1, rule_wait_before_put},
    {"another communicator's put does not", 2, rule_wait_beside_put},
    {NULL, 0, NULL},
};

/* ---- aborts: a breach may leave nothing that can be used, so they stand last, as does what may hang ---- */

/* All ranks abort communicator 0, at rest; the same memory and streams serve again. */
static enum outcome abort_and_again(nccl_side *r)
{
    nccl_config config = nccl_rules_config();
    nccl_result result = NCCL_OK;
    enum outcome o;
    double ms = 0;

    if (r->comm[0]) {
        MUST(nccl_rules_abort(r, 0, &result, &ms));
        NCCL_GIVES(result, NCCL_OK);
    }
    if (!r->note[0])
        snprintf(r->note, sizeof r->note, "%.0f ms", ms);
    MUST(nccl_rules_clear(r) && nccl_rules_meet(r));
    o = nccl_rules_init(r, 0, &config);
    if (o == OK)
        o = nccl_rules_register(r, 0);
    if (o != OK)
        return o;
    MUST(nccl_rules_fill(r, 0, 4096, 17 + (unsigned)r->rank));
    NCCL_GIVES(nccl_rules_put(r, 0, r->next, 0, HALF, 4096, 0, 0, 0), NCCL_OK);
    NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 0, 0, 0), NCCL_OK);
    MUST(nccl_rules_dry(r, 0) && nccl_rules_holds(r, HALF, 4096, 17 + (unsigned)r->previous));
    return OK;
}

/* Rank 0 aborts while its stream stands in a wait: it is freed, or the abort waits until the signal has come. Either will
 * do, as the fabric aborts no communicator with such a stream; that the signal still comes may not be otherwise. */
static enum outcome rule_abort_in_wait(nccl_side *r)
{
    nccl_rules_call *abort = NULL;
    bool freed = false;
    int64_t began;

    if (r->rank == 0) {
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, 1, 0, 0, 0), NCCL_OK);
        MUST(nccl_rules_blocked(r, 0));
        MUST((abort = nccl_rules_begin_abort(r, 0)) != NULL);
        freed = nccl_rules_ended(abort, 20 * r->w->grace_ms);
    }
    MUST(nccl_rules_meet(r));
    if (r->rank == 1) {
        NCCL_GIVES(r->n->Signal(0, 0, 0, 0, r->comm[0], r->stream[0]), NCCL_OK);
        MUST(nccl_rules_dry(r, 0));
    }
    MUST(nccl_rules_meet(r));
    if (r->rank == 0) {
        began = tide_now_ns();
        bool dry = nccl_rules_dry(r, 0);
        if (!nccl_rules_ended(abort, NCCL_RULES_ABORT_MS)) {
            r->w->spoiled = true;
            snprintf(r->why, sizeof r->why, "the abort has not returned %d ms after the signal; the stream %s",
                     NCCL_RULES_ABORT_MS, dry ? "is at rest" : "stands for good");
            return FAILED;
        }
        snprintf(r->note, sizeof r->note, freed ? "it frees the stream" : "it waits for the signal, and returns %.0f ms later",
                 nccl_rules_ms(began));
        NCCL_GIVES(nccl_rules_end_call(abort), NCCL_OK);
        MUST(dry);
    }
    MUST(nccl_rules_meet(r));
    return abort_and_again(r);
}

/* Rank 0 registers a window that the others never come to, and aborts. The fabric leaves both calls to themselves when they
 * do not return. */
static enum outcome rule_abort_registration(nccl_side *r)
{
    nccl_config config = nccl_rules_config();
    nccl_rules_call *enlist = NULL, *abort = NULL;
    enum outcome o = nccl_rules_init(r, 0, &config);

    if (o != OK)
        return o;
    if (r->rank == 0) {
        MUST((enlist = nccl_rules_begin_register(r, 0)) != NULL);
        MUST(!nccl_rules_ended(enlist, 100)); /* long inside: an abort before it would take the communicator away */
        MUST((abort = nccl_rules_begin_abort(r, 0)) != NULL);
        bool back = nccl_rules_ended(abort, NCCL_RULES_ABORT_MS), let_go = nccl_rules_ended(enlist, NCCL_RULES_ABORT_MS);
        if (!back || !let_go)
            r->w->spoiled = true;
        snprintf(r->note, sizeof r->note, "the abort %s, the registration %s", back ? "returns" : "does not return",
                 let_go ? "is let go" : "stands for good");
        if (back)
            NCCL_GIVES(nccl_rules_end_call(abort), NCCL_OK);
        if (let_go)
            MUST(nccl_rules_end_call(enlist) != NCCL_OK);
    }
    MUST(nccl_rules_meet(r));
    if (r->rank != 0) { /* finalizing would wait for the rank that has aborted: a failed communicator is aborted by all */
        nccl_result result;
        double ms;
        nccl_rules_abort(r, 0, &result, &ms);
    }
    return OK;
}

const nccl_rule nccl_rules_of_aborts[] = {
    {"a communicator at rest is aborted", 1, abort_and_again},
    {"a late stream holds up its communicator", 1, rule_late_stream},
    {"an abort while a stream stands in a wait", 1, rule_abort_in_wait},
    {"an abort while a registration waits for the others", 0, rule_abort_registration},
    {NULL, 0, NULL},
};
