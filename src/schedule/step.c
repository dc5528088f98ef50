/*
 * step.c - FSDP2's order of a step.
 *
 *     forward   AG(i), then layer i; the next gather waits for the slot that layer i - 1 leaves
 *     backward  TIDE, In-Place    layer i, reshard, READ(i), AG(i - 2) into the slot just left, NET(i)
 *               TIDE, Slot-Reuse  AG(i - 1), layer i, STASH(i), READ(i), NET(i)
 *               stock             copy-out(i), AG(i - 1), layer i, pack(i), RS(i): one queue for all collectives
 *
 * The layer behind the last one of the forward pass stays gathered. After a layer's backward the compute stream waits
 * until the previous layer's gradients are no longer needed: FSDP2 frees them then.
 */
#include <math.h>

#include "schedule/step.h"

typedef struct writer {
    simulate_input in;
    simulate_call *calls;
    simulate_task *tasks;
    simulate_step *steps;
    simulate_gradients *gradients;
    uint32_t cap_calls, cap_tasks, cap_steps, cap_gradients;
    int status;
} writer;

static void put_step(writer *w, int part, uint32_t index)
{
    if (w->status == TIDE_OK)
        w->status = tide_grow(&w->steps, &w->cap_steps, (uint64_t)w->in.n_steps + 1, sizeof *w->steps);
    if (w->status == TIDE_OK)
        w->steps[w->in.n_steps++] = (simulate_step){part, index};
}

static uint32_t put_call(writer *w, int kind, uint32_t layer)
{
    if (w->status == TIDE_OK)
        w->status = tide_grow(&w->calls, &w->cap_calls, (uint64_t)w->in.n_calls + 1, sizeof *w->calls);
    if (w->status == TIDE_OK)
        w->calls[w->in.n_calls++] = (simulate_call){kind, layer % w->in.plan->n_groups};
    return w->in.n_calls - 1;
}

static uint32_t gather(writer *w, uint32_t layer)
{
    uint32_t call = put_call(w, SCHEDULE_AG, layer);
    put_step(w, SIMULATE_AG, call);
    return call;
}

static uint32_t put_task(writer *w, const simulate_task *task)
{
    if (w->status == TIDE_OK)
        w->status = tide_grow(&w->tasks, &w->cap_tasks, (uint64_t)w->in.n_tasks + 1, sizeof *w->tasks);
    if (w->status == TIDE_OK)
        w->tasks[w->in.n_tasks++] = *task;
    put_step(w, SIMULATE_TASK, w->in.n_tasks - 1);
    return w->in.n_tasks - 1;
}

static uint32_t compute(writer *w, const char *label, double seconds, simulate_after a, simulate_after b)
{
    simulate_task t = {.label = label, .stream = SIMULATE_COMPUTE, .after = {a, b}, .seconds = seconds};
    t.demand[SIMULATE_SM] = 1;
    return put_task(w, &t);
}

/* A layer's gradients, from its backward on. */
static void put_gradients(writer *w, uint64_t bytes, uint32_t task, simulate_after until)
{
    if (w->status == TIDE_OK)
        w->status = tide_grow(&w->gradients, &w->cap_gradients, (uint64_t)w->in.n_gradients + 1, sizeof *w->gradients);
    if (w->status == TIDE_OK)
        w->gradients[w->in.n_gradients++] = (simulate_gradients){bytes, task, until};
}

static simulate_after after(int event, uint32_t index)
{
    return (simulate_after){event, index};
}

/* ---- TIDE ------------------------------------------------------------------------------------------ */

static void write_tide(writer *w, const step_model *model, bool slot_reuse, uint64_t gradient_bytes)
{
    uint32_t n = model->layers, ready[2] = {0, 0}, before = 0, last = 0;
    const simulate_after nothing = {AFTER_NOTHING, 0};

    for (uint32_t i = 0; i < n; i++) {
        ready[i % 2] = gather(w, i);
        compute(w, "forward", model->forward, after(AFTER_READY, ready[i % 2]), nothing);
        if (i + 1 < n)
            put_step(w, SIMULATE_RELEASE, ready[i % 2]);
    }
    if (!slot_reuse && n > 1)
        ready[n % 2] = gather(w, n - 2);
    for (uint32_t i = n; i-- > 0;) {
        uint32_t rs = put_call(w, SCHEDULE_RS, i), task;
        if (slot_reuse && i > 0)
            ready[(i - 1) % 2] = gather(w, i - 1);
        task = compute(w, "backward", model->backward, after(AFTER_READY, ready[i % 2]), nothing);
        if (i + 1 < n) {
            uint32_t freed = compute(w, "gradients freed", 0, after(AFTER_READ_DONE, before), nothing);
            put_gradients(w, gradient_bytes, last, slot_reuse ? after(AFTER_READ_DONE, before) : after(AFTER_TASK, freed));
        }
        before = rs;
        last = task;
        if (slot_reuse) {
            before = put_call(w, SCHEDULE_STASH, i);
            put_step(w, SIMULATE_STASH, before);
        } else {
            put_step(w, SIMULATE_RELEASE, ready[i % 2]);
        }
        put_step(w, SIMULATE_READ, rs);
        if (!slot_reuse && i >= 2)
            ready[i % 2] = gather(w, i - 2);
        put_step(w, SIMULATE_NET, rs);
    }
    put_gradients(w, gradient_bytes, last, after(AFTER_READ_DONE, before));
}

/* ---- stock ------------------------------------------------------------------------------------------- */

double step_ring_seconds(const plan_machine *m, uint32_t nodes, uint32_t local, double bytes)
{
    double rate = nodes > 1 ? fmin(m->ring_rate, local * m->nic_rate) : m->ring_rate;
    return nodes * local > 1 ? bytes / rate : 0;
}

typedef struct stock {
    writer *w;
    const plan_machine *m;
    double shard, gathered, packed; /* bytes: of a shard, of a group, of the fp32 reduce-scatter input */
    double holds;
    uint32_t last_out; /* the copy-out that the next gather's output waits for, + 1 */
} stock;

static uint32_t ring(stock *s, const char *label, double bytes, simulate_after from)
{
    uint32_t nodes = s->w->in.plan->topology.nodes, local = s->w->in.plan->topology.local;
    simulate_task t = {.label = label, .stream = SIMULATE_RING_AG, .after = {from}, .holds = s->holds};
    t.seconds = step_ring_seconds(s->m, nodes, local, bytes);
    if (t.seconds > 0) {
        t.demand[SIMULATE_NVLINK_IN] = t.demand[SIMULATE_NVLINK_OUT] =
            fmin(1, bytes / (t.seconds * s->m->nvlink_rate));
        t.demand[SIMULATE_HBM] = fmin(1, 2 * bytes / (t.seconds * s->m->hbm_rate));
        if (nodes > 1)
            t.demand[SIMULATE_NIC_IN] = t.demand[SIMULATE_NIC_OUT] =
                fmin(1, bytes / local / (t.seconds * s->m->nic_rate));
    }
    t.demand[SIMULATE_SM] = s->m->ring_ctas / s->m->sms;
    return put_task(s->w, &t);
}

/* The next group's output buffer is made when the previous one has been copied out. */
static uint32_t stock_gather(stock *s)
{
    uint32_t n_ranks = s->w->in.plan->topology.nodes * s->w->in.plan->topology.local;
    simulate_task in = {.label = "copy-in", .stream = SIMULATE_COPY_IN, .seconds = 2 * s->shard / s->m->pack_rate};
    if (s->last_out)
        in.after[0] = after(AFTER_TASK, s->last_out - 1);
    return ring(s, "all-gather", s->shard * (n_ranks - 1), after(AFTER_TASK, put_task(s->w, &in)));
}

static void copy_out(stock *s, uint32_t gathered)
{
    s->last_out = 1 + compute(s->w, "copy-out", 2 * s->gathered / s->m->pack_rate, after(AFTER_TASK, gathered),
                              after(AFTER_NOTHING, 0));
}

static void write_stock(stock *s, const step_model *model)
{
    uint32_t n = model->layers, reduced = 0, gathered = 0;
    uint32_t n_ranks = s->w->in.plan->topology.nodes * s->w->in.plan->topology.local;
    const simulate_after nothing = {AFTER_NOTHING, 0};

    for (uint32_t i = 0; i < n; i++) {
        gathered = stock_gather(s);
        copy_out(s, gathered);
        compute(s->w, "forward", model->forward, nothing, nothing);
    }
    for (uint32_t i = n; i-- > 0;) {
        simulate_after pack_after = nothing;
        if (i + 1 < n)
            copy_out(s, gathered);
        if (i > 0)
            gathered = stock_gather(s);
        compute(s->w, "backward", model->backward, nothing, nothing);
        if (i + 1 < n)
            pack_after = after(AFTER_TASK, reduced);
        /* reads the gradients, writes them in fp32 */
        reduced = compute(s->w, "chunk-cat", (s->packed + s->packed / 2) / s->m->pack_rate, pack_after, nothing);
        reduced = ring(s, "reduce-scatter", s->packed / n_ranks * (n_ranks - 1), after(AFTER_TASK, reduced));
    }
}

/* ---- both ------------------------------------------------------------------------------------------------ */

static int run(writer *w, const step_model *model, step_result *out, tide_text *trace)
{
    double *seconds = NULL;

    if (w->status == TIDE_OK)
        seconds = tide_calloc(w->in.n_calls + 1, sizeof *seconds);
    if (w->status == TIDE_OK && !seconds)
        w->status = TIDE_ERR_MEMORY;
    out->simulated = (simulate_result){.call_seconds = seconds};
    w->in.calls = w->calls;
    w->in.tasks = w->tasks;
    w->in.steps = w->steps;
    w->in.gradients = w->gradients;
    if (w->status == TIDE_OK)
        w->status = simulate_run(&w->in, &out->simulated, trace);
    out->simulated.call_seconds = NULL;
    out->seconds = out->simulated.seconds;
    out->compute = model->layers * (model->forward + model->backward);
    out->exposed = out->seconds - out->compute;
    tide_free(seconds);
    tide_free(w->calls);
    tide_free(w->tasks);
    tide_free(w->steps);
    tide_free(w->gradients);
    return w->status;
}

static uint64_t gradient_bytes(const tide_plan *plan)
{
    const geo_group *g = &plan->groups[0].geo;
    return g->elements * g->ranks * (g->grad_dtype == TIDE_NONE ? 0 : tide_dtype_bytes(g->grad_dtype));
}

int step_tide(const tide_plan *plan, const plan_machine *m, const step_model *model, uint32_t rank, step_result *out,
              tide_text *trace)
{
    writer w = {.in = {.plan = plan, .machine = m, .rank = rank}};
    bool slot_reuse = plan->options.mode == 1 && !plan_shared_landing(plan);
    tide_bytes bytes = TIDE_BYTES_INIT;
    int status;

    *out = (step_result){0};
    status = tide_plan_bytes(plan, 0, &bytes);
    if (status != TIDE_OK)
        return status;
    /* the resident shards are the parameters themselves */
    out->live_bytes = bytes.total - bytes.resident + (slot_reuse ? 0 : gradient_bytes(plan));
    write_tide(&w, model, slot_reuse, gradient_bytes(plan));
    return run(&w, model, out, trace);
}

int step_stock(const tide_plan *plan, const plan_machine *m, const step_model *model, uint32_t rank, step_result *out,
               tide_text *trace)
{
    const geo_group *g = &plan->groups[0].geo;
    writer w = {.in = {.plan = plan, .machine = m, .rank = rank}};
    double slowdown = model->ring_slowdown > 0 ? model->ring_slowdown : 1 / (1 - m->ring_ctas / m->sms);
    stock s = {.w = &w,
               .m = m,
               .shard = (double)g->shard_bytes,
               .gathered = (double)g->shard_bytes * g->ranks,
               .packed = (double)g->elements * sizeof(float) * g->ranks,
               .holds = 1 - 1 / slowdown};

    *out = (step_result){0};
    /* unsharded parameters, the next group's gather, the previous layer's packed gradients (paper 5.4) */
    out->live_bytes = 2 * g->shard_bytes * g->ranks + g->elements * sizeof(float) * g->ranks;
    out->copies = model->layers * (4 * s.gathered + 1.5 * s.packed) / m->pack_rate;
    write_stock(&s, model);
    return run(&w, model, out, trace);
}
