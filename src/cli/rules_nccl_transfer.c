/* rules_nccl_transfer.c - rules of puts, signals and waits: what comes, what is counted, what is refused. */
#include "cli/rules_nccl.h"

enum { HALF = NCCL_RULES_HALF };

/* Every rank puts to the next one of the ring and waits for the one before. */
static enum outcome rule_put(nccl_side *r)
{
    MUST(nccl_rules_fill(r, 0, HALF, (unsigned)r->rank));
    NCCL_GIVES(nccl_rules_put(r, 0, r->next, 0, HALF, HALF, 0, 0, 0), NCCL_OK);
    NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 0, 0, 0), NCCL_OK);
    MUST(nccl_rules_dry(r, 0));
    MUST(nccl_rules_holds(r, HALF, HALF, (unsigned)r->previous));
    return OK;
}

/* Odd places and lengths, to all peers. */
static enum outcome rule_put_to_all(nccl_side *r)
{
    enum { EACH = 10007 };

    MUST(nccl_rules_fill(r, 3, EACH, 90 + (unsigned)r->rank));
    NCCL_GROUP;
    for (int i = 0; i < r->ranks; i++)
        if (i != r->rank)
            NCCL_GIVES(nccl_rules_put(r, 0, i, 3, HALF + 1 + (uint64_t)r->rank * EACH, EACH, 0, 0, 0), NCCL_OK);
    NCCL_GROUP_END(NCCL_OK);
    for (int i = 0; i < r->ranks; i++)
        if (i != r->rank)
            NCCL_GIVES(nccl_rules_wait(r, 0, 1, i, 0, 0, 0), NCCL_OK);
    MUST(nccl_rules_dry(r, 0));
    for (int i = 0; i < r->ranks; i++)
        if (i != r->rank)
            MUST(nccl_rules_holds(r, HALF + 1 + (uint64_t)i * EACH, EACH, 90 + (unsigned)i));
    return OK;
}

static enum outcome rule_contexts(nccl_side *r)
{
    MUST(nccl_rules_fill(r, 0, 100000, 11 + (unsigned)r->rank));
    MUST(nccl_rules_fill(r, 200000, 100000, 77 + (unsigned)r->rank));
    NCCL_GROUP;
    NCCL_GIVES(nccl_rules_put(r, 0, r->next, 0, HALF, 100000, 0, 0, 0), NCCL_OK);
    NCCL_GIVES(nccl_rules_put(r, 0, r->next, 200000, HALF + 200000, 100000, 0, 1, 0), NCCL_OK);
    NCCL_GROUP_END(NCCL_OK);
    NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 0, 1, 0), NCCL_OK);
    MUST(nccl_rules_dry(r, 0));
    MUST(nccl_rules_holds(r, HALF + 200000, 100000, 77 + (unsigned)r->previous));
    NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 0, 0, 0), NCCL_OK);
    MUST(nccl_rules_dry(r, 0));
    MUST(nccl_rules_holds(r, HALF, 100000, 11 + (unsigned)r->previous));
    return OK;
}

/* A wait stands until its own index of its own context is signalled; the others keep for theirs. */
static enum outcome rule_separate(nccl_side *r)
{
    if (r->rank == 0) {
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, 1, 0, 0, 0), NCCL_OK);
        MUST(nccl_rules_meet(r) && nccl_rules_blocked(r, 0) && nccl_rules_meet(r));
        MUST(nccl_rules_meet(r) && nccl_rules_dry(r, 0));
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, 1, 1, 0, 0), NCCL_OK);
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, 1, 0, 1, 0), NCCL_OK);
        MUST(nccl_rules_dry(r, 0));
        return OK;
    }
    if (r->rank == 1) {
        NCCL_GIVES(nccl_rules_put(r, 0, 0, 0, HALF, 8, 1, 0, 0), NCCL_OK);
        NCCL_GIVES(r->n->Signal(0, 0, 1, 0, r->comm[0], r->stream[0]), NCCL_OK);
        MUST(nccl_rules_dry(r, 0));
    }
    MUST(nccl_rules_meet(r) && nccl_rules_meet(r));
    if (r->rank == 1) {
        NCCL_GIVES(r->n->Signal(0, 0, 0, 0, r->comm[0], r->stream[0]), NCCL_OK);
        MUST(nccl_rules_dry(r, 0));
    }
    MUST(nccl_rules_meet(r));
    return OK;
}

/* A wait for two stands at one. */
static enum outcome rule_two_counts(nccl_side *r)
{
    if (r->rank == 0) {
        NCCL_GIVES(nccl_rules_wait(r, 0, 2, 1, 0, 0, 0), NCCL_OK);
        MUST(nccl_rules_meet(r) && nccl_rules_blocked(r, 0) && nccl_rules_meet(r));
        MUST(nccl_rules_dry(r, 0));
        return OK;
    }
    for (int i = 0; i < 2; i++) {
        if (r->rank == 1) {
            NCCL_GIVES(nccl_rules_put(r, 0, 0, 0, HALF, 64, 0, 0, 0), NCCL_OK);
            MUST(nccl_rules_dry(r, 0));
        }
        if (i == 0)
            MUST(nccl_rules_meet(r) && nccl_rules_meet(r));
    }
    return OK;
}

/* Nothing is reset: five are used up by waits for two, one and two; the next wait stands. What came before its wait counts. */
static enum outcome rule_counts_stay(nccl_side *r)
{
    if (r->rank == 1) {
        for (int i = 0; i < 5; i++)
            NCCL_GIVES(r->n->Signal(0, 0, 0, 0, r->comm[0], r->stream[0]), NCCL_OK);
        MUST(nccl_rules_dry(r, 0));
    }
    MUST(nccl_rules_meet(r));
    if (r->rank == 0) {
        for (int count = 2; count; count = count == 2 ? 1 : 0)
            NCCL_GIVES(nccl_rules_wait(r, 0, count, 1, 0, 0, 0), NCCL_OK);
        NCCL_GIVES(nccl_rules_wait(r, 0, 2, 1, 0, 0, 0), NCCL_OK);
        MUST(nccl_rules_dry(r, 0));
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, 1, 0, 0, 0), NCCL_OK);
        MUST(nccl_rules_blocked(r, 0));
    }
    MUST(nccl_rules_meet(r));
    if (r->rank == 1)
        NCCL_GIVES(r->n->Signal(0, 0, 0, 0, r->comm[0], r->stream[0]), NCCL_OK);
    MUST(nccl_rules_dry(r, 0));
    return OK;
}

/* What was put to a peer on a context before a signal on it is there when the signal is. */
static enum outcome rule_signal_behind_data(nccl_side *r)
{
    MUST(nccl_rules_fill(r, 0, HALF, 5 + (unsigned)r->rank));
    NCCL_GROUP;
    NCCL_GIVES(nccl_rules_put(r, 0, r->next, 0, HALF, HALF, 0, 1, 0), NCCL_OK);
    NCCL_GIVES(r->n->Signal(r->next, 1, 1, 0, r->comm[0], r->stream[0]), NCCL_OK);
    NCCL_GROUP_END(NCCL_OK);
    NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 1, 1, 0), NCCL_OK);
    MUST(nccl_rules_dry(r, 0) && nccl_rules_holds(r, HALF, HALF, 5 + (unsigned)r->previous));
    return OK;
}

/* As many puts in a group as the fabric makes, on both contexts; one wait with two descriptors for all of them. */
static enum outcome rule_group_of_puts(nccl_side *r)
{
    enum { PUTS = 32, EACH = 3000 };
    nccl_wait_desc d[2] = {{PUTS / 2, r->previous, 0, 0}, {PUTS / 2, r->previous, 0, 1}};

    for (uint64_t i = 0; i < PUTS; i++)
        MUST(nccl_rules_fill(r, i * EACH, EACH, (unsigned)i + 3 * (unsigned)r->rank));
    NCCL_GROUP;
    for (uint64_t i = 0; i < PUTS; i++)
        NCCL_GIVES(nccl_rules_put(r, 0, r->next, i * EACH, HALF + (PUTS - 1 - i) * EACH, EACH, 0, i % 2, 0), NCCL_OK);
    NCCL_GROUP_END(NCCL_OK);
    NCCL_GIVES(r->n->WaitSignal(2, d, r->comm[0], r->stream[0]), NCCL_OK);
    MUST(nccl_rules_dry(r, 0));
    for (uint64_t i = 0; i < PUTS; i++)
        MUST(nccl_rules_holds(r, HALF + (PUTS - 1 - i) * EACH, EACH, (unsigned)i + 3 * (unsigned)r->previous));
    return OK;
}

/* Many in a row: every count is its own call's, and how long one takes. */
static enum outcome rule_many(nccl_side *r)
{
    enum { ROUNDS = 200 };
    int64_t began;

    MUST(nccl_rules_fill(r, 0, ROUNDS * 8, 60 + (unsigned)r->rank));
    MUST(nccl_rules_meet(r));
    began = tide_now_ns();
    for (uint64_t i = 0; i < ROUNDS; i++) {
        int ctx = i % 2, sig = i / 2 % 2;
        NCCL_GIVES(nccl_rules_put(r, 0, r->next, i * 8, HALF + i * 8, 8, sig, ctx, 0), NCCL_OK);
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, sig, ctx, 0), NCCL_OK);
    }
    MUST(nccl_rules_dry(r, 0));
    snprintf(r->note, sizeof r->note, "%.0f us a put and wait of 8 bytes", nccl_rules_ms(began) * 1000 / ROUNDS);
    MUST(nccl_rules_holds(r, HALF, ROUNDS * 8, 60 + (unsigned)r->previous));
    return OK;
}

/* ---- what is refused, and does no harm ------------------------------------------------------- */

static enum outcome rule_refused(nccl_side *r)
{
    const void *local = (const void *)(uintptr_t)r->memory.at;
    nccl_comm c = r->comm[0];
    cu_stream s = r->stream[0];
    nccl_window w = r->window[0];
    nccl_wait_desc good = {1, r->previous, 0, 0}, d = good;

    NCCL_GIVES(r->n->PutSignal(local, 64, NCCL_UINT8, r->next, w, HALF, 0, NCCL_RULES_CONTEXTS, 0, c, s), NCCL_INVALID_ARGUMENT);
    MUST(*r->n->GetLastError(c));
    NCCL_GIVES(r->n->PutSignal(local, 64, NCCL_UINT8, r->next, w, HALF, 0, -1, 0, c, s), NCCL_INVALID_ARGUMENT);
    NCCL_GIVES(r->n->PutSignal(local, 64, NCCL_UINT8, r->next, w, HALF, NCCL_RULES_SIGNALS, 0, 0, c, s), NCCL_INVALID_ARGUMENT);
    NCCL_GIVES(r->n->PutSignal(local, 64, NCCL_UINT8, r->next, w, HALF, 0, 0, 1, c, s), NCCL_INVALID_ARGUMENT);
    NCCL_GIVES(r->n->PutSignal(local, 64, NCCL_UINT8, r->next, NULL, HALF, 0, 0, 0, c, s), NCCL_INVALID_ARGUMENT);
    NCCL_GIVES(r->n->PutSignal(NULL, 64, NCCL_UINT8, r->next, w, HALF, 0, 0, 0, c, s), NCCL_INVALID_ARGUMENT);
    NCCL_GIVES(r->n->Signal(r->next, 0, NCCL_RULES_CONTEXTS, 0, c, s), NCCL_INVALID_ARGUMENT);
    NCCL_GIVES(r->n->Signal(r->next, NCCL_RULES_SIGNALS, 0, 0, c, s), NCCL_INVALID_ARGUMENT);
    NCCL_GIVES(r->n->Signal(r->next, 0, 0, 1, c, s), NCCL_INVALID_ARGUMENT);
    NCCL_GIVES(r->n->WaitSignal(0, &d, c, s), NCCL_INVALID_ARGUMENT);
    d.op_count = 0;
    NCCL_GIVES(r->n->WaitSignal(1, &d, c, s), NCCL_INVALID_ARGUMENT);
    d = good, d.ctx = NCCL_RULES_CONTEXTS;
    NCCL_GIVES(r->n->WaitSignal(1, &d, c, s), NCCL_INVALID_ARGUMENT);
    d = good, d.sig = NCCL_RULES_SIGNALS;
    NCCL_GIVES(r->n->WaitSignal(1, &d, c, s), NCCL_INVALID_ARGUMENT);
    MUST(nccl_rules_dry(r, 0));
    return rule_put(r); /* none the worse */
}

/* Memory of the device that is in no window. */
static enum outcome rule_foreign_source(nccl_side *r)
{
    MUST(nccl_rules_memory(r, NULL, &r->extra));
    NCCL_GIVES(r->n->PutSignal((const void *)(uintptr_t)r->extra.at, 64, NCCL_UINT8, r->next, r->window[0], HALF, 0, 0, 0,
                               r->comm[0], r->stream[0]),
               NCCL_INVALID_ARGUMENT);
    return rule_put(r);
}

/* What comes of a group in which a call was refused. */
static enum outcome rule_refused_in_group(nccl_side *r)
{
    bool went;

    MUST(nccl_rules_fill(r, 0, 64, 33) && nccl_rules_meet(r));
    NCCL_GROUP;
    NCCL_GIVES(nccl_rules_put(r, 0, r->next, 0, HALF, 64, 1, 1, 0), NCCL_OK);
    NCCL_GIVES(nccl_rules_put(r, 0, r->next, 0, HALF, 64, 0, NCCL_RULES_CONTEXTS, 0), NCCL_INVALID_ARGUMENT);
    r->grouped = false;
    nccl_result result = r->n->GroupEnd();
    MUST(nccl_rules_dry(r, 0) && nccl_rules_meet(r));
    nccl_rules_pause(r);
    went = nccl_rules_holds(r, HALF, 64, 33);
    MUST(nccl_rules_meet(r));
    snprintf(r->note, sizeof r->note, "its end gives %d, its put %s", result, went ? "goes" : "does not go");
    return rule_put(r);
}

/* Bytes behind the window, within the allocation. */
static enum outcome rule_outside_window(nccl_side *r)
{
    nccl_config config = nccl_rules_config();
    enum outcome o = nccl_rules_init(r, 0, &config);
    nccl_result result;

    if (o != OK)
        return o;
    NCCL_GIVES(r->n->CommWindowRegister(r->comm[0], (void *)(uintptr_t)r->memory.at, HALF, &r->window[0], NCCL_WIN_SYMMETRIC),
               NCCL_OK);
    MUST(r->window[0]);
    result = nccl_rules_put(r, 0, r->next, 0, HALF - 32, 64, 0, 0, 0);
    snprintf(r->note, sizeof r->note, result == NCCL_OK ? "accepted" : "refused");
    if (result == NCCL_OK)
        NCCL_GIVES(nccl_rules_wait(r, 0, 1, r->previous, 0, 0, 0), NCCL_OK);
    MUST(nccl_rules_dry(r, 0));
    return OK;
}

const nccl_rule nccl_rules_of_transfers[] = {
    {"a put and its wait deliver", 1, rule_put},
    {"puts to all peers, from and to odd places", 1, rule_put_to_all},
    {"two contexts, each with its own signal", 1, rule_contexts},
    {"a wait hears its own index of its own context", 1, rule_separate},
    {"a wait for two stands at one", 1, rule_two_counts},
    {"counts are used up in order and never reset", 1, rule_counts_stay},
    {"a signal comes behind what was put before it on its context", 1, rule_signal_behind_data},
    {"32 puts in a group, one wait for all", 1, rule_group_of_puts},
    {"many in a row", 1, rule_many},
    {"contexts, signals, flags, counts and sources that are none are refused", 1, rule_refused},
    {"a source in no window is refused", 1, rule_foreign_source},
    {"a group in which a call was refused", 1, rule_refused_in_group},
    {"a put beyond the window", 0, rule_outside_window},
    {NULL, 0, NULL},
};
