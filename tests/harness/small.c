/* small.c - a small layer on thread ranks. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "small.h"

void small_init(small_layer *s, const threads_rank *rank, const char *name, int dtype, int shard_dtype, int grad_dtype,
                int seed)
{
    memset(s, 0, sizeof *s);
    s->params[0] = (tide_param){"weight", 2, 0, {10, 3}};
    s->params[1] = (tide_param){"bias", 1, 0, {2}};
    s->params[2] = (tide_param){"head", 2, 0, {16, 33}};
    s->params[3] = (tide_param){"columns", 3, 1, {3, 2 * rank->n_ranks, 5}};
    s->desc = (tide_group_desc)TIDE_GROUP_DESC_INIT;
    s->desc.name = name;
    s->desc.n_params = SMALL_PARAMS;
    s->desc.params = s->params;
    s->desc.dtype = dtype;
    s->desc.shard_dtype = shard_dtype;
    s->desc.grad_dtype = grad_dtype;
    s->desc.input = dtype == shard_dtype ? TIDE_INPUT_ADOPTED : TIDE_INPUT_ARGUMENT;
    s->n_ranks = rank->n_ranks;
    s->rank = rank->rank;
    s->seed = seed;
}

int small_comm(const threads_rank *rank, uint32_t node_size, const tide_options *options, tide_comm **out)
{
    tide_comm_desc desc = TIDE_COMM_DESC_INIT;
    tide_options o = TIDE_OPTIONS_INIT;
    if (options)
        o = *options;
    if (o.deadline_ms == 600000)
        o.deadline_ms = 20000;
    desc.rank = rank->rank;
    desc.n_ranks = rank->n_ranks;
    desc.node_size = node_size;
    desc.allgather = threads_allgather;
    desc.allgather_context = (void *)(uintptr_t)rank;
    desc.options = &o;
    return tide_comm_create(&desc, out);
}

static uint64_t product(const tide_param *p, int from, int to)
{
    uint64_t n = 1;
    for (int d = from; d < to; d++)
        n *= (uint64_t)p->dims[d];
    return n;
}

uint64_t small_whole(const small_layer *s, uint32_t p) { return product(&s->params[p], 0, s->params[p].ndim); }

/* Index in the whole parameter of element i of rank r's padded shard; UINT64_MAX: padding. */
static uint64_t whole_index(const small_layer *s, uint32_t p, uint32_t r, uint64_t i)
{
    const tide_param *q = &s->params[p];
    uint64_t inner = product(q, q->shard_dim + 1, q->ndim), extent = (uint64_t)q->dims[q->shard_dim];
    uint64_t part = (extent + s->n_ranks - 1) / s->n_ranks, row = r * part + i / inner % part;
    return row >= extent ? UINT64_MAX : (i / (inner * part) * extent + row) * inner + i % inner;
}

uint64_t small_shard(const small_layer *s, uint32_t p)
{
    const tide_param *q = &s->params[p];
    return small_whole(s, p) / (uint64_t)q->dims[q->shard_dim] *
           (((uint64_t)q->dims[q->shard_dim] + s->n_ranks - 1) / s->n_ranks);
}

static float weight(const small_layer *s, uint32_t p, uint64_t i)
{
    return (float)((int)((i * 7 + p * 31 + (uint64_t)s->seed * 13) % 241) - 120);
}

static float gradient(const small_layer *s, int call, uint32_t rank, uint32_t p, uint64_t i)
{
    return (float)((int)((i * 5 + p * 3 + rank * 11 + (uint64_t)call * 17 + (uint64_t)s->seed) % 9) - 4);
}

static size_t item_of(int dtype) { return dtype == TIDE_F32 ? 4 : 2; }

static void store(void *at, int dtype, uint64_t i, float value)
{
    if (dtype == TIDE_F32)
        ((float *)at)[i] = value;
    else
        ((uint16_t *)at)[i] = dtype == TIDE_BF16 ? tide_f32_to_bf16(value) : tide_f32_to_f16(value);
}

static float load(const void *at, int dtype, uint64_t i)
{
    if (dtype == TIDE_F32)
        return ((const float *)at)[i];
    return dtype == TIDE_BF16 ? tide_bf16_to_f32(((const uint16_t *)at)[i])
                              : tide_f16_to_f32(((const uint16_t *)at)[i]);
}

void small_shards(const small_layer *s, void *shards[SMALL_PARAMS])
{
    for (uint32_t p = 0; p < SMALL_PARAMS; p++) {
        shards[p] = calloc(small_shard(s, p), 4);
        for (uint64_t i = 0; i < small_shard(s, p); i++) {
            uint64_t w = whole_index(s, p, s->rank, i);
            store(shards[p], s->desc.shard_dtype, i, w == UINT64_MAX ? 0.0f : weight(s, p, w));
        }
    }
}

void small_free(void *buffers[SMALL_PARAMS])
{
    for (uint32_t p = 0; p < SMALL_PARAMS; p++)
        free(buffers[p]);
}

int small_adopt(const small_layer *s, tide_group *group)
{
    void *shards[SMALL_PARAMS];
    int status = TIDE_OK;
    small_shards(s, shards);
    for (uint32_t p = 0; p < SMALL_PARAMS && status == TIDE_OK; p++)
        status = tide_shard_adopt(group, p, shards[p], small_shard(s, p) * item_of(s->desc.shard_dtype), NULL);
    small_free(shards);
    return status;
}

uint64_t small_wrong_params(const small_layer *s, const tide_group *group)
{
    uint64_t wrong = 0;
    for (uint32_t p = 0; p < SMALL_PARAMS; p++) {
        tide_tensor t = {.size = sizeof t};
        uint64_t n = small_whole(s, p);
        if (tide_group_tensor(group, TIDE_TENSOR_PARAM, p, &t) != TIDE_OK ||
            t.bytes != small_shard(s, p) * s->n_ranks * item_of(s->desc.dtype) || t.dtype != s->desc.dtype)
            return UINT64_MAX;
        for (uint64_t i = 0; i < n; i++)
            wrong += load(t.data, s->desc.dtype, i) != weight(s, p, i);
        for (uint64_t i = n; i < t.bytes / t.item_size; i++) /* padding */
            wrong += load(t.data, s->desc.dtype, i) != 0.0f;
    }
    return wrong;
}

void small_grads(const small_layer *s, int call, int grad_dtype, unsigned present, void *grads[SMALL_PARAMS])
{
    for (uint32_t p = 0; p < SMALL_PARAMS; p++) {
        grads[p] = NULL;
        if (!(present >> p & 1))
            continue;
        grads[p] = malloc(small_whole(s, p) * item_of(grad_dtype)); /* exactly: reading past it shows under ASan */
        for (uint64_t i = 0; i < small_whole(s, p); i++)
            store(grads[p], grad_dtype, i, gradient(s, call, s->rank, p, i));
    }
}

uint64_t small_wrong_output(const small_layer *s, int call, unsigned present, float alpha, float before,
                            const float *out)
{
    uint64_t wrong = 0;
    for (uint32_t p = 0; p < SMALL_PARAMS; p++) {
        if (!(present >> p & 1))
            continue;
        for (uint64_t i = 0; i < small_shard(s, p); i++, out++) {
            uint64_t w = whole_index(s, p, s->rank, i);
            float sum = 0.0f;
            for (uint32_t u = 0; u < s->n_ranks && w != UINT64_MAX; u++)
                sum += gradient(s, call, u, p, w);
            wrong += *out != before + alpha * sum;
        }
    }
    return wrong;
}
