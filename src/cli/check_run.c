/* check_run.c - one rank of a `tide check` configuration: carries out the actions and compares with the oracle. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/check.h"

enum { GUARD = 16 };             /* floats before and after an output */
#define GUARD_BITS 0x7fa5a5a5u

/* In the device's memory. */
typedef struct call_state {
    void **pointers; /* shards or gradients, n_params; NULL entries for absent ones */
    void **blocks;   /* what to release: pointers are put off alignment */
    float *out;
    void *out_block;
} call_state;

typedef struct rank_state {
    const rank_start *start;
    const check_config *config;
    const check_run *run;
    check_report *report;
    cli_device device;
    bool opened;
    tide_comm *comm;
    tide_group **groups;
    uint64_t *shard_key, *landed_key; /* by group */
    bool *landed_short;               /* by group: padding was adopted as zeros */
    call_state *calls;
    uint64_t random;
    uint32_t call; /* of the action being carried out, for messages */
} rank_state;

static uint32_t n_ranks(const rank_state *s)
{
    return s->start->n_ranks;
}

static void say(rank_state *s, uint32_t group, const char *format, ...)
{
    const check_config *config = s->config;
    struct timespec now;
    char what[256];
    va_list args;

    config->shared->wrong[s->call] = 1;
    if (s->report->text[0])
        return;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    clock_gettime(CLOCK_MONOTONIC, &now);
    s->report->when = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    snprintf(s->report->text, sizeof s->report->text, "rank %u: call %u (%s of group %u): %s", s->start->rank,
             s->call + 1, config->calls[s->call].reduce ? "reduce_scatter" : "all_gather", group, what);
}

static bool library(rank_state *s, uint32_t group, const char *what, int status)
{
    if (status == TIDE_OK)
        return true;
    say(s, group, "%s: %s", what, tide_last_error());
    s->report->failed = 1;
    return false;
}

static void out_of_memory(rank_state *s)
{
    snprintf(s->report->text, sizeof s->report->text, "rank %u: out of memory", s->start->rank);
    s->report->failed = 1;
}

/* Host memory, zeroed. */
static void *memory(rank_state *s, size_t bytes)
{
    void *p = calloc(bytes ? bytes : 1, 1);

    if (!p)
        out_of_memory(s);
    return p;
}

static bool copy_in(rank_state *s, uint32_t group, void *to, const void *host, size_t bytes)
{
    return library(s, group, "copy to the device", s->device.fabric->copy_in(&s->device, to, host, bytes));
}

static bool copy_out(rank_state *s, uint32_t group, void *host, const void *from, size_t bytes)
{
    return library(s, group, "copy from the device", s->device.fabric->copy_out(&s->device, host, from, bytes));
}

/* The result of the call being carried out, for comparison with another run of the same configuration. */
static void note_result(rank_state *s, const void *bytes, size_t n)
{
    uint64_t *digest = &s->config->shared->results[(size_t)s->call * n_ranks(s) + s->start->rank];
    uint64_t word = 0;

    for (size_t i = 0; i < n; i += sizeof word) {
        memcpy(&word, (const char *)bytes + i, n - i < sizeof word ? n - i : sizeof word);
        *digest = oracle_mix(*digest, word, i, 0, 0);
    }
}

static uint64_t next(rank_state *s)
{
    return s->random = oracle_mix(s->random, 7, 7, 7, 7);
}

/* A block of the device's memory for `count` items at a random distance from alignment. */
static void *items(rank_state *s, uint64_t count, uint32_t item, void **block)
{
    *block = s->device.fabric->alloc(&s->device, (count + 8) * item);
    if (!*block)
        out_of_memory(s);
    return *block ? (char *)*block + next(s) % 8 * item : NULL;
}

static bool call_begin(rank_state *s, uint32_t call, uint32_t n_params)
{
    call_state *c = &s->calls[call];

    c->pointers = memory(s, n_params * sizeof *c->pointers);
    c->blocks = memory(s, n_params * sizeof *c->blocks);
    return c->pointers && c->blocks;
}

static void call_end(rank_state *s, call_state *c, uint32_t n_params)
{
    for (uint32_t i = 0; c->blocks && i < n_params; i++)
        s->device.fabric->release(&s->device, c->blocks[i]);
    free(c->blocks);
    free(c->pointers);
    s->device.fabric->release(&s->device, c->out_block);
    memset(c, 0, sizeof *c);
}

/* ---- all-gather -------------------------------------------------------------------------- */

/* This rank's shard, in host memory. */
static void *make_shard(rank_state *s, const check_group *g, uint32_t param, uint64_t key)
{
    const tide_param *p = &g->shapes.params[param];
    uint32_t item = oracle_item(g->desc.shard_dtype, g->shapes.item_size);
    uint64_t n = oracle_shard(p, n_ranks(s));
    char *shard = memory(s, n * item);

    for (uint64_t i = 0; shard && i < n; i++)
        oracle_shard_item(g->desc.shard_dtype, item, g->cast, key, param,
                          oracle_locate(p, n_ranks(s), s->start->rank, i), shard + i * item);
    return shard;
}

/* The same in the device's memory, off alignment; *block is to be released. */
static void *give_shard(rank_state *s, uint32_t group, uint32_t param, uint64_t key, void **block)
{
    const check_group *g = &s->config->groups[group];
    uint32_t item = oracle_item(g->desc.shard_dtype, g->shapes.item_size);
    uint64_t n = oracle_shard(&g->shapes.params[param], n_ranks(s));
    void *shard = make_shard(s, g, param, key), *at = items(s, n, item, block);

    if (!shard || !at || !copy_in(s, group, at, shard, n * item))
        at = NULL;
    free(shard);
    return at;
}

/* Adoption may leave the padding out; the library then zeroes it. */
static bool adopted_short(uint64_t key)
{
    return key >> 60 & 1;
}

static bool adopt(rank_state *s, uint32_t group, uint64_t key)
{
    const check_group *g = &s->config->groups[group];
    uint32_t item = oracle_item(g->desc.dtype, g->shapes.item_size);

    if (!library(s, group, "comm_sync", tide_comm_sync(s->comm)))
        return false;
    for (uint32_t p = 0; p < g->shapes.n_params; p++) {
        uint64_t n = oracle_shard(&g->shapes.params[p], n_ranks(s)), real = 0;
        void *block = NULL, *at = give_shard(s, group, p, key, &block);
        int status = TIDE_OK;

        for (uint64_t i = 0; i < n; i++)
            real +=
                oracle_locate(&g->shapes.params[p], n_ranks(s), s->start->rank, i) < oracle_whole(&g->shapes.params[p]);
        if (at)
            status =
                tide_shard_adopt(s->groups[group], p, at, (adopted_short(key) ? real : n) * item, s->device.stream);
        s->device.fabric->release(&s->device, block);
        if (!at || !library(s, group, "shard_adopt", status))
            return false;
    }
    s->shard_key[group] = key;
    return true;
}

static bool gather(rank_state *s, const check_action *a)
{
    const check_group *g = &s->config->groups[a->group];
    call_state *c = &s->calls[a->call];
    bool argument = g->desc.input == TIDE_INPUT_ARGUMENT;

    if (argument) {
        if (!call_begin(s, a->call, g->shapes.n_params))
            return false;
        for (uint32_t p = 0; p < g->shapes.n_params; p++) {
            c->pointers[p] = give_shard(s, a->group, p, a->key, &c->blocks[p]);
            if (!c->pointers[p])
                return false;
        }
    }
    s->landed_key[a->group] = argument ? a->key : s->shard_key[a->group];
    s->landed_short[a->group] = !argument && adopted_short(s->shard_key[a->group]);
    return library(s, a->group, "all_gather",
                   tide_all_gather(s->groups[a->group], argument ? (const void *const *)c->pointers : NULL,
                                   s->device.stream));
}

static bool compare_landing(rank_state *s, uint32_t group)
{
    const check_group *g = &s->config->groups[group];
    uint32_t item = oracle_item(g->desc.dtype, g->shapes.item_size);
    unsigned char *expected = memory(s, item);

    for (uint32_t p = 0; expected && p < g->shapes.n_params; p++) {
        const tide_param *param = &g->shapes.params[p];
        uint64_t padded = oracle_shard(param, n_ranks(s)) * n_ranks(s), whole = oracle_whole(param);
        tide_tensor t = {.size = sizeof t};
        unsigned char *landed;

        if (!library(s, group, "group_tensor", tide_group_tensor(s->groups[group], TIDE_TENSOR_PARAM, p, &t)))
            break;
        if (t.bytes != padded * item)
            say(s, group, "param %u: %llu bytes, expected %llu", p, (unsigned long long)t.bytes,
                (unsigned long long)(padded * item));
        landed = memory(s, padded * item);
        if (!landed || t.bytes != padded * item || !copy_out(s, group, landed, t.data, t.bytes)) {
            free(landed);
            break;
        }
        for (uint64_t x = 0; x < padded; x++) {
            unsigned char *got = landed + x * item;
            if (x >= whole && s->landed_short[group])
                memset(expected, 0, item);
            else
                oracle_landing_item(g->desc.shard_dtype, g->desc.dtype, item, s->landed_key[group], p, x, expected);
            if (!oracle_same_item(g->desc.dtype, item, g->cast, got, expected)) {
                say(s, group, "param %u element %llu of %llu: first byte 0x%02x, expected 0x%02x", p,
                    (unsigned long long)x, (unsigned long long)whole, got[0], expected[0]);
                break;
            }
            memcpy(got, expected, item); /* any NaN of a cast is as good as another, also to note_result */
        }
        note_result(s, landed, padded * item);
        free(landed);
    }
    free(expected);
    return !s->report->failed;
}

static bool look(rank_state *s, const check_action *a)
{
    bool ok = library(s, a->group, "wait READY", tide_wait(s->groups[a->group], TIDE_READY, s->device.stream)) &&
              compare_landing(s, a->group);

    call_end(s, &s->calls[a->call], s->config->groups[a->group].shapes.n_params);
    return ok;
}

/* Adopted shards are inputs: no call may have changed them. */
static bool compare_shards(rank_state *s, uint32_t group)
{
    const check_group *g = &s->config->groups[group];
    uint32_t item = oracle_item(g->desc.dtype, g->shapes.item_size);

    for (uint32_t p = 0; p < g->shapes.n_params; p++) {
        uint64_t n = oracle_shard(&g->shapes.params[p], n_ranks(s)), whole = oracle_whole(&g->shapes.params[p]);
        char *expected = make_shard(s, g, p, s->shard_key[group]), *got = memory(s, n * item);
        tide_tensor t = {.size = sizeof t};
        bool ok =
            expected && got &&
            library(s, group, "group_tensor", tide_group_tensor(s->groups[group], TIDE_TENSOR_SHARD, p, &t)) &&
            copy_out(s, group, got, t.data, t.bytes < n * item ? t.bytes : n * item);

        for (uint64_t i = 0; ok && i < n && adopted_short(s->shard_key[group]); i++)
            if (oracle_locate(&g->shapes.params[p], n_ranks(s), s->start->rank, i) >= whole)
                memset(expected + i * item, 0, item);
        if (ok && (t.bytes != n * item || memcmp(got, expected, n * item) != 0))
            say(s, group, "adopted shard of param %u has changed", p);
        free(got);
        free(expected);
        if (!ok)
            return false;
    }
    return true;
}

/* ---- reduce-scatter ---------------------------------------------------------------------- */

static oracle_reduce reduce_of(const rank_state *s, const check_call *call)
{
    const check_config *config = s->config;
    const check_group *g = &config->groups[call->group];
    oracle_reduce r = {
        .nodes = config->topology.nodes, .local = config->topology.local, .w_wave = config->w_wave,
        .n_params = g->shapes.n_params,  .params = g->shapes.params,      .present = call->present,
        .grad_dtype = call->grad_dtype,  .kind = call->kind,              .key = call->key,
        .alpha = call->alpha,            .accumulate = call->accumulate,
    };
    return r;
}

static bool make_gradients(rank_state *s, uint32_t index)
{
    const check_call *call = &s->config->calls[index];
    oracle_reduce r = reduce_of(s, call);
    call_state *c = &s->calls[index];
    uint32_t item = oracle_item(call->grad_dtype, 0);
    uint64_t elements = oracle_output_elements(&r);
    float *out;
    bool ok = true;

    if (!call_begin(s, index, r.n_params))
        return false;
    for (uint32_t p = 0; ok && p < r.n_params; p++) {
        uint64_t n = oracle_whole(&r.params[p]);
        char *grad;
        if (!call->present[p])
            continue;
        grad = memory(s, n * item);
        c->pointers[p] = items(s, n, item, &c->blocks[p]);
        for (uint64_t x = 0; grad && x < n; x++)
            oracle_grad_item(&r, s->start->rank, p, x, grad + x * item);
        ok = grad && c->pointers[p] && copy_in(s, call->group, c->pointers[p], grad, n * item);
        free(grad);
    }
    if (!ok)
        return false;
    out = memory(s, (elements + 2 * GUARD) * sizeof *out);
    c->out = items(s, elements + 2 * GUARD, sizeof *out, &c->out_block);
    if (!out || !c->out) {
        free(out);
        return false;
    }
    for (uint64_t i = 0; i < elements + 2 * GUARD; i++) {
        const uint32_t bits = GUARD_BITS;
        memcpy(out + i, &bits, sizeof bits);
    }
    for (uint64_t e = 0; call->accumulate && e < elements; e++)
        out[GUARD + e] = oracle_output_before(&r, s->start->rank, e);
    ok = copy_in(s, call->group, c->out, out, (elements + 2 * GUARD) * sizeof *out);
    c->out += GUARD;
    free(out);
    return ok;
}

static bool spoil_gradients(rank_state *s, uint32_t index)
{
    const check_call *call = &s->config->calls[index];
    const check_group *g = &s->config->groups[call->group];
    bool ok = true;

    for (uint32_t p = 0; ok && p < g->shapes.n_params; p++) {
        size_t bytes = oracle_whole(&g->shapes.params[p]) * oracle_item(call->grad_dtype, 0);
        void *spoilt;
        if (!s->calls[index].pointers[p])
            continue;
        spoilt = memory(s, bytes);
        if (spoilt)
            memset(spoilt, 0xee, bytes);
        ok = spoilt && copy_in(s, call->group, s->calls[index].pointers[p], spoilt, bytes);
        free(spoilt);
    }
    return ok;
}

static bool reduce(rank_state *s, const check_action *a)
{
    const check_call *call = &s->config->calls[a->call];
    tide_reduce_scatter_args args = TIDE_REDUCE_SCATTER_ARGS_INIT;
    bool made = a->kind == ACT_READ && call->mode == 1; /* by ACT_STASH */

    if (!made && !make_gradients(s, a->call))
        return false;
    args.grads = (const void *const *)s->calls[a->call].pointers;
    args.out = s->calls[a->call].out;
    args.grad_dtype = call->grad_dtype;
    args.accumulate = call->accumulate;
    args.alpha = call->alpha;
    args.mode = s->run->in_place ? 0 : call->mode;
    switch (a->kind) {
    case ACT_STASH:
        if (s->run->in_place)
            return library(s, a->group, "slot_release", tide_slot_release(s->groups[a->group], s->device.stream));
        return library(s, a->group, "grads_stash", tide_grads_stash(s->groups[a->group], &args, s->device.stream)) &&
               spoil_gradients(s, a->call);
    case ACT_READ:
        return library(s, a->group, "reduce_scatter_read",
                       tide_reduce_scatter_read(s->groups[a->group], &args, s->device.stream));
    default:
        return library(s, a->group, "reduce_scatter",
                       tide_reduce_scatter(s->groups[a->group], &args, s->device.stream));
    }
}

static bool same_float(float a, float b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

/* Within 1e-5 * max(1, |y|inf) of fp64, or of the same class. */
static bool near(float got, double exact, double largest)
{
    if (isnan(exact) || isinf(exact))
        return isnan(exact) ? isnan(got) : (double)got == exact;
    return fabs((double)got - exact) <= 1e-5 * fmax(1.0, largest);
}

/* A switch adds what lands in an order of its own: then bits are nobody's promise, and values that differ much in size may
 * cancel. */
static bool own_order(const rank_state *s)
{
    tide_comm_info info = {.size = sizeof info};
    return !s->run->fabric->shared_landing && s->config->topology.nodes > 1 &&
           tide_comm_get_info(s->comm, &info) == TIDE_OK && info.multicast == 1;
}

static bool sums(rank_state *s, const check_action *a)
{
    const check_call *call = &s->config->calls[a->call];
    oracle_reduce r = reduce_of(s, call);
    uint64_t elements = oracle_output_elements(&r);
    call_state *c = &s->calls[a->call];
    float *expected, *block, *out = NULL;
    double *exact, largest = 0;
    bool any_order = own_order(s);

    if (!library(s, a->group, "wait DONE", tide_wait(s->groups[a->group], TIDE_DONE, s->device.stream)))
        return false;
    expected = memory(s, elements * sizeof *expected);
    exact = memory(s, elements * sizeof *exact);
    block = memory(s, (elements + 2 * GUARD) * sizeof *block);
    if (block)
        out = block + GUARD;
    if (expected && exact && !oracle_reduce_run(&r, s->start->rank, expected, exact)) {
        out_of_memory(s);
    } else if (expected && exact && block &&
               copy_out(s, a->group, block, c->out - GUARD, (elements + 2 * GUARD) * sizeof *block)) {
        for (uint64_t e = 0; e < elements; e++)
            if (isfinite(exact[e]))
                largest = fmax(largest, fabs(exact[e]));
        for (uint64_t e = 0; e < elements; e++) {
            if (!any_order && !same_float(out[e], expected[e])) {
                say(s, a->group, "element %llu of %llu: %.9g, expected %.9g", (unsigned long long)e,
                    (unsigned long long)elements, (double)out[e], (double)expected[e]);
                break;
            }
            if (call->kind == VALUES_INTEGERS && call->alpha != 1.0f / 3.0f && (double)out[e] != exact[e]) {
                say(s, a->group, "element %llu of %llu: %.9g is not %.9g, a sum of small integers",
                    (unsigned long long)e, (unsigned long long)elements, (double)out[e], exact[e]);
                break;
            }
            if (call->kind != VALUES_WIDE && !near(out[e], exact[e], largest)) {
                say(s, a->group, "element %llu of %llu: %.9g is not within 1e-5 of %.9g", (unsigned long long)e,
                    (unsigned long long)elements, (double)out[e], exact[e]);
                break;
            }
        }
        for (uint64_t i = 0; i < 2 * GUARD; i++) {
            const float *guard = i < GUARD ? block + i : out + elements + i - GUARD;
            uint32_t bits;
            memcpy(&bits, guard, sizeof bits);
            if (bits != GUARD_BITS) {
                say(s, a->group, "the float %lld of the output was written", (long long)(guard - out));
                break;
            }
        }
        for (uint64_t e = 0; e < elements; e++)
            if (isnan(out[e]))
                out[e] = NAN; /* any is as good as another, also to note_result */
        for (uint64_t e = 0; any_order && e < elements; e++)
            out[e] = isnan(expected[e]) ? NAN : expected[e]; /* near enough, or said above */
        note_result(s, out, elements * sizeof *out);
    }
    free(block);
    free(exact);
    free(expected);
    call_end(s, c, r.n_params);
    return !s->report->failed;
}

/* ---- the rank ---------------------------------------------------------------------------- */

static bool act(rank_state *s, const check_action *a)
{
    s->call = a->call;
    if (s->run->slow == s->start->rank || (s->run->pauses && next(s) % 8 == 0)) {
        struct timespec pause = {0, (long)(next(s) % 300000)};
        nanosleep(&pause, NULL);
    }
    switch (a->kind) {
    case ACT_ADOPT:
        return adopt(s, a->group, a->key);
    case ACT_GATHER:
        return gather(s, a);
    case ACT_LOOK:
        return look(s, a);
    case ACT_RELEASE:
        return library(s, a->group, "slot_release", tide_slot_release(s->groups[a->group], s->device.stream));
    case ACT_NET:
        return library(s, a->group, "reduce_scatter_net",
                       tide_reduce_scatter_net(s->groups[a->group], s->device.stream));
    case ACT_GONE:
        return library(s, a->group, "wait READ_DONE",
                       tide_wait(s->groups[a->group], TIDE_READ_DONE, s->device.stream)) &&
               spoil_gradients(s, a->call);
    case ACT_SUMS:
        return sums(s, a);
    default:
        return reduce(s, a);
    }
}

static bool set_up(rank_state *s)
{
    const check_config *config = s->config;
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_options options = s->run->options;
    tide_group_desc *groups = memory(s, config->n_groups * sizeof *groups);
    bool ok = false;

    s->groups = memory(s, config->n_groups * sizeof(tide_group *));
    s->shard_key = memory(s, config->n_groups * sizeof *s->shard_key);
    s->landed_key = memory(s, config->n_groups * sizeof *s->landed_key);
    s->landed_short = memory(s, config->n_groups * sizeof *s->landed_short);
    s->calls = memory(s, config->n_calls * sizeof *s->calls);
    if (!groups || !s->groups || !s->shard_key || !s->landed_key || !s->landed_short || !s->calls)
        goto out;
    for (uint32_t g = 0; g < config->n_groups; g++)
        groups[g] = config->groups[g].desc;
    s->device.fabric = s->run->fabric;
    s->device.gpus = s->run->gpus;
    s->device.local = config->topology.local;
    s->opened = library(s, 0, "open the device", s->run->fabric->open(&s->device, s->start->rank, n_ranks(s)));
    if (!s->opened)
        goto out;
    desc.fabric = s->run->fabric->number;
    desc.device = s->device.ordinal;
    desc.rank = s->start->rank;
    desc.n_ranks = n_ranks(s);
    desc.node_size = config->topology.local;
    desc.allgather = s->start->allgather;
    desc.allgather_context = s->start->allgather_context;
    desc.options = &options;
    if (!library(s, 0, "comm_create", tide_comm_create(&desc, &s->comm)))
        goto out;
    if (s->run->fabric->trouble)
        s->run->fabric->trouble(s->comm, &s->run->trouble);
    if (!library(s, 0, "groups_create", tide_groups_create(s->comm, groups, config->n_groups, s->groups)))
        goto out;
    ok = true;
out:
    free(groups);
    return ok;
}

int check_rank(const rank_start *start)
{
    const check_config *config = start->job;
    rank_state s = {.start = start, .config = config, .run = config->run};
    bool ok;

    s.report = &config->shared->reports[start->rank];
    s.random = oracle_mix(config->seed, 4, start->rank, 0, 0);
    ok = set_up(&s);
    for (uint32_t i = 0; ok && i < config->n_actions; i++)
        ok = act(&s, &config->actions[i]);
    if (ok)
        ok = library(&s, 0, "comm_sync", tide_comm_sync(s.comm));
    for (uint32_t g = 0; ok && g < config->n_groups; g++)
        if (config->groups[g].desc.input == TIDE_INPUT_ADOPTED)
            ok = compare_shards(&s, g);
    if (!ok && s.comm)
        tide_comm_abort(s.comm);
    if (tide_comm_destroy(s.comm) != TIDE_OK && ok)
        ok = library(&s, 0, "comm_destroy", TIDE_ERR_INTERNAL);
    for (uint32_t i = 0; s.calls && i < config->n_calls; i++)
        call_end(&s, &s.calls[i], config->groups[config->calls[i].group].shapes.n_params);
    free(s.calls);
    free(s.landed_short);
    free(s.landed_key);
    free(s.shard_key);
    free(s.groups);
    if (s.opened)
        s.run->fabric->close(&s.device);
    return ok ? 0 : 1;
}
