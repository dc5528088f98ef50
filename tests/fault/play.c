/* play.c - what one rank does in a case: holds things, gets into trouble, and looks at what came of it. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../harness/processes.h"
#include "../harness/small.h"
#include "comm/comm.h"
#include "fault.h"

enum { WORK_GROUPS = 3, ROUNDS = 6, STRANGE_ROUND = 2, ALL = (1 << SMALL_PARAMS) - 1 };

/* What a group has brought about, and a copy of it. */
typedef struct outputs {
    tide_tensor landing[SMALL_PARAMS];
    void *copy[SMALL_PARAMS];
    float *out, *out_copy;
    size_t out_bytes;
} outputs;

typedef struct player {
    const fault_row *row;
    fault_report *report;
    threads_rank numbers; /* rank and n_ranks, for small_init */
    tide_allgather_fn gather;
    void *gather_context;
    bool victim, same; /* same: no longer different from the others */
    tide_comm *other, *comm;
    small_layer other_layer, kept_layer, work_layers[WORK_GROUPS];
    tide_group *other_group, *kept_group, *work[WORK_GROUPS];
    outputs other_outputs, kept_outputs;
    int64_t due;
} player;

static int wrong(player *p, const char *what)
{
    if (!p->report->wrong[0])
        snprintf(p->report->wrong, sizeof p->report->wrong, "%s (%.100s)", what, tide_last_error());
    return TIDE_ERR_INTERNAL;
}

/* The victim's end, or a pause in its life, if this is when the row says. */
static void strike(const player *p, int when, uint64_t at)
{
    if (!p->victim || p->row->when != when || at != (uint64_t)p->row->at)
        return;
    if (p->row->what == WHAT_EXIT)
        _exit(0);
    if (p->row->what == WHAT_KILL || p->row->what == WHAT_STOP)
        raise(p->row->what == WHAT_KILL ? SIGKILL : SIGSTOP);
}

/* The others are past what needs nobody's answer. */
static void strike_later(const player *p, int when, uint64_t at)
{
    struct timespec pause = {0, 20000000};
    if (p->victim && p->row->when == when)
        nanosleep(&pause, NULL);
    strike(p, when, at);
}

static int doze_and_sync(tide_comm *comm)
{
    struct timespec pause = {0, 1000000};
    nanosleep(&pause, NULL);
    return tide_comm_sync(comm);
}

/* All ranks are here. */
static int together(player *p)
{
    char in = 0, out[FAULT_RANKS];
    return p->gather(p->gather_context, &in, out, 1) == 0 ? TIDE_OK : TIDE_ERR_SYSTEM;
}

static int counted_gather(void *context, const void *in, void *out, size_t bytes)
{
    player *p = context;
    int status = p->gather(p->gather_context, in, out, bytes);
    if (++p->report->gathers == (uint32_t)p->row->at)
        strike_later(p, WHEN_GATHER, p->report->gathers);
    return status;
}

static void on_item(void *context, const char *phase)
{
    player *p = context;
    if (p->row->phase && (!phase || strcmp(phase, p->row->phase) != 0))
        return;
    strike(p, WHEN_ITEM, atomic_fetch_add(&p->report->items, 1) + 1);
}

static int fail_call(void) { return ENOMEM; }
static int kill_at_call(void) { return raise(SIGKILL); }
static int stop_at_call(void) { return raise(SIGSTOP); }

/* ---- what is held ------------------------------------------------------------------------------- */

static int open_comm(player *p, const tide_options *options, uint32_t node_size, tide_allgather_fn gather,
                     void *context, tide_comm **out)
{
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    desc.rank = p->numbers.rank;
    desc.n_ranks = p->numbers.n_ranks;
    desc.node_size = node_size;
    desc.allgather = gather;
    desc.allgather_context = context;
    desc.options = options;
    return tide_comm_create(&desc, out);
}

static int gather_once(player *p, const small_layer *layer, tide_group *group, bool hold)
{
    int status = tide_all_gather(group, NULL, NULL);
    if (status == TIDE_OK)
        status = tide_wait(group, TIDE_READY, NULL);
    if (status == TIDE_OK && small_wrong_params(layer, group) != 0) {
        status = comm_enter_group(group); /* a failure takes the tensors away */
        return status == TIDE_OK ? wrong(p, "gathered bytes") : status;
    }
    return status == TIDE_OK && !hold ? tide_slot_release(group, NULL) : status;
}

static int scatter_once(player *p, const small_layer *layer, tide_group *group, int call, unsigned present, float *out)
{
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
    void *grads[SMALL_PARAMS];
    int status, fail = p->victim && p->row->late ? 1 : 0;

    small_grads(layer, call, TIDE_BF16, present, grads);
    args.grads = (const void *const *)grads;
    args.out = out;
    args.alpha = 0.5f;
    do {
        tide_alloc_fail_at((uint64_t)fail);
        status = tide_reduce_scatter(group, &args, NULL);
        tide_alloc_fail_at(0);
        if (status == TIDE_ERR_MEMORY && fail) {
            p->report->code = status;
            p->report->refused++;
            snprintf(p->report->text, sizeof p->report->text, "%s", tide_last_error());
        }
    } while (status == TIDE_ERR_MEMORY && fail++);
    if (status == TIDE_OK)
        status = tide_wait(group, TIDE_DONE, NULL);
    if (status == TIDE_OK && small_wrong_output(layer, call, present, 0.5f, 0.0f, out) != 0)
        status = wrong(p, "sums");
    small_free(grads);
    return status;
}

static size_t output_bytes(const small_layer *layer)
{
    size_t n = 0;
    for (uint32_t i = 0; i < SMALL_PARAMS; i++)
        n += small_shard(layer, i) * sizeof(float);
    return n;
}

/* Makes a set of one group, uses it, keeps what comes out. */
static int hold_outputs(player *p, tide_comm *comm, small_layer *layer, const char *name, tide_group **group,
                        outputs *o)
{
    int status;

    small_init(layer, &p->numbers, name, TIDE_BF16, TIDE_BF16, TIDE_BF16, 5);
    status = tide_groups_create(comm, &layer->desc, 1, group);
    if (status == TIDE_OK)
        status = small_adopt(layer, *group);
    o->out_bytes = output_bytes(layer);
    o->out = malloc(o->out_bytes);
    o->out_copy = malloc(o->out_bytes);
    if (status == TIDE_OK)
        status = gather_once(p, layer, *group, true);
    if (status == TIDE_OK)
        status = scatter_once(p, layer, *group, 1, ALL, o->out);
    for (uint32_t i = 0; i < SMALL_PARAMS && status == TIDE_OK; i++) {
        o->landing[i].size = sizeof o->landing[i];
        status = tide_group_tensor(*group, TIDE_TENSOR_PARAM, i, &o->landing[i]);
        if (status == TIDE_OK) {
            o->copy[i] = malloc(o->landing[i].bytes);
            memcpy(o->copy[i], o->landing[i].data, o->landing[i].bytes);
        }
    }
    if (status == TIDE_OK)
        memcpy(o->out_copy, o->out, o->out_bytes);
    return status;
}

static bool outputs_intact(const outputs *o)
{
    bool intact = !o->copy[SMALL_PARAMS - 1] || memcmp(o->out, o->out_copy, o->out_bytes) == 0;
    for (uint32_t i = 0; i < SMALL_PARAMS; i++)
        intact = intact && (!o->copy[i] || memcmp(o->landing[i].data, o->copy[i], o->landing[i].bytes) == 0);
    return intact;
}

static void outputs_drop(outputs *o)
{
    for (uint32_t i = 0; i < SMALL_PARAMS; i++)
        free(o->copy[i]);
    free(o->out);
    free(o->out_copy);
    memset(o, 0, sizeof *o);
}

/* ---- set-up ------------------------------------------------------------------------------------- */

static bool differs(const player *p, int how)
{
    return p->victim && !p->same && p->row->what == WHAT_DIFFER && p->row->which == how;
}

static void describe_work(player *p, tide_group_desc descs[WORK_GROUPS])
{
    static const char *const names[WORK_GROUPS] = {"first", "second", "third"};
    for (int i = 0; i < WORK_GROUPS; i++) {
        small_layer *layer = &p->work_layers[i];
        small_init(layer, &p->numbers, names[i], TIDE_BF16, TIDE_BF16, TIDE_BF16, i);
        if (p->row->large) {
            layer->params[2].dims[0] = 512;
            layer->params[2].dims[1] = 384;
        }
        descs[i] = layer->desc;
    }
    if (differs(p, DIFFER_EXTENT))
        p->work_layers[1].params[2].dims[1]++;
    if (differs(p, DIFFER_DTYPE))
        descs[1].dtype = descs[1].shard_dtype = TIDE_F16;
    if (differs(p, DIFFER_NAME))
        descs[1].name = "another";
}

static int set_up(player *p)
{
    tide_options options = TIDE_OPTIONS_INIT;
    tide_group_desc descs[WORK_GROUPS];
    uint32_t node_size = p->row->local;
    int status;

    options.deadline_ms = p->row->deadline_ms ? p->row->deadline_ms : 20000;
    options.head_bytes = p->row->large ? options.head_bytes : 64;
    options.chunk = p->row->large ? options.chunk : 32;
    if (differs(p, DIFFER_OPTION))
        options.n_stg = 3;
    if (differs(p, DIFFER_NODE_SIZE))
        node_size = p->numbers.n_ranks;
    status = open_comm(p, &options, node_size, counted_gather, p, &p->comm);
    if (status == TIDE_OK)
        status = hold_outputs(p, p->comm, &p->kept_layer, "kept", &p->kept_group, &p->kept_outputs);
    if (status != TIDE_OK)
        return status;
    if (p->victim && p->row->when == WHEN_RAIL && p->row->what == WHAT_RAIL)
        fab_host_inject(p->comm->device, &p->row->rail);
    describe_work(p, descs);
    wrap_plan(differs(p, DIFFER_PLAN));
    status = tide_groups_create(p->comm, descs, differs(p, DIFFER_GROUPS) ? WORK_GROUPS - 1 : WORK_GROUPS, p->work);
    wrap_plan(false);
    for (int i = 0; i < WORK_GROUPS && status == TIDE_OK; i++)
        status = small_adopt(&p->work_layers[i], p->work[i]);
    return status;
}

static void tear_down(player *p)
{
    tide_comm_destroy(p->comm);
    p->comm = NULL;
    outputs_drop(&p->kept_outputs);
}

static void note(player *p, int code)
{
    double ms = (double)(tide_now_ns() - p->due) / 1e6;
    if (code == TIDE_OK)
        return;
    p->report->code = code;
    p->report->ms = ms > p->report->ms ? ms : p->report->ms;
    snprintf(p->report->text, sizeof p->report->text, "%s", tide_last_error());
}

/* Call or allocation 1, 2, ... of the victim fails, and with it this set-up on all ranks, until there are no more. */
static int set_up_until_nothing_fails(player *p)
{
    for (int64_t at = 1;; at++) {
        char in, out[FAULT_RANKS];
        int status;

        p->due = tide_now_ns();
        if (p->victim && p->row->when == WHEN_CALL)
            wrap_arm(p->row->which, at, fail_call);
        if (p->victim && p->row->when == WHEN_MEMORY)
            tide_alloc_fail_at((uint64_t)at);
        status = set_up(p);
        in = p->victim && (p->row->when == WHEN_CALL ? wrap_disarm() : status != TIDE_OK);
        tide_alloc_fail_at(0);
        note(p, status);
        p->report->refused += status != TIDE_OK;
        if (p->gather(p->gather_context, &in, out, 1) != 0)
            return wrong(p, "the all-gather failed");
        if (!out[FAULT_VICTIM])
            return status;
        tear_down(p);
    }
}

/* ---- calls -------------------------------------------------------------------------------------- */

static int rounds(player *p)
{
    float *out = malloc(output_bytes(&p->work_layers[0]));
    int status = tide_comm_sync(p->comm);

    fab_host_on_item(p->comm->device, on_item, p);
    for (int i = 0; i < ROUNDS && status == TIDE_OK; i++) {
        bool strange = i == STRANGE_ROUND && p->victim;
        int g = strange && p->row->which == DIFFER_CALL && p->row->what == WHAT_DIFFER ? 2 : 0;
        bool skip = strange && p->row->which == DIFFER_SKIP && p->row->what == WHAT_DIFFER;
        strike_later(p, WHEN_IDLE, (uint64_t)i);
        if (p->row->work & WORK_GATHER && !skip)
            status = gather_once(p, &p->work_layers[g], p->work[g], false);
        if (p->row->work & WORK_SCATTER && !skip && status == TIDE_OK)
            status = scatter_once(p, &p->work_layers[g], p->work[g], i, p->row->late ? 5 : ALL, out);
    }
    free(out);
    return status;
}

/* The failure is the same wherever one asks. */
static void look_at_failure(player *p)
{
    tide_failure f = TIDE_FAILURE_INIT;
    char text[sizeof f.text];
    int code = tide_comm_check(p->comm, &f);

    snprintf(p->report->phase, sizeof p->report->phase, "%s", f.phase);
    p->report->peer = f.peer;
    p->report->call = f.call;
    snprintf(text, sizeof text, "%s", f.text);
    if (code != p->report->code || f.code != code || f.rank >= p->numbers.n_ranks || !f.phase[0] || !f.text[0])
        wrong(p, "tide_comm_check says something else");
    if (f.peer < 0 || f.peer >= (int64_t)p->numbers.n_ranks ||
        (f.call == 0) != (strcmp(f.phase, "idle") == 0 || strcmp(f.phase, "destroy") == 0))
        wrong(p, "peer or call is not named");
    if (code == TIDE_ERR_PEER_DEAD && (f.peer != FAULT_VICTIM || f.rank != p->numbers.rank))
        wrong(p, "another peer is named");
    if (strcmp(p->report->text, text) != 0)
        wrong(p, "the call's sentence is not the communicator's");
    if (tide_all_gather(p->work[1], NULL, NULL) != code || strcmp(tide_last_error(), text) != 0 ||
        tide_comm_sync(p->comm) != code || tide_comm_check(p->comm, NULL) != code)
        wrong(p, "a later call says something else");
}

/* Until the first error, or the end. */
static int trouble(player *p)
{
    const fault_row *row = p->row;
    int status;

    if (row->what == WHAT_FAIL && !row->late)
        status = set_up_until_nothing_fails(p);
    else {
        if (p->victim && row->when == WHEN_CALL)
            wrap_arm(row->which, row->at, row->what == WHAT_KILL ? kill_at_call : stop_at_call);
        p->due = tide_now_ns();
        status = set_up(p);
        wrap_disarm();
        note(p, status);
        if (status == TIDE_ERR_MISMATCH && row->what == WHAT_DIFFER) { /* nothing stays of it */
            tear_down(p);
            p->same = true;
            status = set_up(p);
        }
    }
    if (status != TIDE_OK)
        return status;
    if (together(p) != TIDE_OK && row->when != WHEN_GATHER) /* then the victim may be gone after the last exchange */
        return wrong(p, "the all-gather failed");
    if (row->what != WHAT_FAIL)
        p->due = tide_now_ns();
    status = rounds(p);
    if (row->what == WHAT_KILL && row->when == WHEN_ITEM) /* maybe in its last item, when nobody needs it any more */
        for (int64_t end = tide_now_ns() + row->limit_ms * 1000000; status == TIDE_OK && tide_now_ns() < end;)
            status = doze_and_sync(p->comm);
    if (status != TIDE_OK) {
        note(p, status);
        look_at_failure(p);
        return status;
    }
    if (row->when == WHEN_LEAVING) {
        if (together(p) != TIDE_OK)
            return wrong(p, "the all-gather failed");
        p->due = tide_now_ns();
        strike_later(p, WHEN_LEAVING, 0);
        status = tide_comm_sync(p->comm); /* who comes too late is told here: destroy does not mind a failed one */
        note(p, status);
        if (status != TIDE_OK)
            return status;
    }
    if (!outputs_intact(&p->kept_outputs))
        wrong(p, "outputs of another group of the communicator");
    outputs_drop(&p->kept_outputs);
    status = tide_comm_destroy(p->comm);
    p->comm = NULL;
    note(p, status);
    return status;
}

static void play(player *p)
{
    bool gone = p->row->what == WHAT_KILL || p->row->what == WHAT_EXIT || p->row->what == WHAT_STOP;
    tide_options o = TIDE_OPTIONS_INIT;

    o.deadline_ms = 20000;
    p->report->began = true;
    if (open_comm(p, &o, p->row->local, p->gather, p->gather_context, &p->other) != TIDE_OK ||
        hold_outputs(p, p->other, &p->other_layer, "other", &p->other_group, &p->other_outputs) != TIDE_OK ||
        together(p) != TIDE_OK) {
        wrong(p, "cannot begin");
    } else {
        trouble(p);
        if (!outputs_intact(&p->kept_outputs))
            wrong(p, "outputs of another group of the communicator");
        if (!outputs_intact(&p->other_outputs))
            wrong(p, "outputs of another communicator");
        if (gone)
            tide_comm_abort(p->other); /* a rank of it is gone as well */
        else if (tide_slot_release(p->other_group, NULL) != TIDE_OK ||
                 gather_once(p, &p->other_layer, p->other_group, false) != TIDE_OK ||
                 scatter_once(p, &p->other_layer, p->other_group, 2, ALL, p->other_outputs.out) != TIDE_OK)
            wrong(p, "another communicator no longer works");
    }
    tear_down(p);
    if (tide_comm_destroy(p->other) != TIDE_OK && !gone)
        wrong(p, "another communicator does not end well");
    outputs_drop(&p->other_outputs);
}

static void play_rank(const fault_case *c, uint32_t rank, tide_allgather_fn gather, void *context)
{
    player p = {.row = c->row, .report = &c->reports[rank], .gather = gather, .gather_context = context};
    p.numbers = (threads_rank){.rank = rank, .n_ranks = c->row->nodes * c->row->local};
    p.victim = rank == FAULT_VICTIM;
    play(&p);
    p.report->ended = true;
}

/* ---- processes and threads ---------------------------------------------------------------------- */

static void *no_work(void *argument) { return argument; }

static belongings take_stock(void)
{
    pthread_t first;
    if (pthread_create(&first, NULL, no_work, NULL) == 0) /* a sanitizer starts threads of its own with the first one */
        pthread_join(first, NULL);
    return belongings_now();
}

void fault_play_process(const processes_rank *rank)
{
    const fault_case *c = rank->context;
    fault_report *report = &c->reports[rank->rank];
    belongings before = take_stock();
    bool waited_for = c->row->what == WHAT_STOP && (c->row->when == WHEN_GATHER || c->row->when == WHEN_CALL);
    tide_bootstrap *b = NULL;

    if (tide_bootstrap_local(rank->path, rank->rank, rank->n_ranks, waited_for ? 1500 : 20000, &b) != TIDE_OK)
        snprintf(report->wrong, sizeof report->wrong, "%.150s", tide_last_error());
    else
        play_rank(c, rank->rank, tide_bootstrap_allgather, b);
    tide_bootstrap_destroy(b);
    belongings_left(&before, report->left);
}

static int play_thread(threads_rank *rank)
{
    play_rank(rank->context, rank->rank, threads_allgather, rank);
    return 0;
}

void fault_play_threads(const processes_rank *process)
{
    fault_case c = *(const fault_case *)process->context;
    belongings before = take_stock();

    if (threads_run(c.row->nodes * c.row->local, play_thread, &c) != 0)
        snprintf(c.reports[0].wrong, sizeof c.reports[0].wrong, "threads could not be started");
    belongings_left(&before, c.reports[0].left);
}
