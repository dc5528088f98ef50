/*
 * Batches on the CUDA device without a GPU: a table of functions that runs every launch's naive twin and every copy at
 * once, over host memory. What comes out equals the host device's naive twins, bit for bit; what was enqueued is
 * counted.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "fabric/cuda/launch.h"
#include "fabric/host/host.h"

static uint64_t random_state = 88172645463325252u;
static uint32_t draw(uint32_t bound)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 20) % bound;
}

/* ---- the table ------------------------------------------------------------------------------- */

static struct {
    uint32_t launches, copies, batches, descriptors, copies_2d, fills, fills_2d;
    uint32_t switch_sums, reduce_launches, with_posts, last_ctas, last_threads, last_shared;
    const char *last_kernel;
    uint32_t copies_with_posts, last_posts; /* last_posts: of the latest launch */
    uint32_t fail_launch; /* this one from now fails; 0: none */
} seen;

struct cu_function { const char *name; };
static struct cu_function functions[KERNEL_COUNT];
static uint32_t n_functions;

static cu_result module_load(cu_module *module, const void *image)
{
    (void)image;
    *module = (cu_module)&functions;
    n_functions = 0;
    return CU_OK;
}
static cu_result module_unload(cu_module module)
{
    (void)module;
    return CU_OK;
}
static cu_result get_function(cu_function *function, cu_module module, const char *name)
{
    (void)module;
    functions[n_functions].name = name;
    *function = &functions[n_functions++];
    return CU_OK;
}
static cu_result set_attribute(cu_function function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return CU_OK;
}
static cu_result launch_kernel(cu_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, cu_stream stream, void **parameters, void **extra)
{
    size_t bytes;
    kernel_twin twin = cuda_kernel_twin(function->name, &bytes);
    (void)stream;
    if (seen.fail_launch && --seen.fail_launch == 0)
        return CU_INVALID_VALUE;
    if (strcmp(function->name, "tide_multimem_reduce") == 0) { /* its source is plain memory here: a team of one */
        const kernel_multimem *p = parameters[0];
        assert_true(gx > 0 && bx == 32 * KERNEL_PLAIN_WARPS && shared == 0 && p->src % 16 == 0 && p->dst % 4 == 0);
        cuda_multimem_reduce_twin(p, &p->src, 1);
        seen.switch_sums++;
        return CU_OK;
    }
    assert_non_null(twin);
    assert_true(gx > 0 && gy == 1 && gz == 1 && bx % 32 == 0 && bx <= 1024 && by == 1 && bz == 1 && !extra);
    assert_true(shared <= (227u << 10) - 1024);
    if (strncmp(function->name, "tide_reduce", 11) == 0) {
        const kernel_reduce *p = parameters[0];
        uint32_t tiles = 0;
        for (uint32_t i = 0; i < p->n_segments; i++) {
            const kernel_segment *s = &p->segments[i];
            assert_int_equal(p->tiles[i], tiles);
            assert_int_equal(s->row_tiles, tide_ceil_div(s->elems, p->tile_elems));
            assert_true(s->first_source + s->n_sources <= KERNEL_SOURCES);
            tiles += s->row_tiles * s->rows;
        }
        assert_int_equal(p->n_tiles, tiles);
        seen.reduce_launches++;
        seen.with_posts += p->posts.n ? 1 : 0;
        if (strstr(function->name, "thin") || strstr(function->name, "fat"))
            assert_true(p->slots >= 2 && shared >= bx / 32 * p->slots * (1024 + KERNEL_SLOT_EXTRA));
    } else {
        const kernel_copy *p = parameters[0];
        uint32_t tiles = 0;
        for (uint32_t i = 0; i < p->n_runs; i++) {
            const kernel_run *r = &p->runs[i];
            assert_int_equal(p->tiles[i], tiles);
            tiles += r->row_tiles * r->rows;
            if (strcmp(function->name, "tide_copy_bulk") == 0)
                assert_true(r->src && r->src % 16 == 0 && r->dst % 16 == 0 && r->width % 16 == 0);
            if (p->src_item == 1)
                assert_int_equal(r->dst % r->unit | r->src % r->unit | r->width % r->unit, 0);
        }
        assert_int_equal(p->n_tiles, tiles);
        assert_int_equal(seen.last_posts, 0); /* the last launch of a batch posts */
        seen.last_posts = p->posts.n;
        seen.copies_with_posts += p->posts.n ? 1 : 0;
    }
    seen.launches++;
    seen.last_kernel = function->name;
    seen.last_ctas = gx;
    seen.last_threads = bx;
    seen.last_shared = shared;
    twin(parameters[0]);
    return CU_OK;
}
static void *host(cu_ptr p)
{
    return (void *)(uintptr_t)p;
}
static cu_result memcpy_async(cu_ptr dst, cu_ptr src, size_t bytes, cu_stream stream)
{
    (void)stream;
    assert_true(bytes > 0);
    memcpy(host(dst), host(src), bytes);
    seen.copies++;
    return CU_OK;
}
static cu_result memcpy_batch(cu_ptr *dsts, cu_ptr *srcs, size_t *bytes, size_t count, cu_copy_attributes *attributes,
                              size_t *first, size_t n_attributes, cu_stream stream)
{
    (void)stream;
    assert_true(n_attributes == 1 && *first == 0 && attributes->src_access_order == CU_ORDER_STREAM && count > 1);
    for (size_t i = 0; i < count; i++)
        memcpy(host(dsts[i]), host(srcs[i]), bytes[i]);
    seen.batches++;
    seen.descriptors += (uint32_t)count;
    return CU_OK;
}
static cu_result memcpy_2d(const cu_copy2d *c, cu_stream stream)
{
    (void)stream;
    assert_true(c->src_type == CU_MEMORY_DEVICE && c->dst_type == CU_MEMORY_DEVICE);
    assert_true(c->width <= c->src_pitch && c->width <= c->dst_pitch);
    for (size_t i = 0; i < c->height; i++)
        memcpy(host(c->dst_device + i * c->dst_pitch), host(c->src_device + i * c->src_pitch), c->width);
    seen.copies_2d++;
    return CU_OK;
}
static cu_result memset_d8(cu_ptr dst, unsigned char value, size_t bytes, cu_stream stream)
{
    (void)stream;
    memset(host(dst), value, bytes);
    seen.fills++;
    return CU_OK;
}
static cu_result memset_2d(cu_ptr dst, size_t pitch, unsigned char value, size_t width, size_t height, cu_stream stream)
{
    (void)stream;
    assert_true(width <= pitch);
    for (size_t i = 0; i < height; i++)
        memset(host(dst + i * pitch), value, width);
    seen.fills_2d++;
    return CU_OK;
}
static cu_result error_text(cu_result error, const char **text)
{
    (void)error;
    *text = "CUDA_ERROR_INVALID_VALUE";
    return CU_OK;
}
static const cuda_driver table = {
    .GetErrorName = error_text,
    .GetErrorString = error_text,
    .ModuleLoadData = module_load,
    .ModuleUnload = module_unload,
    .ModuleGetFunction = get_function,
    .FuncSetAttribute = set_attribute,
    .LaunchKernel = launch_kernel,
    .MemcpyAsync = memcpy_async,
    .MemcpyBatchAsync = memcpy_batch,
    .Memcpy2DAsync = memcpy_2d,
    .MemsetD8Async = memset_d8,
    .MemsetD2D8Async = memset_2d,
};

static cuda_kernels *open_kernels(void)
{
    cuda_kernels *k;
    assert_int_equal(cuda_kernels_load(&table, NULL, &k), TIDE_OK);
    memset(&seen, 0, sizeof seen);
    return k;
}

static void fill(unsigned char *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        p[i] = (unsigned char)draw(256);
}

static fab_ptr at(const void *p)
{
    return (fab_ptr){(uintptr_t)p, -1, 0};
}

/* ---- sums ------------------------------------------------------------------------------------ */

enum { ROOM = 1 << 16, SOURCES = 10 };

/* Bit for bit, except that a NaN is a NaN. */
static void assert_same_floats(const unsigned char *a, const unsigned char *b, size_t bytes, size_t first)
{
    for (size_t i = 0; i < bytes; i++) {
        float x, y;
        size_t start = i < first ? i : first + (i - first) / 4 * 4;
        if (a[i] == b[i])
            continue;
        if (start + 4 <= bytes) {
            memcpy(&x, a + start, 4);
            memcpy(&y, b + start, 4);
            if (isnan(x) && isnan(y))
                continue;
        }
        fail_msg("byte %zu: %02x, expected %02x", i, a[i], b[i]);
    }
}

static void test_sums_equal_the_host(void **state)
{
    cuda_kernels *k = open_kernels();
    unsigned char *pool[SOURCES], *out = malloc(ROOM), *naive = malloc(ROOM);
    (void)state;
    for (int i = 0; i < SOURCES; i++)
        fill(pool[i] = malloc(ROOM), ROOM);
    for (int round = 0; round < 400; round++) {
        uint32_t dtype = draw(3), n_segments = 1 + draw(4), off = draw(2) ? 0 : 4 * draw(4), used = off, done = 0;
        uint32_t n_posts = draw(4), ctas = (uint32_t[]){0, 1, 4, 5, 16, 132}[draw(6)];
        uint64_t words[3] = {0, 0, 0};
        cu_ptr posts[3] = {(uintptr_t)&words[0], (uintptr_t)&words[1], (uintptr_t)&words[2]};
        fab_segment segments[4], naive_segments[4];
        fab_source sources[4 * SOURCES];
        fab_call call = {.alpha = (float)draw(7) / 3.0f - 1.0f, .accumulate = (int)draw(2)};
        fab_reduce reduce = {segments, sources, n_segments, (int)draw(4), 0}, twin = {naive_segments, sources, n_segments, 0, 0};
        uint32_t n_sources = 0;
        twin.beta = reduce.beta;
        for (uint32_t i = 0; i < n_segments; i++) {
            fab_segment *s = &segments[i];
            uint32_t elems = draw(2) ? draw(50) : 8 * draw(120), pitch = elems * 4 + draw(2) * 16, sum = draw(SOURCES);
            *s = (fab_segment){.dst = at(out + used), .dst_pitch = pitch, .elems = elems, .rows = draw(4),
                               .first_source = n_sources, .n_sources = sum};
            naive_segments[i] = *s;
            naive_segments[i].dst = at(naive + used);
            used += s->rows * pitch;
            for (uint32_t j = 0; j < sum; j++) {
                uint32_t start = draw(2) ? 16 * draw(4) : (dtype ? 2 : 4) * draw(8);
                sources[n_sources++] = (fab_source){at(pool[j] + start), (elems + draw(2) * 8) * (dtype ? 2 : 4), dtype, 0};
            }
        }
        assert_true(used < ROOM);
        fill(out, ROOM);
        memcpy(naive, out, ROOM);
        memset(&seen, 0, sizeof seen);
        assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, call.accumulate, call.alpha, ctas,
                                            &(launch_posts){(uintptr_t)&done, posts, n_posts, 7}), TIDE_OK);
        host_naive_reduce(&twin, &call);
        assert_same_floats(out, naive, ROOM, off % 4);
        assert_int_equal(seen.with_posts, n_posts ? 1 : 0);
        assert_true(seen.launches == 0 || seen.last_ctas <= (ctas ? ctas : 1));
        for (uint32_t i = 0; i < 3; i++)
            assert_int_equal(words[i], i < n_posts ? 7 : 0);
    }
    for (int i = 0; i < SOURCES; i++)
        free(pool[i]);
    free(naive);
    free(out);
    cuda_kernels_unload(k, false);
}

/* More segments, more sources and more posts than a struct holds: several launches, the posts with the last. */
static void test_sums_are_split(void **state)
{
    enum { N = 3 * KERNEL_SEGMENTS + 5, EACH = 8, POSTS = 2 * KERNEL_MAX_POSTS + 3 };
    cuda_kernels *k = open_kernels();
    static uint16_t in[EACH][16];
    static float out[N][16], naive[N][16];
    static fab_segment segments[N], twins[N];
    static fab_source sources[N * EACH];
    static uint64_t words[POSTS];
    static cu_ptr posts[POSTS];
    fab_reduce reduce = {segments, sources, N, FAB_BETA_CALL, 0}, twin = {twins, sources, N, FAB_BETA_CALL, 0};
    fab_call call = {.alpha = 0.3f, .accumulate = 1};
    uint32_t done = 0;
    (void)state;
    for (uint32_t e = 0; e < EACH; e++)
        for (uint32_t i = 0; i < 16; i++)
            in[e][i] = tide_f32_to_bf16((float)draw(1000) / 7);
    for (uint32_t i = 0; i < N; i++) {
        for (uint32_t j = 0; j < 16; j++)
            out[i][j] = naive[i][j] = (float)draw(100);
        segments[i] = (fab_segment){at(out[i]), 64, 16, 1, EACH * i, EACH};
        twins[i] = (fab_segment){at(naive[i]), 64, 16, 1, EACH * i, EACH};
        for (uint32_t e = 0; e < EACH; e++)
            sources[EACH * i + e] = (fab_source){at(in[(e + i) % EACH]), 32, TIDE_BF16, 0};
    }
    for (uint32_t i = 0; i < POSTS; i++)
        posts[i] = (uintptr_t)&words[i];
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 1, 0.3f, 8, &(launch_posts){(uintptr_t)&done, posts, POSTS, 99}), TIDE_OK);
    host_naive_reduce(&twin, &call);
    assert_memory_equal(out, naive, sizeof out);
    for (uint32_t i = 0; i < POSTS; i++)
        assert_int_equal(words[i], 99);
    /* 64 segments have 512 sources */
    assert_int_equal(seen.reduce_launches, (N + 63) / 64 + 2);
    assert_int_equal(seen.with_posts, 3);

    /* A launch that fails ends the op, and no word is posted. */
    memset(words, 0, sizeof words);
    seen.fail_launch = 2;
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 1, 0.3f, 8, &(launch_posts){(uintptr_t)&done, posts, POSTS, 99}),
                     TIDE_ERR_SYSTEM);
    assert_non_null(strstr(tide_last_error(), "launching a kernel"));
    assert_int_equal(words[0], 0);

    /* Nothing to add, but somebody to tell. */
    reduce.n_segments = 0;
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 1, 0.3f, 8, &(launch_posts){(uintptr_t)&done, posts, 1, 5}), TIDE_OK);
    assert_int_equal(words[0], 5);
    cuda_kernels_unload(k, false);
}

static void test_shapes(void **state)
{
    cuda_kernels *k = open_kernels();
    static _Alignas(16) uint16_t in[1 << 16];
    static _Alignas(16) float out[1 << 16];
    fab_source source = {at(in), 0, TIDE_BF16, 0};
    fab_segment segment = {at(out), 0, 1 << 16, 1, 0, 1};
    fab_reduce reduce = {&segment, &source, 1, FAB_NOT_FINAL, 0};
    (void)state;
    static const struct { uint32_t ctas; const char *kernel; } cases[] = {
        {1, "tide_reduce_fat_bf16"}, {4, "tide_reduce_fat_bf16"}, {5, "tide_reduce_thin_bf16"},
        {32, "tide_reduce_thin_bf16"}, {132, "tide_reduce_thin_bf16"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 0, 1, cases[i].ctas, NULL), TIDE_OK);
        assert_string_equal(seen.last_kernel, cases[i].kernel);
        assert_true(cases[i].ctas < 5 || cases[i].ctas >= 100 || seen.last_shared <= 24 << 10);
    }
    /* Any alignment of items, but not of bytes. */
    source.at = at(in + 1);
    segment.elems--;
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 0, 1, 4, NULL), TIDE_OK);
    assert_string_equal(seen.last_kernel, "tide_reduce_fat_bf16");
    source.at = at((char *)in + 1);
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 0, 1, 4, NULL), TIDE_ERR_UNSUPPORTED);
    assert_non_null(strstr(tide_last_error(), "multiples of their items"));
    /* Short rows: the plain kernel. */
    source.at = at(in);
    segment.elems = 40;
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 0, 1, 4, NULL), TIDE_OK);
    assert_string_equal(seen.last_kernel, "tide_reduce_plain_bf16");
    segment.elems = 1 << 16;
    /* More sources than a warp has lanes, too. */
    fab_source many[40];
    for (uint32_t i = 0; i < 40; i++)
        many[i] = source;
    reduce.sources = many;
    segment.n_sources = 40;
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 0, 1, 4, NULL), TIDE_OK);
    assert_string_equal(seen.last_kernel, "tide_reduce_plain_bf16");
    reduce.sources = &source;
    segment.n_sources = 1;
    /* beta 1 is fused: the kernels that fetch the results so far */
    source.at = at(in);
    reduce.beta = FAB_BETA_ONE;
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 0, 1, 8, NULL), TIDE_OK);
    assert_string_equal(seen.last_kernel, "tide_reduce_thin_add_bf16");

    fab_source mixed[2] = {{at(in), 0, TIDE_BF16, 0}, {at(out), 0, TIDE_F32, 0}};
    reduce.sources = mixed;
    segment.n_sources = 2;
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 0, 1, 8, NULL), TIDE_ERR_UNSUPPORTED);
    assert_non_null(strstr(tide_last_error(), "one dtype"));
    cuda_kernels_unload(k, false);
}

/* ---- copies ---------------------------------------------------------------------------------- */

static void test_copies_equal_the_host(void **state)
{
    enum { RUNS = 40 };
    cuda_kernels *k = open_kernels();
    unsigned char *src = malloc(4 * ROOM), *out = malloc(4 * ROOM), *naive = malloc(4 * ROOM);
    const int dtypes[] = {TIDE_F32, TIDE_BF16, TIDE_F16, TIDE_OPAQUE};
    const launch_cost to_peer = launch_peer_cost;
    uint32_t by_kernel = 0, by_engine = 0;
    (void)state;
    fill(src, 4 * ROOM);
    for (int round = 0; round < 400; round++) {
        int from = dtypes[draw(4)], to = draw(2) || from == TIDE_OPAQUE ? from : dtypes[draw(3)];
        uint32_t a = from == TIDE_OPAQUE ? 1 : tide_dtype_bytes(from), b = to == TIDE_OPAQUE ? 1 : tide_dtype_bytes(to);
        uint32_t n = 1 + draw(RUNS), used = 0, equal = draw(2) ? 16 * draw(50) : 0;
        uint32_t n_posts = draw(4), done = 0, pieces;
        uint64_t words[3] = {0, 0, 0};
        const cu_ptr posts[3] = {(uintptr_t)&words[0], (uintptr_t)&words[1], (uintptr_t)&words[2]};
        bool posted;
        fab_run runs[RUNS], twins[RUNS];
        const void *args[1] = {src + a * draw(16)};
        fab_copy copy = {.runs = runs, .n_runs = n, .src_dtype = (uint8_t)from, .dst_dtype = (uint8_t)to}, twin = copy;
        fab_call call = {.args = args};
        twin.runs = twins;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t width = equal ? equal : draw(300), rows = equal ? 1 : draw(4), gap = equal ? 16 : draw(9);
            runs[i] = (fab_run){.src = {(uintptr_t)(equal ? (uint64_t)i * (width + 32) * a : a * draw(4000)), 0, draw(20) == 0},
                                .dst = at(out + used), .width = width, .rows = rows,
                                .src_pitch = width * a + a * draw(5), .dst_pitch = width * b + gap};
            if (draw(3) == 0)
                runs[i].src_pitch = width * a, runs[i].dst_pitch = width * b;
            twins[i] = runs[i];
            twins[i].dst = at(naive + used);
            used += (uint32_t)(rows * runs[i].dst_pitch);
        }
        assert_true(used < 4 * ROOM);
        fill(out, 4 * ROOM);
        memcpy(naive, out, 4 * ROOM);
        memset(&seen, 0, sizeof seen);
        launch_peer_cost.kernel_weight = draw(2) ? 1e9 : 1; /* batches are small */
        assert_int_equal(cuda_launch_copy(k, NULL, &copy, args, (int)draw(2), draw(17),
                                          &(launch_posts){(uintptr_t)&done, posts, n_posts, 7}, &posted), TIDE_OK);
        host_naive_copy(&twin, &call);
        assert_memory_equal(out, naive, 4 * ROOM);
        pieces = seen.copies + seen.batches + seen.copies_2d + seen.fills + seen.fills_2d;
        assert_int_equal(posted, seen.launches > 0 && pieces == 0);
        assert_int_equal(seen.copies_with_posts, posted && n_posts);
        for (uint32_t i = 0; i < 3; i++)
            assert_int_equal(words[i], posted && i < n_posts ? 7 : 0);
        *(posted ? &by_kernel : &by_engine) += 1;
    }
    launch_peer_cost = to_peer;
    assert_true(by_kernel > 100 && by_engine > 20);
    free(naive);
    free(out);
    free(src);
    cuda_kernels_unload(k, false);
}

/* More runs than a struct holds: the posts with the last launch, and with none where one fails. */
static void test_copies_are_split(void **state)
{
    enum { N = 2 * KERNEL_RUNS + 10, WIDE = 512, TOO_MANY = KERNEL_MAX_POSTS + 1 };
    cuda_kernels *k = open_kernels();
    unsigned char *src = aligned_alloc(64, N * WIDE), *dst = aligned_alloc(64, N * WIDE);
    static fab_run runs[N];
    fab_copy copy = {.runs = runs, .n_runs = N, .src_dtype = TIDE_OPAQUE, .dst_dtype = TIDE_OPAQUE};
    uint64_t words[TOO_MANY] = {0};
    cu_ptr posts[TOO_MANY];
    uint32_t done = 0;
    launch_posts to = {(uintptr_t)&done, posts, KERNEL_MAX_POSTS, 3};
    bool posted;
    (void)state;

    fill(src, N * WIDE);
    for (uint32_t i = 0; i < TOO_MANY; i++)
        posts[i] = (uintptr_t)&words[i];
    for (uint32_t i = 0; i < N; i++)
        runs[i] = (fab_run){at(src + i * WIDE), at(dst + i * WIDE), WIDE - 1 - i % 2, 1, 0, 0}; /* unequal neighbours */
    for (int peer = 0; peer < 2; peer++) {
        memset(dst, 0, N * WIDE);
        memset(words, 0, sizeof words);
        memset(&seen, 0, sizeof seen);
        assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, !peer, 16, &to, &posted), TIDE_OK);
        assert_true(posted && seen.launches == 3 && seen.copies_with_posts == 1 && seen.last_posts == KERNEL_MAX_POSTS);
        for (uint32_t i = 0; i < N; i++)
            assert_memory_equal(dst + i * WIDE, src + i * WIDE, runs[i].width);
        for (uint32_t i = 0; i < TOO_MANY; i++)
            assert_int_equal(words[i], i < KERNEL_MAX_POSTS ? 3 : 0);
    }
    memset(words, 0, sizeof words);
    for (uint32_t i = 1; i <= 3; i++) {
        memset(&seen, 0, sizeof seen);
        seen.fail_launch = i;
        assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, &to, &posted), TIDE_ERR_SYSTEM);
        assert_int_equal(words[0], 0);
    }
    memset(&seen, 0, sizeof seen);
    to.n = TOO_MANY; /* stay with the caller */
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, &to, &posted), TIDE_OK);
    assert_true(!posted && seen.copies_with_posts == 0 && words[0] == 0);
    to.n = 1;
    copy.n_runs = 0; /* and so they do where there is nothing to copy */
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, &to, &posted), TIDE_OK);
    assert_true(!posted && words[0] == 0);
    free(dst);
    free(src);
    cuda_kernels_unload(k, false);
}

/* Kernel or copy engine, by descriptors, bytes, the unit that is moved at once, and CTAs. */
static void test_costs(void **state)
{
    enum { KIB = 1 << 10, MIB = 1 << 20 };
    static const struct { uint32_t descriptors; uint64_t bytes; uint32_t unit, ctas; bool mixed, kernel; } cases[] = {
        /* little in many pieces is a kernel's */
        {30, 1 * MIB, 16, 16, false, true}, {30, 4 * MIB, 16, 16, false, true}, {30, 8 * MIB, 16, 16, false, false},
        {30, 16 * MIB, 16, 16, false, false}, {30, 512u * MIB, 16, 16, false, false},
        {16, 3 * MIB, 16, 16, false, true}, {16, 4 * MIB, 16, 16, false, false}, {16, 16 * MIB, 16, 16, false, false}, {10, 3 * MIB, 16, 16, false, true},
        {10, 8 * MIB, 16, 16, false, false},
        /* one piece: only a small one */
        {1, 64 * KIB, 16, 16, false, true}, {1, 512 * KIB, 16, 16, false, true}, {1, 2 * MIB, 16, 16, false, true}, {1, 4 * MIB, 16, 16, false, false},
        {1, 32 * MIB, 16, 132, false, false},
        /* few CTAs and small units are slow */
        {16, 4 * MIB, 16, 1, false, false}, {16, 128 * KIB, 16, 1, false, true}, {30, 4 * MIB, 2, 16, false, false},
        {30, 256 * KIB, 2, 16, false, true},
        /* who has to launch a kernel anyway */
        {3, 4 * MIB, 16, 16, false, false}, {3, 4 * MIB, 16, 16, true, true}, {3, 8 * MIB, 16, 16, true, false},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (launch_by_kernel(&launch_peer_cost, cases[i].descriptors, cases[i].bytes, cases[i].mixed, cases[i].unit,
                             cases[i].ctas) != cases[i].kernel)
            fail_msg("case %zu: %s, expected the other", i, cases[i].kernel ? "copy engine" : "kernel");
}

/* Of a small batch one kernel takes all, with rows that alone would be the other's; of a large one each what suits it. */
static void test_one_kernel_or_two(void **state)
{
    enum { LARGE = 6 << 20, RUNS = 4 };
    static const struct { uint64_t wide, narrow, unit; bool fill; uint32_t launches; const char *last; } cases[] = {
        {8192, 208, 16, false, 1, "tide_copy_bulk"},  {8192, 208, 8, false, 1, "tide_copy_plain"},
        {208, 16, 16, false, 1, "tide_copy_plain"},   {8192, 208, 16, true, 1, "tide_copy_plain"},
        {LARGE, 208, 16, false, 2, "tide_copy_plain"},
    };
    cuda_kernels *k = open_kernels();
    unsigned char *src = aligned_alloc(64, RUNS * (LARGE + 64)), *dst = aligned_alloc(64, RUNS * (LARGE + 64));
    const launch_cost to_peer = launch_peer_cost;
    fab_run runs[RUNS];
    fab_copy copy = {.runs = runs, .n_runs = RUNS, .src_dtype = TIDE_OPAQUE, .dst_dtype = TIDE_OPAQUE};
    uint64_t word;
    uint32_t done = 0;
    const cu_ptr post = (uintptr_t)&word;
    bool posted;
    (void)state;
    fill(src, RUNS * (LARGE + 64));
    launch_peer_cost.engine_start = 1e9;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        word = 0;
        for (uint32_t r = 0; r < RUNS; r++) /* at unequal distances */
            runs[r] = (fab_run){at(src + r * LARGE + 16 * r * r), at(dst + r * LARGE + cases[i].unit * (r != 1)),
                                r % 2 ? cases[i].wide : cases[i].narrow, 1, 0, 0};
        runs[2].src.zero = cases[i].fill;
        memset(dst, 1, RUNS * (LARGE + 64));
        memset(&seen, 0, sizeof seen);
        assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, &(launch_posts){(uintptr_t)&done, &post, 1, 5}, &posted),
                         TIDE_OK);
        assert_int_equal(seen.launches, cases[i].launches);
        assert_string_equal(seen.last_kernel, cases[i].last);
        assert_true(posted && word == 5 && seen.copies_with_posts == 1);
        for (uint32_t r = 0; r < RUNS; r++) {
            const unsigned char *to = (const unsigned char *)runs[r].dst.base;
            if (runs[r].src.zero)
                assert_true(to[0] == 0 && to[runs[r].width - 1] == 0 && to[runs[r].width] == 1);
            else
                assert_memory_equal(to, (const unsigned char *)runs[r].src.base, runs[r].width);
        }
    }
    launch_peer_cost = to_peer;
    free(dst);
    free(src);
    cuda_kernels_unload(k, false);
}

/* The same through a launch: as many unequal runs to a peer. */
static void test_pieces_to_a_peer(void **state)
{
    enum { PIECES = 30, ROOM_OF_ONE = 1 << 20 };
    static const struct { uint64_t bytes; uint32_t launches, descriptors; } cases[] = {
        {32 << 10, 1, 0}, {128 << 10, 1, 0}, {768 << 10, 0, PIECES},
    };
    cuda_kernels *k = open_kernels();
    unsigned char *src = aligned_alloc(64, PIECES * ROOM_OF_ONE), *dst = aligned_alloc(64, PIECES * ROOM_OF_ONE);
    fab_run runs[PIECES];
    fab_copy copy = {.runs = runs, .n_runs = PIECES, .src_dtype = TIDE_BF16, .dst_dtype = TIDE_BF16};
    (void)state;
    fill(src, PIECES * ROOM_OF_ONE);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (uint32_t r = 0; r < PIECES; r++)
            runs[r] = (fab_run){at(src + r * ROOM_OF_ONE), at(dst + r * ROOM_OF_ONE), cases[i].bytes / 2 + 8 * r, 1, 0, 0};
        memset(&seen, 0, sizeof seen);
        assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, NULL, NULL), TIDE_OK);
        assert_int_equal(seen.launches, cases[i].launches);
        assert_int_equal(seen.descriptors, cases[i].descriptors);
        for (uint32_t r = 0; r < PIECES; r++)
            assert_memory_equal(dst + r * ROOM_OF_ONE, src + r * ROOM_OF_ONE, 2 * runs[r].width);
        if (cases[i].launches) {
            assert_string_equal(seen.last_kernel, "tide_copy_bulk");
            assert_true(seen.last_ctas == 16);
        }
    }
    free(dst);
    free(src);
    cuda_kernels_unload(k, false);
}

/* What goes where, to a peer by copy engine as large batches go. One source memory and one destination, each large enough
 * for every case. */
static void test_choices(void **state)
{
    enum { WIDE = 64 << 10, MANY = 600 };
    const launch_cost to_peer = launch_peer_cost;
    cuda_kernels *k = open_kernels();
    unsigned char *src = calloc(MANY + 1, 2 * WIDE), *dst = calloc(MANY + 1, 2 * WIDE);
    static fab_run runs[MANY];
    fab_copy copy = {.runs = runs, .n_runs = MANY, .src_dtype = TIDE_BF16, .dst_dtype = TIDE_BF16};
    (void)state;

    launch_peer_cost.kernel_weight = 1e9;
    /* Unequal runs to a peer: batches of descriptors. */
    for (uint32_t i = 0; i < MANY; i++)
        runs[i] = (fab_run){at(src + 2 * WIDE * i), at(dst + 2 * WIDE * i), 100 + i, 1, 0, 0};
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, NULL, NULL), TIDE_OK);
    assert_int_equal(seen.descriptors, MANY);
    assert_int_equal(seen.batches, 3);
    assert_int_equal(seen.launches, 0);

    /* The same within the GPU: rows so narrow are a kernel's. */
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 1, 16, NULL, NULL), TIDE_OK);
    assert_int_equal(seen.batches + seen.copies, 0);
    assert_true(seen.launches >= 3);

    /* Equal neighbours: one 2-D copy; contiguous ones: one copy. */
    for (uint32_t i = 0; i < MANY; i++)
        runs[i] = (fab_run){at(src + WIDE * i), at(dst + 2 * WIDE * i), WIDE / 2, 1, 0, 0};
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, NULL, NULL), TIDE_OK);
    assert_true(seen.copies_2d == 1 && seen.batches + seen.copies + seen.launches == 0);
    for (uint32_t i = 0; i < MANY; i++)
        runs[i].dst = at(dst + WIDE * i);
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, NULL, NULL), TIDE_OK);
    assert_true(seen.copies == 1 && seen.batches + seen.copies_2d + seen.launches == 0);

    /* Not where they are different arguments, each an allocation of its own, whatever their distance. */
    static const void *args[MANY];
    for (uint32_t i = 0; i < MANY; i++) {
        args[i] = src + WIDE * i;
        runs[i].src = (fab_ptr){0, (int32_t)i, 0};
    }
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, args, 0, 16, NULL, NULL), TIDE_OK);
    assert_true(seen.descriptors == MANY && seen.copies_2d + seen.copies == 0);
    for (uint32_t i = 0; i < MANY; i++) {
        runs[i].src = at(src + WIDE * i);
        runs[i].dst = (fab_ptr){0, (int32_t)i, 0};
    }
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, args, 0, 16, NULL, NULL), TIDE_OK);
    assert_true(seen.descriptors == MANY && seen.copies_2d + seen.copies == 0);
    for (uint32_t i = 0; i < MANY; i++) /* but of one argument */
        runs[i].dst = (fab_ptr){2 * WIDE * i, 0, 0};
    args[0] = dst;
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, args, 0, 16, NULL, NULL), TIDE_OK);
    assert_int_equal(seen.copies_2d, 1);
    runs[0].dst = at(dst);

    /* Two neighbours are two descriptors; a wide row within the GPU is the driver's. */
    copy.n_runs = 2;
    runs[1].dst = at(dst + 2 * WIDE);
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, NULL, NULL), TIDE_OK);
    assert_true(seen.descriptors == 2 && seen.copies_2d == 0);
    copy.n_runs = 1;
    runs[0] = (fab_run){at(src), at(dst), (uint64_t)MANY * WIDE, 1, 0, 0};
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 1, 4, NULL, NULL), TIDE_OK);
    assert_true(seen.copies == 1 && seen.launches == 0);

    /* There several wide ones are so many copies, no 2-D one and no batch; beside them narrow ones are a kernel's. */
    copy.n_runs = 5;
    for (uint32_t i = 0; i < 4; i++)
        runs[i] = (fab_run){at(src + i * 48 * WIDE), at(dst + i * 64 * WIDE), 40 * WIDE / 2, 1, 0, 0};
    runs[4] = (fab_run){at(src + 300 * WIDE), at(dst + 300 * WIDE), WIDE, 3, 3 * WIDE, 2 * WIDE};
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 1, 16, NULL, NULL), TIDE_OK);
    assert_true(seen.copies == 4 && seen.batches + seen.copies_2d == 0 && seen.launches == 1);
    copy.n_runs = 1;

    /* Wide rows: 2-D. Narrow rows: a kernel. Casts: a kernel. */
    runs[0] = (fab_run){at(src), at(dst), WIDE / 2, MANY, 2 * WIDE, WIDE};
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 4, NULL, NULL), TIDE_OK);
    assert_true(seen.copies_2d == 1 && seen.launches == 0);
    runs[0].width = 512;
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 4, NULL, NULL), TIDE_OK);
    assert_true(seen.copies_2d == 0 && seen.launches == 1);
    assert_string_equal(seen.last_kernel, "tide_copy_bulk");
    runs[0].width = 33;
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 4, NULL, NULL), TIDE_OK);
    assert_string_equal(seen.last_kernel, "tide_copy_plain");
    copy.dst_dtype = TIDE_F32;
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 4, NULL, NULL), TIDE_OK);
    assert_string_equal(seen.last_kernel, "tide_cast_bf16_f32");

    /* Fills: memset in this GPU, a kernel when they are many or on a peer. */
    copy = (fab_copy){.runs = runs, .n_runs = 2, .src_dtype = TIDE_OPAQUE, .dst_dtype = TIDE_OPAQUE};
    runs[0] = (fab_run){{0, -1, 1}, at(dst), 256 * WIDE, 1, 0, 0};
    runs[1] = (fab_run){{0, -1, 1}, at(dst + 256 * WIDE), WIDE / 2, 256, 0, WIDE};
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 1, 0, NULL, NULL), TIDE_OK);
    assert_true(seen.fills == 1 && seen.fills_2d == 1 && seen.launches == 0);
    memset(&seen, 0, sizeof seen);
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 4, NULL, NULL), TIDE_OK);
    assert_true(seen.fills + seen.fills_2d == 0 && seen.launches == 1);
    launch_peer_cost = to_peer;
    free(dst);
    free(src);
    cuda_kernels_unload(k, false);
}

/* ---- to and from all ranks of a node --------------------------------------------------------- */

/* Each row is a plain copy of its own; what is none is refused before anything is enqueued of it. */
static void test_multicast_copies(void **state)
{
    cuda_kernels *k = open_kernels();
    static unsigned char src[4096], dst[4096], naive[4096];
    fab_run runs[2] = {{at(src), at(dst), 100, 5, 100, 200}, {at(src + 1000), at(dst + 2000), 64, 3, 64, 64}};
    fab_copy copy = {.runs = runs, .n_runs = 2, .src_dtype = TIDE_OPAQUE, .dst_dtype = TIDE_OPAQUE, .multicast = 1};
    (void)state;

    fill(src, sizeof src);
    for (int i = 0; i < 5; i++)
        memcpy(naive + 200 * i, src + 100 * i, 100);
    memcpy(naive + 2000, src + 1000, 3 * 64);
    for (int local = 0; local < 2; local++) { /* never by a kernel, and what is posted then is the caller's business */
        const cu_ptr word = 0;
        bool posted = true;
        memset(&seen, 0, sizeof seen);
        memset(dst, 0, sizeof dst);
        assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, local, 16, &(launch_posts){0, &word, 1, 7}, &posted), TIDE_OK);
        assert_memory_equal(dst, naive, sizeof dst);
        assert_true(!posted && seen.descriptors == 6 && seen.batches == 1); /* the second run's rows touch */
    }
    assert_int_equal(seen.copies_2d + seen.launches + seen.fills, 0);

    copy.src_dtype = TIDE_F32;
    copy.dst_dtype = TIDE_BF16;
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, NULL, NULL), TIDE_ERR_UNSUPPORTED);
    assert_string_equal(tide_last_error(), "copy: a cast to all ranks of a node, expected a plain copy");
    copy.src_dtype = copy.dst_dtype = TIDE_OPAQUE;
    runs[0].src = (fab_ptr){0, -1, 1};
    assert_int_equal(cuda_launch_copy(k, NULL, &copy, NULL, 0, 16, NULL, NULL), TIDE_ERR_UNSUPPORTED);
    assert_string_equal(tide_last_error(), "copy: a fill to all ranks of a node, expected a plain copy");
    assert_int_equal(seen.fills + seen.fills_2d + seen.launches, 0);
    cuda_kernels_unload(k, false);
}

static void test_switch_sums(void **state)
{
    enum { ROWS = 2, ELEMS = 37, PITCH = 48 };
    cuda_kernels *k = open_kernels();
    static float src[2 * ROWS * PITCH] __attribute__((aligned(16))), out[2 * ROWS * PITCH];
    fab_source sources[2] = {{.at = at(src), .row_pitch = 4 * PITCH, .dtype = TIDE_F32, .multimem = 4},
                             {.at = at(src + ROWS * PITCH), .row_pitch = 4 * PITCH, .dtype = TIDE_F32, .multimem = 4}};
    fab_segment segments[2] = {{at(out + 1), 4 * PITCH, ELEMS, ROWS, 0, 1}, {at(out + ROWS * PITCH), 4 * PITCH, ELEMS, 1, 1, 1}};
    fab_reduce reduce = {segments, sources, 2, FAB_BETA_CALL, 4};
    uint64_t word = 0;
    const cu_ptr post = (cu_ptr)(uintptr_t)&word;
    uint32_t done = 0;
    (void)state;

    for (int i = 0; i < 2 * ROWS * PITCH; i++) {
        src[i] = (float)i / 3;
        out[i] = 5;
    }
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 1, 0.5f, 4, &(launch_posts){(uintptr_t)&done, &post, 1, 7}), TIDE_OK);
    assert_true(seen.switch_sums == ROWS + 1 && seen.with_posts == 1 && word == 7);
    assert_true(out[0] == 5);
    for (int i = 1; i < ROWS * PITCH; i++) {
        int row = (i - 1) / PITCH, e = (i - 1) % PITCH;
        float scaled = 0.5f * src[row * PITCH + e];
        assert_true(out[i] == (e < ELEMS ? 5 + scaled : 5));
    }
    sources[1].multimem = 0; /* not beside others */
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 1, 0.5f, 4, NULL),
                     TIDE_ERR_UNSUPPORTED);
    sources[1].multimem = 4;
    sources[0].at = at(src + 1); /* a vector would lie across two */
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 1, 0.5f, 4, NULL),
                     TIDE_ERR_UNSUPPORTED);
    sources[0] = sources[1];
    sources[0].dtype = sources[1].dtype = TIDE_BF16; /* a switch would round its sum to bf16 */
    assert_int_equal(cuda_launch_reduce(k, NULL, &reduce, NULL, 1, 0.5f, 4, NULL),
                     TIDE_ERR_UNSUPPORTED);
    cuda_kernels_unload(k, false);
}

/* ---- loading --------------------------------------------------------------------------------- */

static cu_result no_module(cu_module *module, const void *image)
{
    (void)module, (void)image;
    return CU_INVALID_VALUE;
}

static void test_loading(void **state)
{
    cuda_driver refuses = table;
    cuda_kernels *k;
    size_t image_bytes, bytes;
    (void)state;
    refuses.ModuleLoadData = no_module;
    cuda_image(&image_bytes);
    assert_int_equal(cuda_kernels_load(&refuses, NULL, &k), image_bytes ? TIDE_ERR_SYSTEM : TIDE_ERR_UNSUPPORTED);
    assert_null(k);
    if (!image_bytes)
        assert_non_null(strstr(tide_last_error(), "built without nvcc"));
    cuda_kernels_unload(NULL, false);
    tide_alloc_fail_at(1);
    assert_int_equal(cuda_kernels_load(&table, NULL, &k), TIDE_ERR_MEMORY);
    tide_alloc_fail_at(0);
    assert_null(cuda_kernel_twin("tide_multimem_reduce", &bytes));
    assert_int_equal(bytes, sizeof(kernel_multimem));
    assert_null(cuda_kernel_twin("no such kernel", &bytes));
    assert_int_equal(bytes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_equal_the_host), cmocka_unit_test(test_sums_are_split),
        cmocka_unit_test(test_shapes),              cmocka_unit_test(test_copies_equal_the_host),
        cmocka_unit_test(test_copies_are_split),    cmocka_unit_test(test_costs),
        cmocka_unit_test(test_pieces_to_a_peer),    cmocka_unit_test(test_choices),
        cmocka_unit_test(test_one_kernel_or_two),
        cmocka_unit_test(test_multicast_copies),    cmocka_unit_test(test_switch_sums),
        cmocka_unit_test(test_loading),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
