/*
 * geometry.c - parameter descriptions to offsets. All sizes are checked once, here: a group that passes has every byte
 * count below 2^63.
 */
#include "geometry/geometry.h"

static int too_large(uint32_t group, uint32_t param)
{
    return tide_fail(TIDE_ERR_ARGUMENT, "group %u param %u: the parameter padded over all ranks exceeds 2^63 bytes",
                     group, param);
}

/* Multiplies dims[from..to) into *out. */
static bool multiply_dims(const tide_param *desc, int from, int to, uint64_t *out)
{
    for (int d = from; d < to; d++)
        if (!tide_mul(*out, (uint64_t)desc->dims[d], out))
            return false;
    return true;
}

static int init_param(geo_param *p, const geo_group *g, const tide_param *desc, uint32_t group, uint32_t param)
{
    uint64_t split = 1, before = 1, after = 1, n = g->ranks, padded;
    int d = desc->shard_dim;

    if (desc->ndim < 0 || desc->ndim > TIDE_MAX_DIMS)
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u param %u ndim: %d is not in 0..%d", group, param, desc->ndim,
                         TIDE_MAX_DIMS);
    for (int i = 0; i < desc->ndim; i++)
        if (desc->dims[i] < 0)
            return tide_fail(TIDE_ERR_ARGUMENT, "group %u param %u dims[%d]: %lld is negative", group, param, i,
                             (long long)desc->dims[i]);
    if (d < 0 || d > (desc->ndim > 1 ? desc->ndim - 1 : 0))
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u param %u shard_dim: %d is not in 0..%d", group, param, d,
                         desc->ndim > 1 ? desc->ndim - 1 : 0);
    if (desc->ndim > 0)
        split = (uint64_t)desc->dims[d];
    if (!multiply_dims(desc, 0, d, &before) || !multiply_dims(desc, d + 1, desc->ndim, &after))
        return too_large(group, param);
    if (d > 0 && split % n != 0)
        return tide_fail(
            TIDE_ERR_ARGUMENT,
            "group %u param %u dims[%d]: %llu is not a multiple of the %llu ranks, as shard_dim %d > 0 needs", group,
            param, d, (unsigned long long)split, (unsigned long long)n, d);
    p->outer = before;
    if (!tide_mul(tide_ceil_div(split, n), after, &p->strip) || !tide_mul(before, p->strip, &p->shard) ||
        !tide_mul(before, split, &p->whole) || !tide_mul(p->whole, after, &p->whole) ||
        !tide_mul(p->shard, n, &padded) || !tide_mul(padded, tide_max_u64(g->item, sizeof(float)), &padded))
        return too_large(group, param);
    p->name = tide_strdup(desc->name);
    return p->name ? TIDE_OK : TIDE_ERR_MEMORY;
}

static int check_dtypes(geo_group *g, const tide_group_desc *desc, uint32_t index)
{
    if (desc->dtype < TIDE_F32 || desc->dtype > TIDE_OPAQUE)
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u dtype: %d is not fp32, bf16, fp16 or opaque", index, desc->dtype);
    if (desc->shard_dtype < TIDE_F32 || desc->shard_dtype > TIDE_OPAQUE)
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u shard_dtype: %d is not fp32, bf16, fp16 or opaque", index,
                         desc->shard_dtype);
    if (desc->grad_dtype < TIDE_F32 || desc->grad_dtype > TIDE_NONE || desc->grad_dtype == TIDE_OPAQUE)
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u grad_dtype: %d is not fp32, bf16, fp16 or none", index,
                         desc->grad_dtype);
    if (desc->input != TIDE_INPUT_ADOPTED && desc->input != TIDE_INPUT_ARGUMENT)
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u input: %d is not TIDE_INPUT_ADOPTED or TIDE_INPUT_ARGUMENT",
                         index, desc->input);
    if (desc->landing != TIDE_LANDING_RING && desc->landing != TIDE_LANDING_PRIVATE)
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u landing: %d is not TIDE_LANDING_RING or TIDE_LANDING_PRIVATE",
                         index, desc->landing);
    if (desc->dtype == TIDE_OPAQUE) {
        if (desc->item_size == 0)
            return tide_fail(TIDE_ERR_ARGUMENT, "group %u item_size: 0, expected the bytes of an opaque item", index);
        if (desc->shard_dtype != TIDE_OPAQUE)
            return tide_fail(TIDE_ERR_ARGUMENT,
                             "group %u shard_dtype: %s, expected opaque like dtype: opaque items cannot be cast", index,
                             tide_dtype_name(desc->shard_dtype));
        g->item = desc->item_size;
    } else {
        if (desc->item_size != 0 && desc->item_size != tide_dtype_bytes(desc->dtype))
            return tide_fail(TIDE_ERR_ARGUMENT, "group %u item_size: %u, expected 0 for dtype %s", index,
                             desc->item_size, tide_dtype_name(desc->dtype));
        if (desc->shard_dtype == TIDE_OPAQUE)
            return tide_fail(TIDE_ERR_ARGUMENT,
                             "group %u shard_dtype: opaque, expected %s or a dtype that can be cast to it", index,
                             tide_dtype_name(desc->dtype));
        g->item = tide_dtype_bytes(desc->dtype);
    }
    if (desc->shard_dtype != desc->dtype && desc->input != TIDE_INPUT_ARGUMENT)
        return tide_fail(TIDE_ERR_ARGUMENT,
                         "group %u shard_dtype: %s differs from dtype %s, which needs input TIDE_INPUT_ARGUMENT", index,
                         tide_dtype_name(desc->shard_dtype), tide_dtype_name(desc->dtype));
    g->dtype = desc->dtype;
    g->shard_dtype = desc->shard_dtype;
    g->grad_dtype = desc->grad_dtype;
    g->input = desc->input;
    g->landing_kind = desc->landing;
    return TIDE_OK;
}

static int place_params(geo_group *g, uint32_t index)
{
    uint64_t bytes = 0, piece;
    for (uint32_t i = 0; i < g->n_params; i++) {
        geo_param *p = &g->params[i];
        p->offset = g->elements;
        p->landing = bytes;
        piece = p->shard * g->ranks * g->item; /* init_param has checked it */
        if (piece > INT64_MAX - TIDE_ALIGN || !tide_add(bytes, tide_align_up(piece, TIDE_ALIGN), &bytes) ||
            !tide_add(g->elements, p->shard, &g->elements))
            return tide_fail(TIDE_ERR_ARGUMENT, "group %u: parameters 0..%u padded over all ranks exceed 2^63 bytes",
                             index, i);
    }
    g->landing_bytes = bytes;
    g->shard_bytes = g->elements * g->item;
    /* fp32 gradients of all ranks are the largest thing ever counted */
    if (!tide_mul(g->elements, (uint64_t)g->ranks * sizeof(float), &piece))
        return tide_fail(TIDE_ERR_ARGUMENT,
                         "group %u: its parameters as fp32, padded over all ranks, exceed 2^63 bytes", index);
    return TIDE_OK;
}

int geo_group_init(geo_group *g, const tide_topology *topology, const tide_group_desc *desc, uint32_t index)
{
    int status;

    memset(g, 0, sizeof *g);
    if (desc->size != sizeof *desc)
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u size: %zu, expected %zu (TIDE_GROUP_DESC_INIT)", index,
                         desc->size, sizeof *desc);
    if (desc->n_params < 1 || desc->n_params > TIDE_MAX_PARAMS)
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u n_params: %u is not in 1..%d", index, desc->n_params,
                         TIDE_MAX_PARAMS);
    if (!desc->params)
        return tide_fail(TIDE_ERR_ARGUMENT, "group %u params: NULL, expected %u descriptions", index, desc->n_params);
    status = check_dtypes(g, desc, index);
    if (status != TIDE_OK)
        return status;
    g->nodes = topology->nodes;
    g->local = topology->local;
    g->ranks = topology->nodes * topology->local;
    g->name = tide_strdup(desc->name);
    g->params = tide_calloc(desc->n_params, sizeof *g->params);
    if (!g->name || !g->params) {
        geo_group_clear(g);
        return TIDE_ERR_MEMORY;
    }
    for (uint32_t i = 0; i < desc->n_params && status == TIDE_OK; i++) {
        status = init_param(&g->params[i], g, &desc->params[i], index, i);
        g->n_params = i + 1;
    }
    if (status == TIDE_OK)
        status = place_params(g, index);
    if (status != TIDE_OK)
        geo_group_clear(g);
    return status;
}

void geo_group_clear(geo_group *g)
{
    for (uint32_t i = 0; i < g->n_params; i++)
        tide_free(g->params[i].name);
    tide_free(g->params);
    tide_free(g->name);
    memset(g, 0, sizeof *g);
}

int geo_group_subset(geo_group *out, const geo_group *g, const uint8_t *present, uint32_t *source_index)
{
    *out = *g;
    out->n_params = 0;
    out->elements = 0;
    out->name = tide_strdup(g->name);
    out->params = tide_calloc(g->n_params, sizeof *out->params);
    if (!out->name || !out->params)
        goto fail;
    for (uint32_t i = 0; i < g->n_params; i++) {
        geo_param *p = &out->params[out->n_params];
        if (present && !present[i])
            continue;
        *p = g->params[i]; /* the landing stays where the full group has it */
        p->name = tide_strdup(g->params[i].name);
        if (!p->name)
            goto fail;
        p->offset = out->elements;
        out->elements += p->shard;
        if (source_index)
            source_index[out->n_params] = i;
        out->n_params++;
    }
    out->shard_bytes = out->elements * out->item;
    return TIDE_OK;
fail:
    geo_group_clear(out);
    return TIDE_ERR_MEMORY;
}

/*
 * Elements [begin, end) of a shard touch at most: the rest of a strip, some whole strips, the start of a strip.
 *
 *     shard of rank 1   |  s0  |  s1  |  s2  |  s3  |
 *                          [begin                end)
 *                          head  whole   whole tail
 */
int geo_spans(const geo_param *p, uint32_t n_ranks, uint32_t rank, uint64_t begin, uint64_t end, geo_span out[3])
{
    uint64_t full_pitch = p->strip * n_ranks;
    int n = 0;

    while (begin < end) {
        uint64_t strip = begin / p->strip, within = begin % p->strip, width = p->strip - within, rows = 1;
        if (within == 0 && end - begin >= p->strip)
            rows = (end - begin) / p->strip;
        else
            width = tide_min_u64(width, end - begin);
        out[n++] = (geo_span){strip * full_pitch + rank * p->strip + within, begin, width, rows, full_pitch, p->strip};
        begin += width * rows;
    }
    return n;
}
