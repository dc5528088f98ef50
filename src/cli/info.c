/* info.c - `tide info`: what this build is, and what it can run on here. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/cuda.h"

#if defined(__SANITIZE_ADDRESS__)
#define BUILD_SANITIZER "address"
#elif defined(__SANITIZE_THREAD__)
#define BUILD_SANITIZER "thread"
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BUILD_SANITIZER "address"
#elif __has_feature(thread_sanitizer)
#define BUILD_SANITIZER "thread"
#endif
#endif
#ifndef BUILD_SANITIZER
#define BUILD_SANITIZER "none"
#endif
#if defined(__clang__)
#define BUILD_COMPILER "clang " __clang_version__
#else
#define BUILD_COMPILER "gcc " __VERSION__
#endif

typedef struct fabric_row {
    const char *name;
    bool usable;
    char why[256];
} fabric_row;

/* The host fabric needs memory that processes can share without a name in the file system. */
static void probe_host(fabric_row *row)
{
    int fd = memfd_create("tide-info", MFD_CLOEXEC);

    row->name = "host";
    row->usable = fd >= 0 && ftruncate(fd, 4096) == 0;
    if (row->usable)
        snprintf(row->why, sizeof row->why, "threads and processes of this machine, %ld cores, shared memory by memfd",
                 sysconf(_SC_NPROCESSORS_ONLN));
    else
        snprintf(row->why, sizeof row->why, "memfd_create: %s", strerror(errno));
    if (fd >= 0)
        close(fd);
}

static uint64_t elements(const tide_param *p)
{
    uint64_t n = 1;
    for (int d = 0; d < p->ndim; d++)
        n *= (uint64_t)p->dims[d];
    return n;
}

static void put_model(tide_text *t, const cli_model *model, const cli_shapes *s, bool json)
{
    uint64_t total = 0;

    for (uint32_t i = 0; i < s->n_params; i++)
        total += elements(&s->params[i]);
    if (json)
        tide_text_put(t, "{\"name\": \"%s\", \"source\": \"%s\", \"elements\": %llu, \"params\": [", model->name,
                      model->source, (unsigned long long)total);
    else
        tide_text_put(t, "%s: %s; %u parameters, %llu elements\n", model->name, model->source, s->n_params,
                      (unsigned long long)total);
    for (uint32_t i = 0; i < s->n_params; i++) {
        const tide_param *p = &s->params[i];
        tide_text_put(t, json ? "%s{\"name\": \"%s\", \"dims\": [" : "%s  %-34s", json && i ? ", " : "", p->name);
        for (int d = 0; d < p->ndim; d++)
            tide_text_put(t, "%s%lld", d == 0 ? "" : json ? ", " : " x ", (long long)p->dims[d]);
        tide_text_put(t, json ? "]}" : "\n");
    }
    if (json)
        tide_text_put(t, "]}");
}

static int print_models(const cli *c, tide_text *t)
{
    if (c->json)
        tide_text_put(t, "{\"schema\": 1, \"models\": [");
    for (size_t i = 0; i < cli_n_models; i++) {
        cli_shapes s = {0};
        bool ok = true;

        cli_models[i].add(&s, &ok);
        if (ok) {
            tide_text_put(t, i == 0 ? "" : c->json ? ", " : "\n");
            put_model(t, &cli_models[i], &s, c->json);
        }
        cli_shapes_clear(&s);
        if (!ok)
            return cli_fail(c, "out of memory");
    }
    if (c->json)
        tide_text_put(t, "]}\n");
    return CLI_OK;
}

static void put_knob(tide_text *t, const tide_knob_info *knob, bool json, bool first)
{
    if (json) {
        tide_text_put(t, "%s{\"name\": \"%s\", \"default\": ", first ? "" : ", ", knob->name);
        if (knob->dflt == TIDE_AUTO)
            tide_text_put(t, "null");
        else
            tide_text_put(t, "%lld", (long long)knob->dflt);
        tide_text_put(t, ", \"minimum\": %lld, \"maximum\": %lld, \"help\": ", (long long)knob->minimum,
                      (long long)knob->maximum);
        tide_text_json_string(t, knob->help);
        tide_text_put(t, "}");
    } else {
        char value[32] = "auto";
        if (knob->dflt != TIDE_AUTO)
            snprintf(value, sizeof value, "%lld", (long long)knob->dflt);
        tide_text_put(t, "  %-12s %-9s %lld..%-14lld %s\n", knob->name, value, (long long)knob->minimum,
                      (long long)knob->maximum, knob->help);
    }
}

int cli_info(const cli *c)
{
    tide_text t = {cli_write, stdout, TIDE_OK};
    fabric_row fabrics[3];
    tide_knob_info knob;

    if (c->models)
        return print_models(c, &t);
    probe_host(&fabrics[0]);
    fabrics[1].name = "cuda";
    cli_cuda_probe(&fabrics[1].usable, fabrics[1].why, sizeof fabrics[1].why);
    fabrics[2].name = "nccl";
    cli_nccl_probe(&fabrics[2].usable, fabrics[2].why, sizeof fabrics[2].why);
    tide_text_put(
        &t,
        c->json ? "{\"schema\": 1, \"version\": \"%s\", \"build\": {\"compiler\": \"%s\", \"sanitizer\": \"%s\"}, "
                  "\"fabrics\": ["
                : "tide %s\nbuild: %s, sanitizer %s\n\nfabrics\n",
        tide_version(), BUILD_COMPILER, BUILD_SANITIZER);
    for (size_t i = 0; i < sizeof fabrics / sizeof fabrics[0]; i++) {
        const fabric_row *f = &fabrics[i];
        if (c->json) {
            tide_text_put(&t, "%s{\"name\": \"%s\", \"usable\": %s, \"why\": ", i ? ", " : "", f->name,
                          f->usable ? "true" : "false");
            tide_text_json_string(&t, f->why);
            tide_text_put(&t, "}");
        } else {
            tide_text_put(&t, "  %-6s %-9s %s\n", f->name, f->usable ? "usable" : "no", f->why);
        }
    }
    if (c->json)
        tide_text_put(&t, "]");
    cli_cuda_describe(&t, c->json);
    tide_text_put(&t, c->json ? ", \"knobs\": [" : "\nknobs        default   bounds\n");
    for (size_t i = 0; tide_knob_describe(i, &knob) == TIDE_OK; i++)
        put_knob(&t, &knob, c->json, i == 0);
    if (c->json)
        tide_text_put(&t, "]}\n");
    return CLI_OK;
}
