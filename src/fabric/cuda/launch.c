/*
 * launch.c - what becomes of a batch: copy engine or kernel, and which kernel in which shape. Batches are resolved into
 * the kernels' structs, which are members here, so that a launch allocates nothing.
 */
#include "fabric/cuda/launch.h"

enum {
    BATCH = 256,              /* descriptors of one batched copy */
    SHARED_LIMIT = 227 << 10, /* of a CTA, compute capability 9.0 and 10.0 */
    MAX_PITCH = INT32_MAX,    /* of a 2-D copy */
    NARROW_ROW = 4 << 10,     /* narrower rows are slow on a copy engine */
    LOCAL_ROW = 2 << 20,      /* narrower rows within the GPU are a kernel's */
    SHORT_ROW = 64,           /* elements of a sum */
    MERGE_FROM = 3,           /* fewer neighbours stay descriptors of their own */
    ENGINE_FILLS = 2,         /* more fills than these are one kernel */
    ONE_LAUNCH = 8 << 20      /* bytes; up to them a second kernel costs more than the better one for each run saves */
};

/* Measured on H200s with driver 580, 2026-11-29 and 30.
 *
 * This GPU: the driver copies by kernels of its own that take every SM: beside a matrix product of one wave 128 MiB take it
 * 57 us in 30 copies, 61 in a batch of 8, 66 in one copy, and 160 as rows of one 2-D copy, which by itself is slower too (164 us,
 * one copy 67). So what is wide goes there row by row, and not in a batch (7.5 us a copy of 4 MiB, else 5). What is narrow is
 * one kernel of few CTAs: 64 parts of 32 MiB take 16 CTAs 48 us, the driver 228.
 *
 * A peer, whole all-gathers of 30 parameters and reduce-scatters of 16 by the one and by the other: with an engine 1 / 2 / 4 / 8 MiB
 * a shard take 30 / 34 / 41 / 52 us, by 16 CTAs 27 / 25 / 33 and more, by 32 CTAs 25 / 27 / 31, by 8 CTAs 27 / 28 / 35 / 51. 1 / 2 / 4 / 8 MiB
 * of sums, which are half as many bytes to the peer, take 33 / 36 / 38 / 46 us and by 32 CTAs 32 / 33 / 36 / 49. An engine needs long to
 * start, and the signal behind it is a stream operation; descriptors cost it next to nothing (16 in a batch as much as one). The weight
 * is what makes the choice that of the measurements: 30 descriptors are a kernel's up to 4.7 MiB, 16 up to 3.9, one up to 3.1. */
launch_cost launch_peer_cost = {.engine_start = 9.8, .engine_descriptor = 0.1, .engine_rate = 390e3,
                                .kernel_start = 4, .kernel_cta_rate = 33e3, .kernel_rate = 390e3, .kernel_weight = 1.7};

bool launch_by_kernel(const launch_cost *cost, uint64_t descriptors, uint64_t bytes, bool mixed, uint32_t unit, uint32_t ctas)
{
    double rate = cost->kernel_cta_rate * ctas * unit / 16, b = (double)bytes;

    if (rate > cost->kernel_rate)
        rate = cost->kernel_rate;
    return cost->engine_start + (double)descriptors * cost->engine_descriptor + b / cost->engine_rate +
               (mixed ? cost->kernel_start : 0) >
           cost->kernel_start + cost->kernel_weight * b / rate;
}

const launch_shapes launch_default_shapes = {
    .fat = {.slot = KERNEL_FAT_SLOT, .warps = 12, .slots = 2},
    .thin = {.slot = KERNEL_THIN_SLOT, .warps = 8, .slots = 2},
    .wide = {.slot = KERNEL_THIN_SLOT, .warps = 16, .slots = 2},
};

struct cuda_kernels {
    const cuda_driver *driver;
    cu_module module;
    cu_function functions[KERNEL_COUNT];
    launch_shapes shapes;
    kernel_reduce reduce;
    kernel_copy kernel, bulk;         /* runs that were not yet launched */
    uint32_t n_batch;                 /* descriptors that were not yet enqueued */
    cu_ptr batch_dst[BATCH], batch_src[BATCH];
    size_t batch_bytes[BATCH];
};

/* ---- loading --------------------------------------------------------------------------------- */

int cuda_kernels_load(const cuda_driver *driver, cu_context context, cuda_kernels **out)
{
    static const char *const names[KERNEL_COUNT] = {
#define KERNEL_X(id, name, type) [id] = #name,
        KERNELS(KERNEL_X)
#undef KERNEL_X
    };
    cuda_kernels *k = tide_calloc(1, sizeof *k);
    size_t image_bytes;
    const void *image = cuda_image(&image_bytes);
    int status;

    (void)context; /* is current */
    *out = NULL;
    if (!k)
        return TIDE_ERR_MEMORY;
    k->driver = driver;
    k->shapes = launch_default_shapes;
    status = cuda_check(driver, driver->ModuleLoadData(&k->module, image), "loading the kernels");
    if (status != TIDE_OK && image_bytes == 0)
        status = tide_fail(TIDE_ERR_UNSUPPORTED, "CUDA kernels: this library was built without nvcc");
    for (uint32_t i = 0; status == TIDE_OK && i < KERNEL_COUNT; i++) {
        bool ring = (i >= KERNEL_REDUCE_THIN_F32 && i <= KERNEL_REDUCE_FAT_ADD_F16) || i == KERNEL_COPY_BULK;
        status = cuda_check(driver, driver->ModuleGetFunction(&k->functions[i], k->module, names[i]), names[i]);
        /* An SM changes the split of its memory between cache and shared only when it is empty: kernels that are to
         * run beside a matrix product, which takes all of it as shared, have to want the same split. */
        if (status == TIDE_OK)
            status = cuda_check(driver, driver->FuncSetAttribute(k->functions[i], CU_FUNC_SHARED_CARVEOUT, 100), names[i]);
        if (status == TIDE_OK && ring) /* the rest of it is static */
            status = cuda_check(
                driver, driver->FuncSetAttribute(k->functions[i], CU_FUNC_MAX_DYNAMIC_SHARED, SHARED_LIMIT - 1024), names[i]);
    }
    if (status != TIDE_OK) {
        cuda_kernels_unload(k, false);
        return status;
    }
    *out = k;
    return TIDE_OK;
}

void cuda_kernels_unload(cuda_kernels *k, bool in_use)
{
    if (k && k->module && !in_use)
        k->driver->ModuleUnload(k->module);
    tide_free(k);
}

void cuda_kernels_shapes(cuda_kernels *k, const launch_shapes *shapes)
{
    k->shapes = *shapes;
}

uint32_t launch_shared_bytes(const launch_shape *shape)
{
    return shape->warps * shape->slots * (shape->slot + KERNEL_SLOT_EXTRA);
}

uint32_t launch_max_warps(uint32_t slot, int add)
{
    if (slot == KERNEL_FAT_SLOT)
        return add ? KERNEL_FAT_ADD_WARPS : KERNEL_FAT_WARPS;
    return add ? KERNEL_THIN_ADD_WARPS : KERNEL_THIN_WARPS;
}

static int launch(cuda_kernels *k, uint32_t id, uint64_t ctas, uint32_t warps, uint32_t shared, cu_stream stream,
                  void *arguments)
{
    cu_result result = k->driver->LaunchKernel(k->functions[id], (unsigned)ctas, 1, 1, 32 * warps, 1, 1, shared, stream,
                                               &arguments, NULL);
    return result == CU_OK ? TIDE_OK : cuda_check(k->driver, result, "launching a kernel");
}

static uint64_t resolve(const fab_ptr *p, const void *const *args)
{
    return p->arg >= 0 ? (uintptr_t)args[p->arg] + p->base : p->base;
}

static uint32_t item_bytes(int dtype)
{
    uint32_t bytes = tide_dtype_bytes(dtype);
    return bytes ? bytes : 1;
}

/* ---- sums ------------------------------------------------------------------------------------ */

typedef struct sum {
    cu_stream stream;
    int dtype;
    uint32_t ctas, kernel, warps, shared, used_sources;
} sum;

/* All sources have one dtype; a sum without any source is of any. */
static int sum_dtype(const fab_reduce *reduce, int *dtype)
{
    *dtype = -1;
    for (uint32_t i = 0; i < reduce->n_segments; i++) {
        const fab_segment *s = &reduce->segments[i];
        for (uint32_t j = s->first_source; j < s->first_source + s->n_sources; j++) {
            int found = (int)reduce->sources[j].dtype;
            if (*dtype >= 0 && found != *dtype)
                return tide_fail(TIDE_ERR_UNSUPPORTED, "reduce: sources of %s and of %s, expected one dtype",
                                 tide_dtype_name(*dtype), tide_dtype_name(found));
            *dtype = found;
        }
    }
    if (*dtype < 0)
        *dtype = TIDE_F32;
    return TIDE_OK;
}

/* A ring kernel; the plain one where rows are so short that most of a slot would stay empty, or sources too many. */
static void choose_shape(cuda_kernels *k, const fab_reduce *reduce, sum *s)
{
    uint64_t elems = 0, rows = 0;
    uint32_t most = 0, kind = KERNEL_REDUCE_PLAIN_F32;
    bool add = k->reduce.beta == FAB_BETA_ONE;
    launch_shape shape = s->ctas <= LAUNCH_FAT_CTAS ? k->shapes.fat : s->ctas < LAUNCH_WIDE_CTAS ? k->shapes.thin : k->shapes.wide;

    for (uint32_t i = 0; i < reduce->n_segments; i++) {
        const fab_segment *g = &reduce->segments[i];
        elems += g->rows * g->elems;
        rows += g->rows;
        most = g->n_sources > most ? g->n_sources : most;
    }
    s->warps = KERNEL_PLAIN_WARPS;
    s->shared = k->reduce.slots = 0;
    k->reduce.tile_elems = KERNEL_PLAIN_TILE;
    if (elems >= rows * SHORT_ROW && most <= KERNEL_RING_SOURCES) {
        bool fat = shape.slot == KERNEL_FAT_SLOT;
        kind = add ? (fat ? KERNEL_REDUCE_FAT_ADD_F32 : KERNEL_REDUCE_THIN_ADD_F32)
                   : (fat ? KERNEL_REDUCE_FAT_F32 : KERNEL_REDUCE_THIN_F32);
        if (shape.warps > launch_max_warps(shape.slot, add))
            shape.warps = launch_max_warps(shape.slot, add);
        s->warps = shape.warps;
        s->shared = launch_shared_bytes(&shape);
        k->reduce.slots = shape.slots;
        k->reduce.tile_elems = shape.slot / item_bytes(s->dtype);
    }
    s->kernel = kind + (uint32_t)s->dtype; /* each kind is three kernels, in the order of the dtypes */
}
_Static_assert(TIDE_F32 == 0 && TIDE_BF16 == 1 && TIDE_F16 == 2, "the order of the kernels of a kind");

/* The first row's address may be anywhere in its pitch: pitches count where there are more rows. */
static int check_alignment(const fab_reduce *reduce, const fab_segment *g, const void *const *args, uint32_t item)
{
    uint64_t dst = resolve(&g->dst, args) | (g->rows > 1 ? g->dst_pitch : 0), src = 0;
    for (uint32_t j = g->first_source; j < g->first_source + g->n_sources; j++)
        src |= resolve(&reduce->sources[j].at, args) | (g->rows > 1 ? reduce->sources[j].row_pitch : 0);
    if (dst % sizeof(float) == 0 && src % item == 0)
        return TIDE_OK;
    return tide_fail(TIDE_ERR_UNSUPPORTED, "reduce: addresses or pitches that are no multiples of their items (4 and %u bytes)",
                     item);
}

static void set_posts(kernel_posts *to, const launch_posts *posts, const cu_ptr *words, uint32_t n)
{
    to->n = n;
    to->done = n ? posts->done : 0;
    to->value = n ? posts->value : 0;
    for (uint32_t i = 0; i < n; i++)
        to->words[i] = words[i];
}

/* Launches what was packed, with these posts, and empties the struct. */
static int flush_sum(cuda_kernels *k, sum *s, const launch_posts *posts, const cu_ptr *words, uint32_t n_posts)
{
    kernel_reduce *p = &k->reduce;
    uint64_t ctas = tide_min_u64(s->ctas, tide_ceil_div(p->n_tiles, s->warps));
    int status;

    if (p->n_tiles == 0 && n_posts == 0)
        return TIDE_OK;
    set_posts(&p->posts, posts, words, n_posts);
    status = launch(k, s->kernel, tide_max_u64(ctas, 1), s->warps, s->shared, s->stream, p);
    p->n_segments = p->n_tiles = s->used_sources = 0;
    return status;
}

static int pack_segment(cuda_kernels *k, const fab_reduce *reduce, const fab_segment *g, const void *const *args, sum *s)
{
    kernel_reduce *p = &k->reduce;
    uint64_t row_tiles = tide_ceil_div(g->elems, p->tile_elems), tiles;
    kernel_segment *to;
    int status;

    if (g->elems == 0 || g->rows == 0)
        return TIDE_OK;
    if ((status = check_alignment(reduce, g, args, item_bytes(s->dtype))) != TIDE_OK)
        return status;
    if (g->n_sources > KERNEL_SOURCES)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "reduce: a sum of %u sources, expected at most %d", g->n_sources,
                         KERNEL_SOURCES);
    if (!tide_mul(row_tiles, g->rows, &tiles) || tiles > INT32_MAX)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "reduce: %u rows of %llu elements, expected fewer than 2^31 tiles of %u",
                         g->rows, (unsigned long long)g->elems, p->tile_elems);
    if (p->n_segments == KERNEL_SEGMENTS || s->used_sources + g->n_sources > KERNEL_SOURCES ||
        p->n_tiles + tiles > INT32_MAX) {
        if ((status = flush_sum(k, s, NULL, NULL, 0)) != TIDE_OK)
            return status;
    }
    p->tiles[p->n_segments] = p->n_tiles;
    to = &p->segments[p->n_segments++];
    *to = (kernel_segment){.dst = resolve(&g->dst, args),
                           .dst_pitch = g->dst_pitch,
                           .elems = g->elems,
                           .rows = g->rows,
                           .first_source = s->used_sources,
                           .n_sources = g->n_sources,
                           .row_tiles = (uint32_t)row_tiles};
    for (uint32_t j = 0; j < g->n_sources; j++) {
        const fab_source *from = &reduce->sources[g->first_source + j];
        p->sources[s->used_sources++] = (kernel_source){resolve(&from->at, args), from->row_pitch};
    }
    p->n_tiles += (uint32_t)tiles;
    return TIDE_OK;
}

/* Sums that the switch makes, a launch a row. */
static int switch_sums(cuda_kernels *k, const fab_reduce *reduce, const void *const *args, const sum *s)
{
    int status = TIDE_OK;

    for (uint32_t i = 0; status == TIDE_OK && i < reduce->n_segments; i++) {
        const fab_segment *g = &reduce->segments[i];
        const fab_source *from = &reduce->sources[g->first_source];
        kernel_multimem p = {.dst = resolve(&g->dst, args), .elems = g->elems, .beta = k->reduce.beta, .alpha = k->reduce.alpha};

        p.src = g->n_sources ? resolve(&from->at, args) : 0;
        if (g->n_sources != 1 || !from->multimem || s->dtype != TIDE_F32 || p.src % 16 || from->row_pitch % 16 ||
            p.dst % sizeof(float) || g->dst_pitch % sizeof(float))
            return tide_fail(TIDE_ERR_UNSUPPORTED,
                             "reduce: a sum by the switch, expected one source of fp32 on 16 bytes, in every segment");
        for (uint32_t row = 0; status == TIDE_OK && p.elems && row < g->rows; row++) {
            status = launch(k, KERNEL_MULTIMEM_REDUCE, tide_min_u64(s->ctas, tide_ceil_div(p.elems, 4 * 32 * KERNEL_PLAIN_WARPS)),
                            KERNEL_PLAIN_WARPS, 0, s->stream, &p);
            p.src += from->row_pitch;
            p.dst += g->dst_pitch;
        }
    }
    return status;
}

static bool by_switch(const fab_reduce *reduce)
{
    for (uint32_t i = 0; i < reduce->n_segments; i++)
        if (reduce->segments[i].n_sources && reduce->sources[reduce->segments[i].first_source].multimem)
            return true;
    return false;
}

int cuda_launch_reduce(cuda_kernels *k, cu_stream stream, const fab_reduce *reduce, const void *const *args,
                       int accumulate, float alpha, uint32_t ctas, const launch_posts *posts)
{
    const cu_ptr *words = posts ? posts->words : NULL;
    uint32_t left = posts ? posts->n : 0, n;
    kernel_reduce *p = &k->reduce;
    sum s = {.stream = stream, .ctas = ctas ? ctas : 1};
    int status = sum_dtype(reduce, &s.dtype);

    if (status != TIDE_OK)
        return status;
    p->n_segments = p->n_tiles = 0;
    p->beta = reduce->beta;
    if (p->beta == FAB_BETA_CALL)
        p->beta = accumulate ? FAB_BETA_ONE : FAB_BETA_ZERO;
    p->alpha = p->beta == FAB_NOT_FINAL ? 1.0f : alpha;
    choose_shape(k, reduce, &s);
    if (by_switch(reduce)) {
        status = switch_sums(k, reduce, args, &s);
        if (status != TIDE_OK)
            return status;
    }
    for (uint32_t i = 0; status == TIDE_OK && i < reduce->n_segments && !by_switch(reduce); i++)
        status = pack_segment(k, reduce, &reduce->segments[i], args, &s);
    do { /* the posts of the last launch, and of further ones where they are too many */
        n = left < KERNEL_MAX_POSTS ? left : KERNEL_MAX_POSTS;
        if (status == TIDE_OK)
            status = flush_sum(k, &s, posts, words, n);
        words = n ? words + n : words;
        left -= n;
    } while (status == TIDE_OK && left);
    return status;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* A run with its addresses, in bytes; rows that follow each other without a gap are one. */
typedef struct bytes_run {
    uint64_t src, dst, width, rows, src_pitch, dst_pitch; /* src 0: fill */
} bytes_run;

typedef struct batch {
    cu_stream stream;
    const fab_copy *copy;
    const void *const *args;
    uint32_t cast; /* KERNEL_CAST_..., or KERNEL_COUNT */
    uint32_t ctas;
    bool local;  /* within this GPU */
    bool kernel; /* not by copy engine, whatever the run */
    uint32_t all; /* of the two for bytes the one for all runs; KERNEL_COUNT: for each the better one */
    bool engine; /* a copy engine has had some of it */
} batch;

static bytes_run flatten(const batch *b, const fab_run *run)
{
    uint64_t item = item_bytes(b->copy->src_dtype);
    bytes_run r = {run->src.zero ? 0 : resolve(&run->src, b->args), resolve(&run->dst, b->args), run->width * item,
                   run->rows, run->src_pitch, run->dst_pitch};
    if (run->src.zero)
        r.width = run->width * item_bytes(b->copy->dst_dtype);
    if (r.rows > 1 && r.dst_pitch == r.width && (!r.src || r.src_pitch == r.width)) {
        r.width *= r.rows;
        r.rows = 1;
    }
    return r;
}

/* Both of one argument, or both of the arena: a 2-D copy has to stay within an allocation on either side. */
static bool one_memory(const fab_ptr *a, const fab_ptr *b)
{
    return a->arg == b->arg;
}

/* Number of runs from first on that are equal and equidistant, so that they are one 2-D copy. *r: that copy. */
static uint32_t merge(const batch *b, uint32_t first, bytes_run *r)
{
    uint32_t n = 1;
    *r = flatten(b, &b->copy->runs[first]);
    if (r->rows != 1 || !r->src || !r->width)
        return 1;
    for (; first + n < b->copy->n_runs; n++) {
        bytes_run next = flatten(b, &b->copy->runs[first + n]);
        uint64_t src_step = next.src - (r->src + (n - 1) * r->src_pitch);
        uint64_t dst_step = next.dst - (r->dst + (n - 1) * r->dst_pitch);
        if (!one_memory(&b->copy->runs[first].src, &b->copy->runs[first + n].src) ||
            !one_memory(&b->copy->runs[first].dst, &b->copy->runs[first + n].dst))
            break;
        if (next.rows != 1 || next.width != r->width || !next.src || src_step < r->width || src_step > MAX_PITCH ||
            dst_step < r->width || dst_step > MAX_PITCH)
            break;
        if (n == 1) {
            r->src_pitch = src_step;
            r->dst_pitch = dst_step;
        } else if (src_step != r->src_pitch || dst_step != r->dst_pitch) {
            break;
        }
    }
    r->rows = n;
    if (n > 1 && r->src_pitch == r->width && r->dst_pitch == r->width) {
        r->width *= n;
        r->rows = 1;
    } else if (n < MERGE_FROM) {
        r->rows = n = 1;
    }
    return n;
}

static bool engine_rows(const bytes_run *r)
{
    return r->rows == 1 || (r->width >= NARROW_ROW && r->dst_pitch <= MAX_PITCH && (!r->src || r->src_pitch <= MAX_PITCH));
}

/* Bytes that are moved at once: the most that divide addresses, width and pitches. */
static uint32_t unit_of(const bytes_run *r)
{
    uint64_t all = r->src | r->dst | r->width | (r->rows > 1 ? r->src_pitch * (r->src != 0) | r->dst_pitch : 0);
    uint32_t unit = 16;
    while (all % unit)
        unit /= 2;
    return unit;
}

/* Whether a kernel is the better way for all of it, within the GPU where no row is the driver's; and which. */
static bool kernel_is_better(batch *b)
{
    uint64_t descriptors = 0, bytes = 0, rows = 0;
    uint32_t unit = 16;
    bool fills = false, mixed = false, wide = false;
    for (uint32_t i = 0; i < b->copy->n_runs;) {
        bytes_run r;
        i += merge(b, i, &r);
        if (r.width == 0 || r.rows == 0)
            continue;
        descriptors += engine_rows(&r) ? 1 : 0;
        mixed |= !engine_rows(&r);
        bytes += r.width * r.rows;
        rows += r.rows;
        wide |= r.width >= LOCAL_ROW;
        fills |= !r.src;
        if (unit_of(&r) < unit)
            unit = unit_of(&r);
    }
    if (b->local ? wide : !launch_by_kernel(&launch_peer_cost, descriptors, bytes, mixed, unit, b->ctas))
        return false;
    if (bytes <= ONE_LAUNCH)
        b->all = unit == 16 && !fills && bytes >= rows * KERNEL_BULK_ROW ? KERNEL_COPY_BULK : KERNEL_COPY_PLAIN;
    return true;
}

static int flush_engine(cuda_kernels *k, const batch *b)
{
    const cuda_driver *d = k->driver;
    cu_copy_attributes attributes = {.src_access_order = CU_ORDER_STREAM, .flags = CU_COPY_PREFER_OVERLAP};
    size_t first = 0;
    cu_result result = CU_OK;

    if (k->n_batch > 1 && d->MemcpyBatchAsync && !b->local)
        result = d->MemcpyBatchAsync(k->batch_dst, k->batch_src, k->batch_bytes, k->n_batch, &attributes, &first, 1, b->stream);
    else
        for (uint32_t i = 0; result == CU_OK && i < k->n_batch; i++)
            result = d->MemcpyAsync(k->batch_dst[i], k->batch_src[i], k->batch_bytes[i], b->stream);
    k->n_batch = 0;
    return result == CU_OK ? TIDE_OK : cuda_check(d, result, "enqueueing copies");
}

static int engine_run(cuda_kernels *k, batch *b, const bytes_run *r)
{
    const cuda_driver *d = k->driver;
    cu_result result;

    b->engine = true;
    if (r->rows == 1 && r->src) {
        k->batch_dst[k->n_batch] = r->dst;
        k->batch_src[k->n_batch] = r->src;
        k->batch_bytes[k->n_batch++] = r->width;
        return k->n_batch == BATCH ? flush_engine(k, b) : TIDE_OK;
    }
    if (!r->src) {
        result = r->rows == 1 ? d->MemsetD8Async(r->dst, 0, r->width, b->stream)
                              : d->MemsetD2D8Async(r->dst, r->dst_pitch, 0, r->width, r->rows, b->stream);
    } else {
        cu_copy2d copy = {.src_type = CU_MEMORY_DEVICE,
                          .src_device = r->src,
                          .src_pitch = r->src_pitch,
                          .dst_type = CU_MEMORY_DEVICE,
                          .dst_device = r->dst,
                          .dst_pitch = r->dst_pitch,
                          .width = r->width,
                          .height = r->rows};
        result = d->Memcpy2DAsync(&copy, b->stream);
    }
    return result == CU_OK ? TIDE_OK : cuda_check(d, result, "enqueueing a copy");
}

static int each_row_by_engine(cuda_kernels *k, batch *b, const bytes_run *all)
{
    int status = TIDE_OK;
    for (uint64_t row = 0; status == TIDE_OK && all->width && row < all->rows; row++) {
        bytes_run r = {all->src + row * all->src_pitch, all->dst + row * all->dst_pitch, all->width, 1, 0, 0};
        status = engine_run(k, b, &r);
    }
    return status;
}

static int flush_kernel(cuda_kernels *k, const batch *b, kernel_copy *p, const launch_posts *posts)
{
    bool bulk = p == &k->bulk;
    uint64_t tiles_at_once = bulk ? KERNEL_COPY_WARPS : KERNEL_PLAIN_WARPS, ctas;
    uint32_t id = bulk ? KERNEL_COPY_BULK : b->cast != KERNEL_COUNT ? b->cast : KERNEL_COPY_PLAIN;
    int status = TIDE_OK;

    set_posts(&p->posts, posts, posts ? posts->words : NULL, posts ? posts->n : 0);
    ctas = tide_min_u64(b->ctas, tide_ceil_div(p->n_tiles, tiles_at_once));
    if (p->n_tiles)
        status = launch(k, id, ctas, bulk ? KERNEL_COPY_WARPS : KERNEL_PLAIN_WARPS,
                        bulk ? KERNEL_COPY_WARPS * KERNEL_COPY_SLOTS * (KERNEL_COPY_SLOT + KERNEL_BARRIER_BYTES) : 0,
                        b->stream, p);
    p->n_runs = p->n_tiles = 0;
    return status;
}

/* width, rows and pitches as in bytes_run; of a cast, width counts items. */
static int kernel_run_add(cuda_kernels *k, const batch *b, const bytes_run *r)
{
    uint64_t row_tiles, tiles;
    uint32_t unit = unit_of(r);
    kernel_copy *p = &k->kernel;

    if (b->all == KERNEL_COPY_BULK || (b->all == KERNEL_COUNT && b->cast == KERNEL_COUNT && unit == 16 && r->src &&
                                       r->width >= KERNEL_BULK_ROW))
        p = &k->bulk;
    row_tiles = tide_ceil_div(r->width, p->tile_items);
    if (!tide_mul(row_tiles, r->rows, &tiles) || tiles > INT32_MAX || r->rows > UINT32_MAX)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "copy: %llu rows of %llu, expected fewer than 2^31 tiles of %llu",
                         (unsigned long long)r->rows, (unsigned long long)r->width, (unsigned long long)p->tile_items);
    if (p->n_runs == KERNEL_RUNS || p->n_tiles + tiles > INT32_MAX) {
        int status = flush_kernel(k, b, p, NULL);
        if (status != TIDE_OK)
            return status;
    }
    p->tiles[p->n_runs] = p->n_tiles;
    p->runs[p->n_runs++] = (kernel_run){r->src, r->dst, r->width, r->src_pitch, r->dst_pitch, (uint32_t)r->rows,
                                        (uint32_t)row_tiles, unit, 0};
    p->n_tiles += (uint32_t)tiles;
    return TIDE_OK;
}

static uint32_t cast_kernel(int from, int to)
{
    static const uint32_t table[3][3] = {
        [TIDE_F32] = {KERNEL_COUNT, KERNEL_CAST_F32_BF16, KERNEL_CAST_F32_F16},
        [TIDE_BF16] = {KERNEL_CAST_BF16_F32, KERNEL_COUNT, KERNEL_CAST_BF16_F16},
        [TIDE_F16] = {KERNEL_CAST_F16_F32, KERNEL_CAST_F16_BF16, KERNEL_COUNT},
    };
    return from < 3 && to < 3 ? table[from][to] : KERNEL_COUNT;
}

static int cast_runs(cuda_kernels *k, const batch *b)
{
    int status = TIDE_OK;
    for (uint32_t i = 0; status == TIDE_OK && i < b->copy->n_runs; i++) {
        const fab_run *run = &b->copy->runs[i];
        bytes_run r = {run->src.zero ? 0 : resolve(&run->src, b->args), resolve(&run->dst, b->args), run->width,
                       run->rows, run->src_pitch, run->dst_pitch};
        if (r.width && r.rows)
            status = kernel_run_add(k, b, &r);
    }
    return status;
}

static bool goes_by_kernel(const batch *b, const bytes_run *r, uint32_t fills)
{
    if (b->kernel)
        return true;
    if (!r->src)
        return !b->local || fills > ENGINE_FILLS || !engine_rows(r);
    return b->local ? r->width < LOCAL_ROW : !engine_rows(r);
}

static int byte_runs(cuda_kernels *k, batch *b)
{
    uint32_t fills = 0;
    int status = TIDE_OK;

    for (uint32_t i = 0; i < b->copy->n_runs; i++)
        fills += b->copy->runs[i].src.zero ? 1 : 0;
    for (uint32_t i = 0; status == TIDE_OK && i < b->copy->n_runs;) {
        bytes_run r;
        i += merge(b, i, &r);
        if (r.width == 0 || r.rows == 0)
            continue;
        if (goes_by_kernel(b, &r, fills))
            status = kernel_run_add(k, b, &r);
        else if (r.src && b->local)
            status = each_row_by_engine(k, b, &r);
        else
            status = engine_run(k, b, &r);
    }
    return status;
}

/* Only plain copies of a row are known to go to a multicast address; other libraries' all-gathers do that. */
static int multicast_runs(cuda_kernels *k, batch *b)
{
    int status = TIDE_OK;

    for (uint32_t i = 0; status == TIDE_OK && i < b->copy->n_runs; i++) {
        bytes_run all = flatten(b, &b->copy->runs[i]);
        if (b->cast != KERNEL_COUNT || !all.src)
            return tide_fail(TIDE_ERR_UNSUPPORTED, "copy: a %s to all ranks of a node, expected a plain copy",
                             all.src ? "cast" : "fill");
        status = each_row_by_engine(k, b, &all);
    }
    return status;
}

int cuda_launch_copy(cuda_kernels *k, cu_stream stream, const fab_copy *copy, const void *const *args,
                     int device_local, uint32_t ctas, const launch_posts *posts, bool *posted)
{
    batch b = {.stream = stream, .copy = copy, .args = args, .ctas = ctas ? ctas : 1, .all = KERNEL_COUNT};
    bool post;
    int status;

    b.local = device_local && !copy->multicast;
    b.cast = cast_kernel(copy->src_dtype, copy->dst_dtype);
    b.kernel = b.cast == KERNEL_COUNT && !copy->multicast && kernel_is_better(&b);
    k->n_batch = k->kernel.n_runs = k->kernel.n_tiles = k->bulk.n_runs = k->bulk.n_tiles = 0;
    k->kernel.src_item = b.cast == KERNEL_COUNT ? 1 : item_bytes(copy->src_dtype);
    k->kernel.dst_item = b.cast == KERNEL_COUNT ? 1 : item_bytes(copy->dst_dtype);
    k->kernel.tile_items = b.cast == KERNEL_COUNT ? KERNEL_COPY_TILE : KERNEL_PLAIN_TILE;
    k->bulk.src_item = k->bulk.dst_item = 1;
    k->bulk.tile_items = KERNEL_COPY_SLOT;
    status = copy->multicast             ? multicast_runs(k, &b)
             : b.cast == KERNEL_COUNT ? byte_runs(k, &b)
                                      : cast_runs(k, &b);
    post = posts && posts->n <= KERNEL_MAX_POSTS && !b.engine && k->bulk.n_runs + k->kernel.n_runs > 0;
    if (posted)
        *posted = post;
    if (status == TIDE_OK)
        status = flush_engine(k, &b);
    if (status == TIDE_OK) /* the last launch posts: it begins when the others have ended */
        status = flush_kernel(k, &b, &k->bulk, post && k->kernel.n_runs == 0 ? posts : NULL);
    if (status == TIDE_OK)
        status = flush_kernel(k, &b, &k->kernel, post ? posts : NULL);
    return status;
}
