/* library.c - finding the process' NCCL. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/base.h"
#include "fabric/nccl/library.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static nccl_library process;
static int process_status;
static char process_text[256];
static _Atomic(const nccl_library *) fake;

/* A function pointer cannot be converted from what dlsym returns. */
static int find(void *library, const char *name, void *field)
{
    void *symbol = dlsym(library, name);
    memcpy(field, &symbol, sizeof symbol);
    return symbol ? TIDE_OK : tide_fail(TIDE_ERR_UNSUPPORTED, "NCCL: the library has no %s", name);
}

/* 23102: 2.31.2. Before 2.9 a version was written otherwise; those are too old in either reading. */
static int check_version(int version)
{
    if (version >= NCCL_OLDEST)
        return TIDE_OK;
    return tide_fail(TIDE_ERR_UNSUPPORTED, "NCCL: version %d.%d.%d, expected at least %d.%d.%d", version / 10000,
                     version / 100 % 100, version % 100, NCCL_OLDEST / 10000, NCCL_OLDEST / 100 % 100,
                     NCCL_OLDEST % 100);
}

/* One that is loaded, by whatever scope, goes before one that would have to be: two in a process share neither
 * communicators nor their threads' assumptions. The library is never closed. */
static void *open_library(void)
{
    static const char *const name = "libnccl.so.2";
    void *loaded = dlopen(NULL, RTLD_NOW | RTLD_LOCAL);

    if (loaded && dlsym(loaded, "ncclGetVersion"))
        return loaded;
    if (loaded)
        dlclose(loaded);
    loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); /* as an extension module has it: not globally */
    return loaded ? loaded : dlopen(name, RTLD_NOW | RTLD_LOCAL);
}

static int load(nccl_library *l)
{
    nccl_result (*get_version)(int *);
    void *library = open_library();
    int status = TIDE_OK;

    if (!library)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "NCCL: %.160s", dlerror());
    if (find(library, "ncclGetVersion", &get_version) != TIDE_OK)
        return TIDE_ERR_UNSUPPORTED;
    if (get_version(&l->version) != NCCL_OK)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "NCCL: ncclGetVersion fails");
    status = check_version(l->version); /* says more than the first function that it lacks */
#define NCCL_X(field, name, result, parameters)                                                                        \
    if (status == TIDE_OK)                                                                                             \
        status = find(library, name, &l->field);
    NCCL_LIBRARY(NCCL_X)
#undef NCCL_X
    return status;
}

static void load_once(void)
{
    process_status = load(&process);
    if (process_status != TIDE_OK)
        snprintf(process_text, sizeof process_text, "%s", tide_last_error());
}

int nccl_library_get(const nccl_library **out)
{
    const nccl_library *f = atomic_load(&fake);

    *out = f ? f : &process;
    if (f)
        return check_version(f->version);
    pthread_once(&once, load_once);
    return process_status == TIDE_OK ? TIDE_OK : tide_fail(process_status, "%s", process_text);
}

void nccl_library_fake(const nccl_library *library)
{
    atomic_store(&fake, library);
}

int nccl_check(const nccl_library *library, nccl_comm comm, nccl_result result, const char *what)
{
    const char *text, *last;

    if (result == NCCL_OK)
        return TIDE_OK;
    text = library->GetErrorString(result);
    last = library->GetLastError(comm);
    return tide_fail(result == NCCL_REMOTE_ERROR ? TIDE_ERR_NETWORK : TIDE_ERR_SYSTEM, "%s: %s (%.200s)", what,
                     text ? text : "an unknown error", last && *last ? last : "NCCL says no more");
}
