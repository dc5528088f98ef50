/*
 * kernels.c - `tide kernels`: the CUDA kernels on a GPU against their naive twins, on random batches.
 *
 * A batch is made once over host memory and once over the GPU's copy of it. Both go through the library's own launches:
 * the GPU's on its driver, the host's on a table of functions that runs the twin of each launch and does each copy at
 * once. So kernels, copy-engine calls and how a batch is split are all compared.
 */
#include <inttypes.h>
#include <math.h>

#include "base/base.h"
#include "cli/kernels.h"

enum { GUARD = 256 }; /* bytes around a result that have to stay */

int kernels_check(const cli *c, const gpu *g, cu_result result, const char *what)
{
    if (result == CU_OK)
        return CLI_OK;
    cuda_check(g->driver, result, what);
    return cli_fail_library(c);
}

int kernels_alloc(const cli *c, const gpu *g, size_t bytes, cu_ptr *out)
{
    *out = 0;
    return kernels_check(c, g, g->driver->MemAlloc(out, bytes), "cuMemAlloc");
}

int kernels_alloc_host(const cli *c, const gpu *g, size_t bytes, void *out)
{
    void *p = NULL;
    int code = kernels_check(c, g, g->driver->MemHostAlloc(&p, bytes, 0), "cuMemHostAlloc");
    memcpy(out, &p, sizeof p);
    return code;
}

uint64_t kernels_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * UINT64_C(0x2545f4914f6cdd1d);
}

static uint32_t draw(uint64_t *state, uint32_t bound)
{
    return (uint32_t)((kernels_random(state) >> 32) * bound >> 32);
}

void kernels_fill(void *p, size_t bytes, int dtype, uint64_t *state)
{
    size_t item = dtype == TIDE_F32 ? 4 : dtype == TIDE_OPAQUE ? 1 : 2;
    for (size_t i = 0; i < bytes / item; i++) {
        uint64_t r = kernels_random(state);
        uint32_t bits = (uint32_t)r;
        if (dtype != TIDE_OPAQUE && r >> 58 != 0) { /* but for one in 64, near 1 */
            float f = (float)(int32_t)bits * 0x1p-30f;
            uint16_t h = dtype == TIDE_BF16 ? tide_f32_to_bf16(f) : tide_f32_to_f16(f);
            memcpy(&bits, &f, sizeof bits);
            bits = dtype == TIDE_F32 ? bits : h;
        }
        memcpy((char *)p + i * item, &bits, item);
    }
}

/* ---- the host's side: every launch is its twin, at once --------------------------------------- */

static cu_result twin_load(cu_module *module, const void *image)
{
    (void)image;
    *module = NULL;
    return CU_OK;
}
static cu_result twin_unload(cu_module module)
{
    (void)module;
    return CU_OK;
}
/* A function is its name. */
static cu_result twin_function(cu_function *function, cu_module module, const char *name)
{
    (void)module;
    memcpy(function, &name, sizeof name);
    return CU_OK;
}
static cu_result twin_attribute(cu_function function, int attribute, int value)
{
    (void)function, (void)attribute, (void)value;
    return CU_OK;
}
static cu_result twin_launch(cu_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                             unsigned bz, unsigned shared, cu_stream stream, void **parameters, void **extra)
{
    size_t bytes;
    kernel_twin twin = cuda_kernel_twin((const char *)function, &bytes);
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    if (!twin)
        return CU_NOT_FOUND;
    twin(parameters[0]);
    return CU_OK;
}
static void *at(cu_ptr p)
{
    return (void *)(uintptr_t)p;
}
static cu_result twin_copy(cu_ptr dst, cu_ptr src, size_t bytes, cu_stream stream)
{
    (void)stream;
    memcpy(at(dst), at(src), bytes);
    return CU_OK;
}
static cu_result twin_copy2d(const cu_copy2d *copy, cu_stream stream)
{
    (void)stream;
    for (size_t i = 0; i < copy->height; i++)
        memcpy(at(copy->dst_device + i * copy->dst_pitch), at(copy->src_device + i * copy->src_pitch), copy->width);
    return CU_OK;
}
static cu_result twin_fill(cu_ptr dst, unsigned char value, size_t bytes, cu_stream stream)
{
    (void)stream;
    memset(at(dst), value, bytes);
    return CU_OK;
}
static cu_result twin_fill2d(cu_ptr dst, size_t pitch, unsigned char value, size_t width, size_t height, cu_stream stream)
{
    (void)stream;
    for (size_t i = 0; i < height; i++)
        memset(at(dst + i * pitch), value, width);
    return CU_OK;
}
static cu_result twin_error(cu_result error, const char **text)
{
    (void)error;
    *text = "a kernel without a twin";
    return CU_OK;
}
static const cuda_driver twins = {
    .GetErrorName = twin_error,     .GetErrorString = twin_error,       .ModuleLoadData = twin_load,
    .ModuleUnload = twin_unload,    .ModuleGetFunction = twin_function, .FuncSetAttribute = twin_attribute,
    .LaunchKernel = twin_launch,    .MemcpyAsync = twin_copy,           .Memcpy2DAsync = twin_copy2d,
    .MemsetD8Async = twin_fill,     .MemsetD2D8Async = twin_fill2d,
};

/* ---- random batches --------------------------------------------------------------------------- */

enum { MAX_SEGMENTS = 200, MAX_RUNS = 400, MAX_SUM = 12, MAX_WORDS = 70 };

/* Two memories of one layout: sources, results, words. */
typedef struct side {
    cuda_kernels *kernels;
    cu_ptr src, dst, words, done; /* done: the counter of the launches */
} side;

typedef struct batches {
    const cli *c;
    gpu *g;
    side gpu, host;
    kernels_peer peer; /* has room for dst and the words behind it */
    uint64_t bytes; /* of src, and of dst */
    uint64_t state; /* random */
    unsigned char *result;
    uint64_t *words; /* as the GPU has left them */
    char what[240]; /* the batch, in words */
} batches;

static fab_ptr within(cu_ptr base, uint64_t offset)
{
    return (fab_ptr){(uintptr_t)base + (uintptr_t)offset, -1, 0};
}

static int upload(batches *b, const side *gpu, int src_dtype, int dst_dtype)
{
    const cuda_driver *d = b->g->driver;
    int code;
    kernels_fill(at(b->host.src), b->bytes, src_dtype, &b->state);
    kernels_fill(at(b->host.dst), b->bytes, dst_dtype, &b->state);
    code = kernels_check(b->c, b->g, d->MemcpyHtoDAsync(gpu->src, at(b->host.src), b->bytes, b->g->stream), "upload");
    if (code == CLI_OK)
        code = kernels_check(b->c, b->g, d->MemcpyHtoDAsync(gpu->dst, at(b->host.dst), b->bytes, b->g->stream), "upload");
    if (code == CLI_OK) /* the host's side is about to change */
        code = kernels_check(b->c, b->g, d->StreamSynchronize(b->g->stream), "upload");
    return code;
}

static int download(batches *b, const side *gpu)
{
    const cuda_driver *d = b->g->driver;
    int code = kernels_check(b->c, b->g, d->MemcpyDtoHAsync(b->result, gpu->dst, b->bytes, b->g->stream), "download");
    return code == CLI_OK ? kernels_check(b->c, b->g, d->StreamSynchronize(b->g->stream), b->what) : code;
}

/* All of dst has to be as on the host. floats: a NaN is any NaN. CLI_WRONG after a message. */
static int compare(batches *b, bool floats)
{
    const unsigned char *expected = at(b->host.dst);
    if (memcmp(b->result, expected, b->bytes) == 0)
        return CLI_OK;
    for (uint64_t i = 0; i < b->bytes; i += 4) {
        float got, want;
        uint32_t got_bits, want_bits;
        memcpy(&got_bits, b->result + i, 4);
        memcpy(&want_bits, expected + i, 4);
        memcpy(&got, b->result + i, 4);
        memcpy(&want, expected + i, 4);
        if (got_bits == want_bits || (floats && isnan(got) && isnan(want)))
            continue;
        printf("WRONG %s: bytes %" PRIu64 "..%" PRIu64 " of the results are %08" PRIx32 ", expected %08" PRIx32 "\n", b->what,
               i, i + 3, got_bits, want_bits);
        return CLI_WRONG;
    }
    return CLI_OK;
}

/* Words on both sides, zeroed, that a batch is to post to. */
typedef struct posting {
    cu_ptr words[MAX_WORDS];
    launch_posts posts;
} posting;
enum { WORD_BYTES = 8 * (1 + MAX_WORDS), POSTED = 41 };

static int prepare_words(batches *b, const side *gpu, uint32_t n, posting to[2])
{
    const side *sides[2] = {&b->host, gpu};
    memset(at(b->host.words), 0, WORD_BYTES);
    for (int side = 0; side < 2; side++) {
        for (uint32_t i = 0; i < n; i++)
            to[side].words[i] = sides[side]->words + 8 * (1 + i);
        to[side].posts = (launch_posts){sides[side]->done, to[side].words, n, POSTED};
    }
    return kernels_check(b->c, b->g, b->g->driver->MemsetD8Async(gpu->words, 0, WORD_BYTES, b->g->stream), "words");
}

/* Behind the batch and before what waits for it. */
static int fetch_words(batches *b, const side *gpu)
{
    return kernels_check(b->c, b->g, b->g->driver->MemcpyDtoHAsync(b->words, gpu->words, WORD_BYTES, b->g->stream),
                         "words");
}

static int compare_words(batches *b)
{
    const uint64_t *host_words = at(b->host.words);
    for (uint32_t i = 0; i <= MAX_WORDS; i++) {
        if (b->words[i] == host_words[i])
            continue;
        printf("WRONG %s: %s %u is %" PRIu64 ", expected %" PRIu64 "\n", b->what, i ? "word" : "the counter,", i, b->words[i],
               host_words[i]);
        return CLI_WRONG;
    }
    return CLI_OK;
}

/* Any shape that a ring kernel can have. */
static launch_shapes any_shapes(uint64_t *state)
{
    launch_shapes s = launch_default_shapes;
    launch_shape *shapes[] = {&s.thin, &s.fat, &s.wide};
    if (draw(state, 3) == 0)
        return s;
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t slot = draw(state, 2) ? KERNEL_FAT_SLOT : KERNEL_THIN_SLOT;
        shapes[i]->slot = slot;
        shapes[i]->warps = 1 + draw(state, launch_max_warps(slot, 0));
        shapes[i]->slots = 2 + draw(state, (200u << 10) / (slot + KERNEL_SLOT_EXTRA) / shapes[i]->warps - 2 + 1);
    }
    return s;
}

static int one_sum(batches *b, bool small)
{
    static fab_segment segments[2][MAX_SEGMENTS];
    static fab_source sources[2][MAX_SEGMENTS * MAX_SUM];
    static posting to[2];
    uint64_t *s = &b->state, dst_used = GUARD;
    uint32_t dtype = draw(s, 3), item = dtype == TIDE_F32 ? 4 : 2, n_sources = 0;
    uint32_t n = draw(s, 4) ? 1 + draw(s, 4) : 1 + draw(s, MAX_SEGMENTS), n_posts = draw(s, 2) * draw(s, MAX_WORDS);
    uint32_t ctas = (uint32_t[]){0, 1, 2, 4, 7, 16, 32, 132}[draw(s, 8)], largest = small ? 3000 : n > 8 ? 5000 : 300000;
    int beta = (int)draw(s, 4), accumulate = (int)draw(s, 2), code = CLI_OK;
    float alpha = (float)draw(s, 9) / 3.0f - 1.0f;
    bool aligned = draw(s, 3) != 0;
    launch_shapes shapes = any_shapes(s);
    side *sides[2] = {&b->host, &b->gpu};

    for (uint32_t i = 0; i < n; i++) {
        bool on = aligned || draw(s, 2);
        uint32_t sum = draw(s, 8) ? 1 + draw(s, 8) : draw(s, MAX_SUM + 1), rows = draw(s, 3) ? 1 : draw(s, 5);
        uint64_t elems = draw(s, draw(s, 2) ? 64 : largest / (rows + 1)), pitch, start = dst_used;
        if (on)
            elems &= ~UINT64_C(7);
        pitch = elems * 4 + (on ? 16 * draw(s, 3) : 4 * draw(s, 4));
        if (!on)
            start += 4 * draw(s, 4);
        if (start + rows * pitch + 2 * GUARD > b->bytes) {
            n = i;
            break;
        }
        for (int side = 0; side < 2; side++)
            segments[side][i] = (fab_segment){within(sides[side]->dst, start), pitch, elems, rows, n_sources, sum};
        dst_used = tide_align_up(start + rows * pitch, 16) + GUARD;
        for (uint32_t k = 0; k < sum; k++, n_sources++) {
            uint64_t row = elems * item + (on ? 16 * draw(s, 3) : item * draw(s, 9)), extent = rows * row + 64;
            uint64_t offset = draw(s, (uint32_t)(b->bytes - extent)) / (on ? 16 : item) * (on ? 16 : item);
            for (int side = 0; side < 2; side++)
                sources[side][n_sources] = (fab_source){within(sides[side]->src, offset), row, dtype, 0};
        }
    }
    snprintf(b->what, sizeof b->what,
             "sum of %s: %u segments, %u sources, %u CTAs, beta %d (accumulate %d), alpha %g, %u posts, fat %ux%ux%u thin %ux%ux%u wide %ux%ux%u",
             tide_dtype_name((int)dtype), n, n_sources, ctas, beta, accumulate, (double)alpha, n_posts, shapes.fat.slot,
             shapes.fat.warps, shapes.fat.slots, shapes.thin.slot, shapes.thin.warps, shapes.thin.slots, shapes.wide.slot,
             shapes.wide.warps, shapes.wide.slots);
    code = upload(b, &b->gpu, (int)dtype, TIDE_F32);
    if (code == CLI_OK)
        code = prepare_words(b, &b->gpu, n_posts, to);
    for (int side = 0; code == CLI_OK && side < 2; side++) {
        fab_reduce reduce = {.segments = segments[side], .sources = sources[side], .n_segments = n, .beta = beta};
        cuda_kernels_shapes(sides[side]->kernels, &shapes);
        if (cuda_launch_reduce(sides[side]->kernels, b->g->stream, &reduce, NULL, accumulate, alpha, ctas,
                               &to[side].posts) != TIDE_OK)
            code = cli_fail(b->c, "%s: %s", b->what, tide_last_error());
    }
    if (code == CLI_OK)
        code = fetch_words(b, &b->gpu);
    if (code == CLI_OK)
        code = download(b, &b->gpu);
    if (code == CLI_OK)
        code = compare(b, true);
    return code == CLI_OK ? compare_words(b) : code;
}

/* What the peer's stream has found behind its wait for a word is the result. */
static int seen_by_peer(batches *b, const side *gpu)
{
    const cuda_driver *d = b->g->driver;
    bool came;
    int code = kernels_peer_sync(b->c, b->g, &b->peer, &came);

    if (code == CLI_OK && !came) { /* nothing may be left waiting */
        printf("WRONG %s: no post has come to the peer\n", b->what);
        code = kernels_check(b->c, b->g, d->MemsetD8Async(gpu->words, POSTED, WORD_BYTES, b->g->stream), "words");
        code = code == CLI_OK ? CLI_WRONG : code;
    }
    if (kernels_check(b->c, b->g, d->StreamSynchronize(b->g->stream), b->what) != CLI_OK)
        return CLI_BAD;
    return code;
}

static int one_copy(batches *b, bool small, uint32_t *with_posts)
{
    static fab_run runs[2][MAX_RUNS];
    static posting to_words[2];
    uint64_t *s = &b->state, used = GUARD;
    const int dtypes[] = {TIDE_F32, TIDE_BF16, TIDE_F16, TIDE_OPAQUE};
    int from = dtypes[draw(s, 4)], to = from == TIDE_OPAQUE || draw(s, 2) ? from : dtypes[draw(s, 3)], code;
    uint32_t a = from == TIDE_OPAQUE ? 1 : tide_dtype_bytes(from), z = to == TIDE_OPAQUE ? 1 : tide_dtype_bytes(to);
    uint32_t n = draw(s, 3) ? 1 + draw(s, 6) : 1 + draw(s, MAX_RUNS), local = draw(s, 2), ctas = draw(s, 20);
    uint32_t largest = small ? 2000 : n > 20 ? 3000 : 100000, equal = draw(s, 3) ? 0 : 16 * draw(s, largest / 16);
    uint32_t n_posts = draw(s, 2) * draw(s, KERNEL_MAX_POSTS + 1);
    bool posted[2] = {false, false}, peer = !local && b->peer.near;
    side gpu = b->gpu, *sides[2] = {&b->host, &gpu};

    if (peer) {
        gpu.dst = b->peer.near;
        gpu.words = gpu.dst + b->bytes;
    }

    for (uint32_t i = 0; i < n; i++) {
        bool on = draw(s, 2);
        uint32_t rows = equal || draw(s, 2) ? 1 : draw(s, 30), align = on ? 16 : a > z ? a : z;
        uint64_t width = equal ? equal : draw(s, largest / (rows + 1) + 1), src_pitch, dst_pitch, start, offset;
        if (on)
            width &= ~UINT64_C(15);
        src_pitch = width * a + (equal ? 0 : align * draw(s, 3));
        dst_pitch = width * z + (equal ? 16 : align * draw(s, 3));
        start = tide_align_up(used, 16) + (on || equal ? 0 : align * draw(s, 8));
        if (start + rows * dst_pitch + 2 * GUARD > b->bytes) {
            n = i;
            break;
        }
        offset = equal ? i * width * a : draw(s, (uint32_t)(b->bytes - rows * src_pitch - 64)) / align * align;
        if (offset + rows * src_pitch > b->bytes) {
            n = i;
            break;
        }
        for (int side = 0; side < 2; side++)
            runs[side][i] = (fab_run){within(sides[side]->src, offset), within(sides[side]->dst, start), width, rows,
                                      src_pitch, dst_pitch};
        runs[0][i].src.zero = runs[1][i].src.zero = draw(s, 16) == 0;
        used = start + rows * dst_pitch + (equal ? 0 : draw(s, 40));
    }
    snprintf(b->what, sizeof b->what, "copy of %s to %s: %u runs, %s, %u CTAs, %u posts", tide_dtype_name(from),
             tide_dtype_name(to), n, local ? "within the GPU" : peer ? "to a peer" : "as to a peer", ctas, n_posts);
    code = upload(b, &gpu, from, TIDE_OPAQUE);
    if (code == CLI_OK)
        code = prepare_words(b, &gpu, n_posts, to_words);
    if (code == CLI_OK && peer) /* the peer's stream begins to wait now */
        code = kernels_check(b->c, b->g, b->g->driver->StreamSynchronize(b->g->stream), "words");
    for (int side = 0; code == CLI_OK && side < 2; side++) {
        fab_copy copy = {.runs = runs[side], .n_runs = n, .src_dtype = (uint8_t)from, .dst_dtype = (uint8_t)to};
        if (side == 1 && peer && posted[0] && n_posts)
            code = kernels_peer_await(b->c, b->g, &b->peer, b->bytes + 8 * (1 + draw(s, n_posts)), POSTED, b->result, b->bytes);
        if (code == CLI_OK && cuda_launch_copy(sides[side]->kernels, b->g->stream, &copy, NULL, (int)local, ctas, &to_words[side].posts,
                             &posted[side]) != TIDE_OK)
            code = cli_fail(b->c, "%s: %s", b->what, tide_last_error());
    }
    if (code == CLI_OK)
        code = fetch_words(b, &gpu);
    if (code == CLI_OK)
        code = peer && posted[0] && n_posts ? seen_by_peer(b, &gpu) : download(b, &gpu);
    if (code == CLI_OK)
        code = compare(b, false);
    *with_posts += posted[1] && n_posts > 0;
    return code == CLI_OK ? compare_words(b) : code;
}

static int check_batches(const cli *c, gpu *g)
{
    batches b = {.c = c, .g = g, .gpu = {.kernels = g->kernels}, .bytes = c->quick ? 256 << 10 : 2 << 20};
    uint32_t n = c->quick ? 40 : 400, sums = 0, copies = 0, with_posts = 0;
    void *memory = NULL;
    int code;

    b.state = (uint64_t)c->seed * 2 + 1;
    if (cuda_kernels_load(&twins, NULL, &b.host.kernels) != TIDE_OK)
        return cli_fail_library(c);
    code = kernels_alloc_host(c, g, 3 * b.bytes + 2 * WORD_BYTES, &memory);
    if (code == CLI_OK) {
        b.host.src = (uintptr_t)memory;
        b.host.dst = b.host.src + b.bytes;
        b.host.words = b.host.dst + b.bytes;
        b.words = at(b.host.words + WORD_BYTES);
        b.result = at(b.host.words + 2 * WORD_BYTES);
        code = kernels_alloc(c, g, b.bytes, &b.gpu.src);
    }
    if (code == CLI_OK)
        code = kernels_alloc(c, g, b.bytes, &b.gpu.dst);
    if (code == CLI_OK)
        code = kernels_alloc(c, g, WORD_BYTES, &b.gpu.words);
    b.gpu.done = b.gpu.words;
    b.host.done = b.host.words;
    if (code == CLI_OK)
        code = kernels_peer_open(c, g, b.bytes + WORD_BYTES, &b.peer);
    for (uint32_t i = 0; code == CLI_OK && i < n; i++) {
        bool sum = draw(&b.state, 3) != 0;
        code = sum ? one_sum(&b, c->quick) : one_copy(&b, c->quick, &with_posts);
        if (code == CLI_WRONG)
            printf("batch %u of --seed %" PRId64 "%s\n", i, c->seed, c->quick ? " --quick" : "");
        *(sum ? &sums : &copies) += 1;
    }
    if (code != CLI_BAD)
        printf("kernels: %u sums, %u copies (%u with posts), %d wrong (%s%s)\n", sums, copies, with_posts, code == CLI_WRONG,
               g->name, b.peer.near ? " and a peer" : "");
    kernels_peer_close(g, &b.peer);
    if (b.gpu.words)
        g->driver->MemFree(b.gpu.words);
    if (b.gpu.dst)
        g->driver->MemFree(b.gpu.dst);
    if (b.gpu.src)
        g->driver->MemFree(b.gpu.src);
    if (memory)
        g->driver->MemFreeHost(memory);
    cuda_kernels_unload(b.host.kernels, false);
    return code;
}

/* ---- the GPU ---------------------------------------------------------------------------------- */

static int no_gpu(const cli *c)
{
    (void)cli_fail_library(c);
    return CLI_NO_GPU;
}

int cli_kernels(const cli *c)
{
    gpu g = {0};
    cu_dev device;
    cu_context popped;
    int code;

    if (cuda_driver_get(&g.driver) != TIDE_OK)
        return no_gpu(c);
    if (cuda_check(g.driver, g.driver->DeviceGet(&device, 0), "cuDeviceGet") != TIDE_OK ||
        cuda_check(g.driver, g.driver->PrimaryRetain(&g.context, device), "cuDevicePrimaryCtxRetain") != TIDE_OK)
        return no_gpu(c);
    code = kernels_check(c, &g, g.driver->CtxPush(g.context), "cuCtxPushCurrent");
    if (code == CLI_OK) {
        g.driver->DeviceGetName(g.name, sizeof g.name, device);
        g.driver->DeviceGetAttribute(&g.n_sms, CU_ATTR_SM_COUNT, device);
        g.driver->DeviceGetAttribute(&g.l2_bytes, CU_ATTR_L2_BYTES, device);
        if (cuda_kernels_load(g.driver, g.context, &g.kernels) != TIDE_OK)
            code = no_gpu(c); /* built without nvcc, or no code for this GPU */
        if (code == CLI_OK)
            code = kernels_check(c, &g, g.driver->StreamCreate(&g.stream, CU_STREAM_NON_BLOCKING, 0), "cuStreamCreate");
        if (code == CLI_OK)
            code = c->timed ? cli_kernels_bench(c, &g) : check_batches(c, &g);
        if (g.stream)
            g.driver->StreamDestroy(g.stream);
        cuda_kernels_unload(g.kernels, false);
        g.driver->CtxPop(&popped);
    }
    g.driver->PrimaryRelease(device);
    return code;
}
