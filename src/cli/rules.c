/* rules.c - a driver is held to all the rules, a line each. */
#include "cli/rules_tools.h"

static bool begin(rules *r, char *why, size_t bytes)
{
    void *gates = NULL;
    cu_result result = r->d->Init(0);
    if (result == CU_OK)
        result = r->d->DeviceGetCount(&r->n_devices);
    if (r->n_devices > 2)
        r->n_devices = 2;
    if (result == CU_OK && r->n_devices < 1)
        result = CU_NO_DEVICE;
    for (int i = 0; i < r->n_devices && result == CU_OK; i++) {
        result = r->d->DeviceGet(&r->device[i], i);
        if (result == CU_OK)
            result = r->d->PrimaryRetain(&r->context[i], r->device[i]);
    }
    if (result == CU_OK)
        result = r->d->CtxPush(r->context[0]);
    if (result == CU_OK)
        result = r->d->MemHostAlloc(&gates, GATES * 8, CU_HOSTALLOC_PORTABLE | CU_HOSTALLOC_MAPPED);
    if (result == CU_OK)
        result = r->d->MemHostGetDevicePointer(&r->gates_device, gates, 0);
    r->gates = gates;
    if (result == CU_OK)
        memset(gates, 0, GATES * 8);
    else
        snprintf(why, bytes, "the driver does not start: error %d", result);
    return result == CU_OK;
}

static void end(rules *r)
{
    cu_context c;
    if (r->gates)
        r->d->MemFreeHost((void *)r->gates);
    if (r->context[0])
        r->d->CtxPop(&c);
    for (int i = 0; i < 2; i++)
        if (r->context[i])
            r->d->PrimaryRelease(r->device[i]);
}

static bool healthy(rules *r)
{
    cu_stream s = rules_stream(r);
    bool fine = s && rules_dry(r, s);
    rules_give_back(r);
    return fine;
}

/* broken: why no rule can be asked any more; empty: none. r->why: what is to be said beside the outcome. */
static enum outcome keep_to(rules *r, const rule *one, const char *broken)
{
    enum outcome o = NOT_RUN;

    snprintf(r->why, sizeof r->why, "%s", broken);
    r->note = NULL;
    if (broken[0])
        return o;
    o = one->run(r);
    if (o == OK)
        snprintf(r->why, sizeof r->why, "%s", r->note ? r->note : "");
    rules_give_back(r);
    return o;
}

rules_count rules_run(const cuda_driver *driver, FILE *out)
{
    static const char *const words[] = {"ok", "FAILED", "not run"};
    static const rule *const lists[] = {rules_of_memory, rules_of_streams, rules_of_peers};
    rules_count count = {0, 0, 0};
    rules r = {.d = driver};
    char broken[200] = "";

    begin(&r, broken, sizeof broken);
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        for (const rule *one = lists[i]; one->name; one++) {
            enum outcome o = keep_to(&r, one, broken);
            fprintf(out, "%-8s %s%s%s\n", words[o], one->name, r.why[0] ? ": " : "", r.why);
            fflush(out);
            *(o == OK ? &count.ok : o == FAILED ? &count.failed : &count.not_run) += 1;
            if (o == FAILED && !healthy(&r))
                snprintf(broken, sizeof broken, "the context is of no use since '%s'", one->name);
        }
    }
    end(&r);
    fprintf(out, "driver rules: %d ok, %d failed, %d not run\n", count.ok, count.failed, count.not_run);
    return count;
}
