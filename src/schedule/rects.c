/* rects.c - see rects.h. */
#include "schedule/rects.h"

/*
 * Shard elements [x, y) of a row-sharded parameter (paper 4.1: the destination axis is coalesced):
 *
 *     rank r   |########|   rows that are real up to y: one rectangle
 *     rank r+1 |########|
 *     rank r+2 |####....|   the row where the parameter ends: its real part and the padding
 *     rank r+3 |........|   padding
 */
static uint32_t row_rects(const geo_param *p, uint32_t first, uint32_t rows, uint64_t x, uint64_t y, schedule_rect *out)
{
    schedule_rect base = {.full = first * p->strip + x, .full_pitch = p->strip, .at = p->offset + x, .width = y - x};
    uint32_t n = 0, whole = 0;

    if (p->whole >= y && (p->whole - y) / p->strip >= first)
        whole = (uint32_t)tide_min_u64(rows, (p->whole - y) / p->strip - first + 1);
    if (whole > 0) {
        out[n] = base;
        out[n++].rows = whole;
    }
    base.row = whole;
    base.full += whole * p->strip;
    if (whole < rows && geo_valid(p, first + whole) > x) {
        uint64_t valid = geo_valid(p, first + whole);
        base.rows = 1;
        out[n] = base;
        out[n++].width = valid - x;
        out[n] = base;
        out[n].at = p->offset + valid;
        out[n].width = y - valid;
        out[n++].padding = true;
        base.row++;
    }
    if (base.row < rows) {
        out[n] = base;
        out[n].rows = rows - base.row;
        out[n++].padding = true;
    }
    return n;
}

/* Strips x destinations is one axis too many for a rectangle: the shorter one becomes several. */
static uint32_t strip_rects(const geo_param *p, uint32_t n_ranks, uint32_t first, uint32_t rows, uint64_t x, uint64_t y,
                            schedule_rect *out)
{
    geo_span spans[3];
    int n_spans = geo_spans(p, n_ranks, first, x, y, spans);
    uint32_t n = 0;

    for (int i = 0; i < n_spans; i++) {
        const geo_span *q = &spans[i];
        bool by_strip = q->rows < rows;
        uint64_t count = by_strip ? q->rows : rows;
        for (uint64_t k = 0; k < count; k++) {
            schedule_rect r = {.full = q->full, .at = p->offset + q->shard, .width = q->width};
            if (by_strip) {
                r.at += k * q->shard_pitch;
                r.full += k * q->full_pitch;
                r.rows = rows;
                r.full_pitch = p->strip; /* the next rank's piece of the same strip */
            } else {
                r.row = (uint32_t)k;
                r.full += k * p->strip;
                r.rows = q->rows;
                r.full_pitch = q->full_pitch;
                r.strips = q->shard_pitch;
            }
            out[n++] = r;
        }
    }
    return n;
}

uint32_t schedule_rects(const geo_group *geo, uint32_t p, uint32_t first, uint32_t rows, uint64_t begin, uint64_t end,
                        schedule_rect out[SCHEDULE_MAX_RECTS])
{
    const geo_param *q = &geo->params[p];
    uint64_t from = tide_max_u64(begin, q->offset), to = tide_min_u64(end, q->offset + q->shard);
    if (from >= to)
        return 0;
    if (q->outer == 1)
        return row_rects(q, first, rows, from - q->offset, to - q->offset, out);
    return strip_rects(q, geo->ranks, first, rows, from - q->offset, to - q->offset, out);
}

uint32_t schedule_param_at(const geo_group *geo, uint64_t element)
{
    uint32_t low = 0, high = geo->n_params;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (geo->params[middle].offset <= element)
            low = middle;
        else
            high = middle;
    }
    return low;
}
