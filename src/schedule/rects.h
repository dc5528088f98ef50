/*
 * rects.h - the pieces of gradients that make up a block of packed elements: few strided rectangles.
 */
#ifndef TIDE_RECTS_H
#define TIDE_RECTS_H

#include "geometry/geometry.h"

/* A piece of one parameter. Its rows are destination ranks, or the strips of one destination (Shard(d > 0)). */
typedef struct schedule_rect {
    uint32_t row;              /* first destination, counted from the block's first */
    uint64_t full, full_pitch; /* in the unsharded gradient, elements */
    uint64_t at;               /* packed element where the first row begins */
    uint64_t width, rows;
    uint64_t strips; /* packed elements between rows when they are strips; 0: rows are destinations */
    bool padding;    /* counts as zero and is never read */
} schedule_rect;
enum { SCHEDULE_MAX_RECTS = 3 * TIDE_MAX_LOCAL };

/* What packed elements [begin, end) hold of parameter p, for `rows` destination ranks from `first` on; none when they
 * do not meet. Returns the count. */
uint32_t schedule_rects(const geo_group *geo, uint32_t p, uint32_t first, uint32_t rows, uint64_t begin, uint64_t end,
                        schedule_rect out[SCHEDULE_MAX_RECTS]);
/* Last parameter that begins at or before a packed element. */
uint32_t schedule_param_at(const geo_group *geo, uint64_t element);

#endif
