/*
 * kernels_bench.c - `tide kernels --bench`: rates of the kernels and of copy engines, to a second GPU as well where there is
 * one, and what a launch costs the host.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "base/base.h"
#include "cli/kernels.h"
#include "cli/rules_tools.h"

enum { ROUNDS = 5, MAX_SUM = 8 };

typedef struct bench {
    const cli *c;
    gpu *g;
    cu_event begin, end;
    cu_ptr src, dst; /* src: MAX_SUM x n elements of bf16; dst: n of fp32 */
    uint64_t src_bytes, dst_bytes;
    int code;
} bench;

/* What is timed: enqueues one repetition. */
typedef struct work {
    fab_segment segment;
    fab_source sources[MAX_SUM];
    fab_reduce reduce;
    fab_run *runs;
    fab_copy copy;
    bool is_copy;
    cu_function bare; /* if any: nothing but a kernel with three words of parameters */
    rules_kernel bare_args;
    int local;
    uint32_t ctas;
    uint64_t window, n_windows; /* sums: repetitions walk over so many windows of so many elements */
} work;

static int enqueue(bench *b, work *w, uint32_t repetition)
{
    void *parameters[] = {&w->bare_args};
    if (w->bare)
        return cuda_check(b->g->driver, b->g->driver->LaunchKernel(w->bare, 1, 1, 1, 1, 1, 1, 0, b->g->stream, parameters, NULL),
                          "cuLaunchKernel");
    if (w->is_copy)
        return cuda_launch_copy(b->g->kernels, b->g->stream, &w->copy, NULL, w->local, w->ctas, NULL, NULL);
    uint64_t first = repetition % w->n_windows * w->window;
    fab_segment segment = w->segment;
    fab_source sources[MAX_SUM];
    fab_reduce reduce = w->reduce;
    segment.dst.base += 4 * first;
    for (uint32_t i = 0; i < segment.n_sources; i++) {
        sources[i] = w->sources[i];
        sources[i].at.base += 2 * first;
    }
    reduce.segments = &segment;
    reduce.sources = sources;
    return cuda_launch_reduce(b->g->kernels, b->g->stream, &reduce, NULL, 1, 0.5f, w->ctas, NULL);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median of ROUNDS, in us a repetition; 0 after a failure. Repetitions fill about `target` us. */
static double measure(bench *b, work *w, double target)
{
    const cuda_driver *d = b->g->driver;
    double us[ROUNDS];
    uint32_t n = 2;

    for (int round = -2; round < ROUNDS && b->code == CLI_OK; round++) {
        float ms = 0;
        int status = TIDE_OK;
        b->code = kernels_check(b->c, b->g, d->EventRecord(b->begin, b->g->stream), "cuEventRecord");
        for (uint32_t i = 0; i < n && status == TIDE_OK; i++)
            status = enqueue(b, w, i);
        if (status != TIDE_OK)
            b->code = cli_fail_library(b->c);
        if (b->code == CLI_OK)
            b->code = kernels_check(b->c, b->g, d->EventRecord(b->end, b->g->stream), "cuEventRecord");
        if (b->code == CLI_OK)
            b->code = kernels_check(b->c, b->g, d->StreamSynchronize(b->g->stream), "a timed kernel");
        if (b->code == CLI_OK)
            b->code = kernels_check(b->c, b->g, d->EventElapsedTime(&ms, b->begin, b->end), "cuEventElapsedTime");
        if (round >= 0)
            us[round] = ms * 1e3 / n;
        else if (round == -1)
            n = (uint32_t)(target / (ms * 1e3 / n + 1e-3)) + 2;
        n = n > 500 ? 500 : n;
    }
    if (b->code != CLI_OK)
        return 0;
    qsort(us, ROUNDS, sizeof us[0], by_value);
    return us[ROUNDS / 2];
}

/* ---- sums ------------------------------------------------------------------------------------- */

/* off: bytes that each source begins behind a line of 128 more than the one before it. */
static void make_sum(const bench *b, work *w, uint32_t n_sources, uint64_t elems, int beta, uint64_t off)
{
    /* Not a power of two: sources that begin in one bank of the memory each are slower than those of a real call. */
    uint64_t apart = b->src_bytes / MAX_SUM - 4096 * 37 - 256 - off;
    *w = (work){.window = elems, .n_windows = 1};
    w->segment = (fab_segment){.dst = {(uintptr_t)b->dst, -1, 0}, .elems = elems, .rows = 1, .n_sources = n_sources};
    for (uint32_t i = 0; i < n_sources; i++)
        w->sources[i] = (fab_source){{(uintptr_t)(b->src + i * apart), -1, 0}, 0, TIDE_BF16, 0};
    w->reduce = (fab_reduce){.n_segments = 1, .beta = beta};
}

static double sum_rate(bench *b, uint32_t n_sources, uint32_t ctas, bool from_l2, uint64_t off,
                       const launch_shapes *shapes, int beta)
{
    work w;
    /* In the L2 cache: sources and results of a window take a quarter of it. From memory: windows are walked over, so
     * that what is read was last touched a whole buffer ago. */
    uint64_t all = b->dst_bytes / 4 - (1 << 20), item = 2 * n_sources + 4;
    uint64_t window = from_l2 ? (uint64_t)b->g->l2_bytes / 4 / item & ~UINT64_C(4095) : (ctas < 16 ? all / 16 : all / 4) & ~UINT64_C(4095);
    make_sum(b, &w, n_sources, window, beta, off);
    w.ctas = ctas;
    w.n_windows = from_l2 ? 1 : all / window;
    cuda_kernels_shapes(b->g->kernels, shapes);
    double us = measure(b, &w, 3000);
    return us > 0 ? (double)window * (double)(item + (beta == FAB_BETA_ONE ? 4 : 0)) / us / 1e3 : 0;
}

static void sums(bench *b)
{
    static const uint32_t ctas[] = {1, 2, 4, 8, 16, 32, 64, 132};
    const launch_shape all[] = {launch_default_shapes.thin, launch_default_shapes.fat, launch_default_shapes.wide};
    static const char *const names[] = {"thin", "fat", "wide"};
    static const struct { const char *name; bool l2; uint64_t off; } from[] = {
        {"HBM", false, 0}, {"HBM+16", false, 16}, {"L2", true, 0}};
    launch_shapes shapes = launch_default_shapes;

    printf("sums of bf16 into fp32, GB/s read and written, all CTAs (a CTA); +16: sources begin off lines of 128 bytes\n"
           "%-6s %-8s %-7s", "shape", "sources", "from");
    for (size_t i = 0; i < sizeof ctas / sizeof *ctas; i++)
        printf(" %8u CTA%s", ctas[i], ctas[i] == 1 ? " " : "s");
    printf("\n");
    for (int i = 0; i < 3; i++) {
        shapes.fat = shapes.thin = shapes.wide = all[i];
        for (uint32_t n = 2; n <= 8; n += 6) {
            for (size_t f = 0; f < sizeof from / sizeof *from; f++) {
                printf("%-6s %-8u %-7s", names[i], n, from[f].name);
                for (size_t c = 0; c < sizeof ctas / sizeof *ctas && b->code == CLI_OK; c++) {
                    double rate = sum_rate(b, n, ctas[c], from[f].l2, from[f].off, &shapes, FAB_BETA_ZERO);
                    printf(" %6.0f (%3.0f)", rate, rate / ctas[c]);
                    fflush(stdout);
                }
                printf("\n");
            }
        }
    }
    for (uint32_t n = 2; n <= 8 && b->code == CLI_OK; n += 6)
        printf("%u sources and the results so far (beta 1), %d CTAs: %.0f GB/s; 1 CTA: %.0f\n", n, b->g->n_sms,
               sum_rate(b, n, (uint32_t)b->g->n_sms, false, 0, &launch_default_shapes, FAB_BETA_ONE),
               sum_rate(b, n, 1, false, 0, &launch_default_shapes, FAB_BETA_ONE));
}

/* Which shape is best: a CTA alone, 32, and one an SM. */
static void shapes(bench *b)
{
    static const launch_shape tries[] = {
        {1024, 4, 2}, {1024, 4, 3},  {1024, 4, 4},  {1024, 6, 2},  {1024, 8, 2},  {1024, 8, 3}, {1024, 12, 2}, {1024, 16, 2},
        {1024, 16, 3}, {1024, 20, 2}, {1024, 24, 2}, {1024, 32, 2}, {4096, 2, 2},  {4096, 3, 2}, {4096, 4, 2},  {4096, 6, 2},
        {4096, 8, 2}, {4096, 8, 3},  {4096, 10, 2}, {4096, 12, 2}, {4096, 12, 3}, {4096, 12, 4},
    };
    const uint32_t all = (uint32_t)b->g->n_sms;
    printf("shapes: slot bytes x warps x slots; GB/s a CTA (sources in HBM unless L2; all: one CTA an SM)\n%-16s %10s %9s %8s %8s %8s %8s "
           "%8s %8s\n", "", "shared KiB", "1 CTA, 8", "L2, 8", "1 CTA, 2", "32, 8", "32, 2", "all, 8", "all, 2");
    for (size_t i = 0; i < sizeof tries / sizeof *tries && b->code == CLI_OK; i++) {
        launch_shapes s = {tries[i], tries[i], tries[i]};
        char name[32];
        snprintf(name, sizeof name, "%ux%ux%u", tries[i].slot, tries[i].warps, tries[i].slots);
        printf("%-16s %10.1f %9.1f %8.1f %8.1f %8.1f %8.1f %8.1f %8.1f\n", name, launch_shared_bytes(&tries[i]) / 1024.0,
               sum_rate(b, 8, 1, false, 0, &s, FAB_BETA_ZERO), sum_rate(b, 8, 1, true, 0, &s, FAB_BETA_ZERO),
               sum_rate(b, 2, 1, false, 0, &s, FAB_BETA_ZERO), sum_rate(b, 8, 32, false, 0, &s, FAB_BETA_ZERO) / 32,
               sum_rate(b, 2, 32, false, 0, &s, FAB_BETA_ZERO) / 32, sum_rate(b, 8, all, false, 0, &s, FAB_BETA_ZERO) / all,
               sum_rate(b, 2, all, false, 0, &s, FAB_BETA_ZERO) / all);
    }
    cuda_kernels_shapes(b->g->kernels, &launch_default_shapes);
}

/* ---- copies ----------------------------------------------------------------------------------- */

static double copy_us(bench *b, fab_run *runs, uint32_t n, int from, int to, int local, uint32_t ctas)
{
    work w = {.is_copy = true, .local = local, .ctas = ctas};
    w.copy = (fab_copy){.runs = runs, .n_runs = n, .src_dtype = (uint8_t)from, .dst_dtype = (uint8_t)to};
    return measure(b, &w, 2000);
}

static fab_run run_of(const bench *b, uint64_t src, uint64_t dst, uint64_t width, uint64_t rows, uint64_t src_pitch,
                      uint64_t dst_pitch)
{
    return (fab_run){{(uintptr_t)(b->src + src), -1, 0}, {(uintptr_t)(b->dst + dst), -1, 0}, width, rows, src_pitch, dst_pitch};
}

static void copies(bench *b)
{
    static const uint32_t ctas[] = {1, 2, 4, 8, 16, 32, 64, 132};
    enum { BYTES = 32 << 20, PARTS = 64 };
    fab_run runs[PARTS], one = run_of(b, 0, 0, BYTES, 1, 0, 0), odd = run_of(b, 2, 0, BYTES / 2, 1, 0, 0);
    fab_run cast = run_of(b, 0, 0, BYTES / 4, 1, 0, 0), narrow = run_of(b, 0, 0, 1024, BYTES / 1024, 2048, 1024);

    /* Unequal parts, so that they are not merged; as many as make the kernel the faster way. */
    for (uint32_t i = 0; i < PARTS; i++)
        runs[i] = run_of(b, i * (uint64_t)(BYTES / PARTS), i * (uint64_t)(BYTES / PARTS), BYTES / PARTS - 16 * (i % 3), 1, 0, 0);
    printf("copies within the GPU, us (32 MiB unless said; by copy engine where that is reckoned faster)\n%-44s", "CTAs");
    for (size_t i = 0; i < sizeof ctas / sizeof *ctas; i++)
        printf(" %7u", ctas[i]);
    struct { const char *name; fab_run *runs; uint32_t n; int from, to; } rows[] = {
        {"64 unequal parts", runs, PARTS, TIDE_OPAQUE, TIDE_OPAQUE},
        {"32768 rows of 1 KiB, pitch 2 KiB", &narrow, 1, TIDE_OPAQUE, TIDE_OPAQUE},
        {"fp32 to bf16, 8 Mi elements", &cast, 1, TIDE_F32, TIDE_BF16},
        {"bf16 to fp32, 8 Mi elements", &cast, 1, TIDE_BF16, TIDE_F32},
    };
    for (size_t r = 0; r < sizeof rows / sizeof *rows && b->code == CLI_OK; r++) {
        printf("\n%-44s", rows[r].name);
        for (size_t i = 0; i < sizeof ctas / sizeof *ctas && b->code == CLI_OK; i++)
            printf(" %7.1f", copy_us(b, rows[r].runs, rows[r].n, rows[r].from, rows[r].to, 1, ctas[i]));
    }
    printf("\ncopy engine: 1 descriptor %.1f us, 64 in a batch %.1f us, 16 MiB off 16 bytes %.1f us\n",
           copy_us(b, &one, 1, TIDE_OPAQUE, TIDE_OPAQUE, 0, 0), copy_us(b, runs, PARTS, TIDE_OPAQUE, TIDE_OPAQUE, 0, 0),
           copy_us(b, &odd, 1, TIDE_OPAQUE, TIDE_OPAQUE, 0, 0));
    for (uint32_t i = 0; i < PARTS; i++)
        runs[i] = run_of(b, i * (uint64_t)(BYTES / PARTS), i * (uint64_t)(2 * BYTES / PARTS), BYTES / PARTS, 1, 0, 0);
    printf("copy engine, 64 equal parts as one 2-D copy: %.1f us\n", copy_us(b, runs, PARTS, TIDE_OPAQUE, TIDE_OPAQUE, 0, 0));
}

/* What the table of costs is to say of a peer: pieces of equal size at unequal distances, back to back on one stream. */
static void copies_to_a_peer(bench *b)
{
    enum { MOST = 16 << 20, PIECES = 30 };
    static const uint32_t pieces[] = {1, 4, 16, PIECES}, ctas[] = {4, 8, 16, 32};
    const launch_cost usual = launch_peer_cost;
    kernels_peer peer;

    b->code = kernels_peer_open(b->c, b->g, MOST + 64 * PIECES * PIECES, &peer);
    if (b->code == CLI_OK && peer.near)
        printf("copies to a peer, us a batch\n%10s %7s %8s %8s %8s %8s %8s  chosen at 32\n", "KiB", "pieces", "engine", "4 CTAs", "8",
               "16", "32");
    for (uint64_t bytes = 64 << 10; bytes <= MOST && peer.near; bytes *= 2) {
        for (size_t i = 0; i < sizeof pieces / sizeof *pieces && b->code == CLI_OK; i++) {
            uint64_t each = bytes / pieces[i] & ~UINT64_C(15), whole = each * pieces[i];
            fab_run runs[PIECES];
            for (uint32_t k = 0; k < pieces[i]; k++)
                runs[k] = (fab_run){{(uintptr_t)(b->src + k * (each + 32 * k)), -1, 0},
                                    {(uintptr_t)(peer.near + k * (each + 32 * k)), -1, 0}, each, 1, 0, 0};
            launch_peer_cost.kernel_weight = 1e9;
            printf("%10" PRIu64 " %7u %8.1f", bytes >> 10, pieces[i], copy_us(b, runs, pieces[i], TIDE_OPAQUE, TIDE_OPAQUE, 0, 16));
            launch_peer_cost.kernel_weight = 0;
            for (size_t k = 0; k < sizeof ctas / sizeof *ctas; k++)
                printf(" %8.1f", copy_us(b, runs, pieces[i], TIDE_OPAQUE, TIDE_OPAQUE, 0, ctas[k]));
            printf("  %s\n", launch_by_kernel(&usual, pieces[i], whole, false, 16, 32) ? "kernel" : "engine");
            fflush(stdout);
        }
    }
    launch_peer_cost = usual;
    kernels_peer_close(b->g, &peer);
}

/* ---- launches --------------------------------------------------------------------------------- */

static void launches(bench *b)
{
    enum { N = 200, PARTS = 30 };
    fab_run runs[PARTS];
    work w[5];
    const char *names[] = {"a sum of 8 sources", "a sum of 2 sources", "a batch of 30 copies", "a cast", "24 bytes of parameters"};
    cu_module module = NULL;

    for (uint32_t i = 0; i < PARTS; i++)
        runs[i] = run_of(b, 4096 * i, 8192 * i, 512 + 16 * i, 1, 0, 0);
    make_sum(b, &w[0], 8, 4096, FAB_BETA_ZERO, 0);
    make_sum(b, &w[1], 2, 4096, FAB_BETA_ZERO, 0);
    w[2] = (work){.is_copy = true};
    w[2].copy = (fab_copy){.runs = runs, .n_runs = PARTS, .src_dtype = TIDE_OPAQUE, .dst_dtype = TIDE_OPAQUE};
    w[3] = (work){.is_copy = true};
    w[3].copy = (fab_copy){.runs = runs, .n_runs = 1, .src_dtype = TIDE_F32, .dst_dtype = TIDE_BF16};
    w[4] = (work){.bare_args = {b->dst, b->dst + 64, 0}};
    b->code = kernels_check(b->c, b->g, b->g->driver->ModuleLoadData(&module, rules_ptx), "cuModuleLoadData");
    if (b->code == CLI_OK)
        b->code = kernels_check(b->c, b->g, b->g->driver->ModuleGetFunction(&w[4].bare, module, RULES_KERNEL),
                                "cuModuleGetFunction");
    printf("host time to enqueue, us (and until the next one on the stream may begin)\n");
    for (int i = 0; i < 5 && b->code == CLI_OK; i++) {
        double best = 0, us;
        w[i].ctas = 4;
        us = measure(b, &w[i], 500);
        for (int round = 0; round < 5 && b->code == CLI_OK; round++) {
            int64_t start = tide_now_ns();
            double each;
            for (int k = 0; k < N; k++)
                if (enqueue(b, &w[i], 0) != TIDE_OK)
                    b->code = cli_fail_library(b->c);
            each = (double)(tide_now_ns() - start) / 1e3 / N;
            best = round == 0 || each < best ? each : best;
            if (b->code == CLI_OK)
                b->code = kernels_check(b->c, b->g, b->g->driver->StreamSynchronize(b->g->stream), "launches");
        }
        printf("  %-22s %6.2f (%.2f)\n", names[i], best, us);
    }
    if (module)
        b->g->driver->ModuleUnload(module);
}

int cli_kernels_bench(const cli *c, gpu *g)
{
    const launch_cost to_peer = launch_peer_cost;
    bench b = {.c = c, .g = g, .src_bytes = (uint64_t)512 << 20, .dst_bytes = (uint64_t)128 << 20};
    const cuda_driver *d = g->driver;
    uint64_t state = 1;
    size_t part = 4 << 20;
    void *values = NULL;

    b.code = kernels_alloc_host(c, g, part, &values);
    if (b.code == CLI_OK) {
        kernels_fill(values, part, TIDE_BF16, &state);
        b.code = kernels_alloc(c, g, b.src_bytes, &b.src);
    }
    if (b.code == CLI_OK)
        b.code = kernels_alloc(c, g, b.dst_bytes, &b.dst);
    if (b.code == CLI_OK)
        b.code = kernels_check(c, g, d->EventCreate(&b.begin, 0), "cuEventCreate");
    if (b.code == CLI_OK)
        b.code = kernels_check(c, g, d->EventCreate(&b.end, 0), "cuEventCreate");
    for (uint64_t at = 0; at < b.src_bytes && b.code == CLI_OK; at += part)
        b.code = kernels_check(c, g, d->MemcpyHtoDAsync(b.src + at, values, part, g->stream), "upload");
    if (b.code == CLI_OK)
        printf("%s, %d SMs, L2 %d MiB, driver %d.%d\n", g->name, g->n_sms, g->l2_bytes >> 20, d->version / 1000,
               d->version % 1000 / 10);
    if (b.code == CLI_OK)
        sums(&b);
    if (b.code == CLI_OK)
        shapes(&b);
    launch_peer_cost.kernel_weight = 1e9; /* what is said to be a copy engine's is */
    if (b.code == CLI_OK)
        copies(&b);
    if (b.code == CLI_OK)
        launches(&b);
    launch_peer_cost = to_peer;
    if (b.code == CLI_OK)
        copies_to_a_peer(&b);
    if (b.end)
        d->EventDestroy(b.end);
    if (b.begin)
        d->EventDestroy(b.begin);
    if (b.dst)
        d->MemFree(b.dst);
    if (b.src)
        d->MemFree(b.src);
    if (values)
        d->MemFreeHost(values);
    return b.code;
}
