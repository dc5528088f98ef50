/* oracle.c - the naive answers. Slow and plain on purpose; see oracle.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/oracle.h"

uint64_t oracle_mix(uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e)
{
    const uint64_t words[5] = {a, b, c, d, e};
    uint64_t h = UINT64_C(0x9e3779b97f4a7c15);

    for (int i = 0; i < 5; i++) {
        h ^= words[i];
        h = (h ^ (h >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        h = (h ^ (h >> 27)) * UINT64_C(0x94d049bb133111eb);
        h = (h ^ (h >> 31)) + UINT64_C(0x9e3779b97f4a7c15);
    }
    return h;
}

/* ---- geometry ---------------------------------------------------------------------------- */

/* The shape of a rank's padded shard: the sharded extent divided by the ranks, rounded up. */
static int shard_dims(const tide_param *p, uint32_t n_ranks, uint64_t dims[TIDE_MAX_DIMS])
{
    int ndim = p->ndim ? p->ndim : 1;

    for (int d = 0; d < ndim; d++)
        dims[d] = p->ndim ? (uint64_t)p->dims[d] : 1;
    dims[p->shard_dim] = (dims[p->shard_dim] + n_ranks - 1) / n_ranks;
    return ndim;
}

uint64_t oracle_shard(const tide_param *p, uint32_t n_ranks)
{
    uint64_t dims[TIDE_MAX_DIMS], n = 1;
    int ndim = shard_dims(p, n_ranks, dims);

    for (int d = 0; d < ndim; d++)
        n *= dims[d];
    return n;
}

uint64_t oracle_whole(const tide_param *p)
{
    return oracle_shard(p, 1);
}

uint64_t oracle_locate(const tide_param *p, uint32_t n_ranks, uint32_t rank, uint64_t i)
{
    uint64_t dims[TIDE_MAX_DIMS], index[TIDE_MAX_DIMS], full = 0;
    int ndim = shard_dims(p, n_ranks, dims);

    for (int d = ndim - 1; d >= 0; d--) {
        index[d] = i % dims[d];
        i /= dims[d];
    }
    index[p->shard_dim] += rank * dims[p->shard_dim];
    for (int d = 0; d < ndim; d++)
        full = full * (d == p->shard_dim ? dims[d] * n_ranks : dims[d]) + index[d];
    return full;
}

/* ---- number formats ---------------------------------------------------------------------- */

uint32_t oracle_item(int dtype, uint32_t item_size)
{
    return dtype == TIDE_OPAQUE ? item_size : dtype == TIDE_F32 ? 4 : 2;
}

/* A format with a sign bit, `bits` exponent bits and `digits` fraction bits. */
static float decode(uint16_t h, int bits, int digits)
{
    int fraction = h & ((1 << digits) - 1), exponent = h >> digits & ((1 << bits) - 1), bias = (1 << (bits - 1)) - 1;
    float sign = h & 0x8000 ? -1.0f : 1.0f;

    if (exponent == (1 << bits) - 1)
        return fraction ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexpf((float)fraction, 1 - bias - digits);
    return sign * ldexpf((float)(fraction + (1 << digits)), exponent - bias - digits);
}

static uint16_t encode(float value, int bits, int digits)
{
    int bias = (1 << (bits - 1)) - 1, exponent;
    uint16_t sign = signbit(value) ? 0x8000 : 0, infinity = (uint16_t)(((1 << bits) - 1) << digits);
    double magnitude = fabs((double)value), scaled;

    if (isnan(value))
        return (uint16_t)(sign | infinity | 1 << (digits - 1));
    if (isinf(value))
        return sign | infinity;
    if (magnitude == 0)
        return sign;
    exponent = ilogb(magnitude);
    if (exponent < 1 - bias)
        exponent = 1 - bias;
    scaled = rint(ldexp(magnitude, digits - exponent)); /* the default rounding mode: nearest, ties to even */
    if (scaled >= ldexp(1, digits + 1)) {
        scaled /= 2;
        exponent++;
    }
    if (exponent > bias)
        return sign | infinity;
    if (scaled < ldexp(1, digits)) /* subnormal */
        return (uint16_t)(sign | (uint16_t)scaled);
    return (uint16_t)(sign | (exponent + bias) << digits | ((int)scaled - (1 << digits)));
}

float oracle_load(int dtype, const void *at)
{
    uint16_t half;
    float value;

    if (dtype == TIDE_F32) {
        memcpy(&value, at, sizeof value);
        return value;
    }
    memcpy(&half, at, sizeof half);
    return dtype == TIDE_BF16 ? decode(half, 8, 7) : decode(half, 5, 10);
}

void oracle_store(int dtype, void *at, float value)
{
    uint16_t half;

    if (dtype == TIDE_F32) {
        memcpy(at, &value, sizeof value);
        return;
    }
    half = dtype == TIDE_BF16 ? encode(value, 8, 7) : encode(value, 5, 10);
    memcpy(at, &half, sizeof half);
}

float oracle_value(int kind, uint64_t hash)
{
    double u = (double)(hash >> 40) / 16777216.0, v = (double)(hash >> 16 & 0xffffff) / 16777216.0;
    float normal = (float)(sqrt(-2 * log(u + 1e-8)) * cos(6.283185307179586 * v)), sign = hash & 1 ? -1.0f : 1.0f;

    switch (kind) {
    case VALUES_INTEGERS:
        return (float)((int)(hash % 17) - 8);
    case VALUES_SPECIAL:
        switch (hash >> 4 & 63) {
        case 0:
            return sign * INFINITY;
        case 1:
            return NAN;
        case 2:
        case 3:
            return sign * 0.0f;
        case 4:
        case 5:
            return sign * ldexpf((float)(hash >> 20 & 0xff), -149);
        default:
            return normal;
        }
    case VALUES_WIDE:
        return ldexpf(normal, (int)(hash >> 4 & 0xff) % 200 - 100);
    default:
        return normal;
    }
}

/* ---- all-gather -------------------------------------------------------------------------- */

void oracle_shard_item(int shard_dtype, uint32_t item, bool cast, uint64_t key, uint64_t param, uint64_t full, void *at)
{
    uint64_t hash = oracle_mix(key, 1, param, full, 0);

    if (cast) {
        oracle_store(shard_dtype, at, oracle_value((int)(key % VALUES_KINDS), hash));
        return;
    }
    for (uint32_t i = 0; i < item; i++)
        ((unsigned char *)at)[i] = (unsigned char)(hash >> 8 * (i % 8)) ^ (unsigned char)(i / 8);
}

void oracle_landing_item(int shard_dtype, int dtype, uint32_t item, uint64_t key, uint64_t param, uint64_t full,
                         void *at)
{
    unsigned char shard[4];

    if (shard_dtype == dtype) {
        oracle_shard_item(dtype, item, false, key, param, full, at);
        return;
    }
    oracle_shard_item(shard_dtype, oracle_item(shard_dtype, 0), true, key, param, full, shard);
    oracle_store(dtype, at, oracle_load(shard_dtype, shard));
}

bool oracle_same_item(int dtype, uint32_t item, bool cast, const void *a, const void *b)
{
    if (memcmp(a, b, item) == 0)
        return true;
    return cast && isnan(oracle_load(dtype, a)) && isnan(oracle_load(dtype, b));
}

/* ---- reduce-scatter ---------------------------------------------------------------------- */

void oracle_grad_item(const oracle_reduce *r, uint32_t rank, uint32_t param, uint64_t x, void *at)
{
    oracle_store(r->grad_dtype, at, oracle_value(r->kind, oracle_mix(r->key, 2, rank, param, x)));
}

float oracle_output_before(const oracle_reduce *r, uint32_t rank, uint64_t e)
{
    return oracle_value(r->kind, oracle_mix(r->key, 3, rank, e, 0));
}

uint64_t oracle_output_elements(const oracle_reduce *r)
{
    uint64_t n = 0;

    for (uint32_t p = 0; p < r->n_params; p++)
        if (r->present[p])
            n += oracle_shard(&r->params[p], r->nodes * r->local);
    return n;
}

/* What local rank `holder` makes of its node's L gradients of one element: the others in order, then its own. */
static float partial(const float *grads, uint32_t local, uint32_t holder)
{
    float sum = 0;

    for (uint32_t i = 0; i < local; i++) {
        uint32_t l = i < holder ? i : i + 1 < local ? i + 1 : holder;
        sum = i ? sum + grads[l] : grads[l];
    }
    return sum;
}

/* Sum of one wave over the blocks of the destination's local ranks j = 0, 1, ...; a block that no contributor of the
 * wave wrote holds zero. Contributor c is node (m - c) mod M; its partial of sub-slice s is on local rank (s - c mod M)
 * mod L. With one rank a node the contributors are added one after the other. `grads` holds the element's gradient on every
 * rank. */
static float wave_sum(const oracle_reduce *r, const float *grads, uint32_t m, uint32_t first, uint64_t sub_slice)
{
    float sum = 0;

    for (uint32_t c = first; r->local == 1 && c < first + r->w_wave && c <= r->nodes; c++) {
        float block = grads[(m + r->nodes - c) % r->nodes];
        sum = c > first ? sum + block : block;
    }
    for (uint32_t j = 0; r->local > 1 && j < r->local; j++) {
        float block = 0;
        for (uint32_t c = first; c < first + r->w_wave && c <= r->nodes; c++) {
            uint32_t rotation = c % r->nodes, node = (m + r->nodes - rotation) % r->nodes;
            if ((j + rotation) % r->local == sub_slice % r->local)
                block = partial(grads + node * r->local, r->local, j);
        }
        sum = j ? sum + block : block;
    }
    return sum;
}

static uint64_t round_up(uint64_t value, uint64_t to)
{
    return (value + to - 1) / to * to;
}

bool oracle_reduce_run(const oracle_reduce *r, uint32_t rank, float *out, double *exact)
{
    uint32_t n_ranks = r->nodes * r->local, m = rank / r->local;
    uint64_t e = 0, vector = 4, padded = round_up(oracle_output_elements(r), vector);
    uint64_t sub = round_up((padded + r->local - 1) / r->local, vector);
    float *grads = malloc(n_ranks * sizeof *grads);
    bool ok = grads != NULL;

    for (uint32_t p = 0; ok && p < r->n_params; p++) {
        uint64_t shard = r->present[p] ? oracle_shard(&r->params[p], n_ranks) : 0, whole = oracle_whole(&r->params[p]);
        for (uint64_t i = 0; i < shard; i++, e++) {
            uint64_t x = oracle_locate(&r->params[p], n_ranks, rank, i);
            float before = r->accumulate ? oracle_output_before(r, rank, e) : 0.0f, result = before;
            double sum = 0;

            for (uint32_t u = 0; u < n_ranks; u++) {
                unsigned char item[4];
                oracle_grad_item(r, u, p, x, item);
                grads[u] = x < whole ? oracle_load(r->grad_dtype, item) : 0.0f; /* padding counts as zero */
                sum += (double)grads[u];
            }
            exact[e] = (double)before + (double)r->alpha * sum;
            if (r->nodes == 1) {
                float scaled = r->alpha * partial(grads, r->local, rank);
                result = result + scaled;
            }
            for (uint32_t first = 1; r->nodes > 1 && first <= r->nodes; first += r->w_wave) {
                float scaled = r->alpha * wave_sum(r, grads, m, first, e / sub);
                result = result + scaled;
            }
            out[e] = result;
        }
    }
    free(grads);
    return ok;
}
