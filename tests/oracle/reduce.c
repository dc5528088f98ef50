/* reduce.c - see reduce.h. Nothing is blocked, merged or reused: every output element is looked up on its own. */
#include "reduce.h"

#include <math.h>
#include <string.h>

static double from_half(uint16_t h)
{
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double sign = h >> 15 ? -1.0 : 1.0;
    if (exponent == 31)
        return mantissa ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(mantissa, -24);
    return sign * ldexp(1024 + mantissa, exponent - 25);
}

static float load(const void *base, int format, int64_t i)
{
    uint16_t h;
    uint32_t bits;
    float f;
    if (format == REDUCE_F32) {
        memcpy(&f, (const char *)base + 4 * i, 4);
        return f;
    }
    memcpy(&h, (const char *)base + 2 * i, 2);
    if (format == REDUCE_F16)
        return (float)from_half(h);
    bits = (uint32_t)h << 16;
    memcpy(&f, &bits, 4);
    return f;
}

static int64_t shard_rows(const reduce_case *c, const reduce_param *p)
{
    int64_t ranks = (int64_t)c->nodes * c->local, rows = p->ndim ? p->dims[p->shard_dim] : 1;
    return (rows + ranks - 1) / ranks;
}

static int64_t shard_elements(const reduce_case *c, const reduce_param *p)
{
    int64_t n = shard_rows(c, p);
    for (int d = 0; d < p->ndim; d++)
        if (d != p->shard_dim)
            n *= p->dims[d];
    return n;
}

uint64_t reduce_elements(const reduce_case *c)
{
    uint64_t n = 0;
    for (uint32_t p = 0; p < c->n_params; p++)
        n += (uint64_t)shard_elements(c, &c->params[p]);
    return n;
}

/* Where element e of rank's packed output lies: its parameter, and its index there or -1 for padding. */
typedef struct place { uint32_t param; int64_t index; } place;

static place find(const reduce_case *c, uint32_t rank, uint64_t e)
{
    place at = {0, 0};
    const reduce_param *p;
    int64_t rest, coordinate[8], rows;

    while (e >= (uint64_t)shard_elements(c, &c->params[at.param]))
        e -= (uint64_t)shard_elements(c, &c->params[at.param++]);
    p = &c->params[at.param];
    rows = shard_rows(c, p);
    if (p->ndim == 0) {
        at.index = rank == 0 ? 0 : -1;
        return at;
    }
    rest = (int64_t)e;
    for (int d = p->ndim - 1; d >= 0; d--) {
        int64_t extent = d == p->shard_dim ? rows : p->dims[d];
        coordinate[d] = rest % extent + (d == p->shard_dim ? rank * rows : 0);
        rest /= extent;
    }
    for (int d = 0; d < p->ndim; d++) {
        if (coordinate[d] >= p->dims[d]) {
            at.index = -1;
            return at;
        }
        at.index = at.index * p->dims[d] + coordinate[d];
    }
    return at;
}

static float gradient(const reduce_case *c, uint32_t rank, place at)
{
    return at.index < 0 ? 0.0f : load(c->grads[rank * c->n_params + at.param], c->format, at.index);
}

/* A node's sum by the owner `owner`: the others in local order, then the owner's own. */
static float partial(const reduce_case *c, uint32_t node, uint32_t owner, place at)
{
    float sum = 0;
    int started = 0;
    for (uint32_t j = 0; j < c->local; j++) {
        float x;
        if (j == owner)
            continue;
        x = gradient(c, node * c->local + j, at);
        sum = started ? sum + x : x;
        started = 1;
    }
    return started ? sum + gradient(c, node * c->local + owner, at) : gradient(c, node * c->local + owner, at);
}

/* out += alpha * sum for one wave's sum: a rounded multiply, then a rounded add. */
static float add_scaled(float out, float alpha, float sum)
{
    volatile float scaled = alpha * sum;
    return out + scaled;
}

/* What lies on local rank j of destination node m in a wave: the contributor that the rotation puts there, or zero. */
static float lying_on(const reduce_case *c, uint32_t m, uint32_t j, uint32_t s, uint32_t first, uint32_t last, place at)
{
    for (uint32_t k = first; k <= last; k++) {
        uint32_t turn = k % c->nodes % c->local, node = (m + c->nodes - k % c->nodes) % c->nodes;
        if ((j + turn) % c->local == s)
            return partial(c, node, j, at);
    }
    return 0.0f;
}

/* One wave's sum: what lies on the node's ranks in their order; with one rank, what came from the contributors in theirs. */
static float wave_sum(const reduce_case *c, uint32_t m, uint32_t s, uint32_t first, uint32_t last, place at)
{
    float sum;
    if (c->local == 1) {
        sum = gradient(c, (m + c->nodes - first) % c->nodes, at);
        for (uint32_t k = first + 1; k <= last; k++)
            sum = sum + gradient(c, (m + c->nodes - k) % c->nodes, at);
        return sum;
    }
    sum = lying_on(c, m, 0, s, first, last, at);
    for (uint32_t j = 1; j < c->local; j++)
        sum = sum + lying_on(c, m, j, s, first, last, at);
    return sum;
}

void reduce_exact(const reduce_case *c, uint32_t rank, float *out)
{
    uint64_t elements = reduce_elements(c), slice = ((elements + c->local - 1) / c->local + 3) / 4 * 4;
    uint32_t m = rank / c->local;

    for (uint64_t e = 0; e < elements; e++) {
        place at = find(c, rank, e);
        float y = c->accumulate ? out[e] : 0.0f;
        if (c->nodes == 1) {
            out[e] = add_scaled(y, c->alpha, partial(c, 0, rank, at));
            continue;
        }
        for (uint32_t first = 1; first <= c->nodes; first += c->w_wave) {
            uint32_t last = first + c->w_wave - 1 < c->nodes ? first + c->w_wave - 1 : c->nodes;
            y = add_scaled(y, c->alpha, wave_sum(c, m, (uint32_t)(e / slice), first, last, at));
        }
        out[e] = y;
    }
}

void reduce_f64(const reduce_case *c, uint32_t rank, double *out)
{
    uint64_t elements = reduce_elements(c);
    for (uint64_t e = 0; e < elements; e++) {
        place at = find(c, rank, e);
        double sum = 0;
        for (uint32_t u = 0; u < c->nodes * c->local; u++)
            sum += gradient(c, u, at);
        out[e] = (c->accumulate ? out[e] : 0) + (double)c->alpha * sum;
    }
}
