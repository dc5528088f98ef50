/* driver.c - finding the CUDA driver of the machine. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/base.h"
#include "fabric/cuda/driver.h"

enum { OLDEST = 12000 }; /* 12.0 */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static cuda_driver machine;
static int machine_status;
static char machine_text[256];
static _Atomic(const cuda_driver *) fake;
enum { GPUS = 64 };
static _Atomic uint64_t given_up; /* a bit a GPU */
static _Atomic int unsettled[GPUS];

/* A function pointer cannot be converted from what dlsym returns. */
static int find(void *library, const char *name, void *field)
{
    void *symbol = dlsym(library, name);
    memcpy(field, &symbol, sizeof symbol);
    return symbol ? TIDE_OK : tide_fail(TIDE_ERR_UNSUPPORTED, "CUDA driver: libcuda.so.1 has no %s", name);
}

static int check_version(int version)
{
    if (version >= OLDEST)
        return TIDE_OK;
    return tide_fail(TIDE_ERR_UNSUPPORTED, "CUDA driver: version %d.%d, expected at least %d.%d", version / 1000,
                     version % 1000 / 10, OLDEST / 1000, OLDEST % 1000 / 10);
}

/* The library is never closed: its threads and exit handlers stay. */
static int load(cuda_driver *d)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int status = TIDE_OK;

    if (!library)
        return tide_fail(TIDE_ERR_UNSUPPORTED, "CUDA driver: %.160s", dlerror());
    if (find(library, "cuDriverGetVersion", &d->DriverGetVersion) != TIDE_OK)
        return TIDE_ERR_UNSUPPORTED;
    d->DriverGetVersion(&d->version);
    if (check_version(d->version) != TIDE_OK) /* says more than the first function that it lacks */
        return TIDE_ERR_UNSUPPORTED;
#define CUDA_X(field, name, parameters)                                                                                \
    if (status == TIDE_OK)                                                                                             \
        status = find(library, name, &d->field);
    CUDA_DRIVER(CUDA_X)
#undef CUDA_X
#define CUDA_X(field, name, parameters)                                                                                \
    if (status == TIDE_OK)                                                                                             \
        (void)find(library, name, &d->field);
    CUDA_DRIVER_OPTIONAL(CUDA_X)
#undef CUDA_X
    return status;
}

static int start(const cuda_driver *d)
{
    int count = 0, status = check_version(d->version);

    if (status != TIDE_OK)
        return status;
    status = cuda_check(d, d->Init(0), "CUDA driver: cuInit");
    if (status == TIDE_OK)
        status = cuda_check(d, d->DeviceGetCount(&count), "CUDA driver: cuDeviceGetCount");
    if (status != TIDE_OK) /* whatever the driver calls it: there is nothing to run on */
        return tide_fail(TIDE_ERR_UNSUPPORTED, "%s", tide_last_error());
    return count > 0 ? TIDE_OK : tide_fail(TIDE_ERR_UNSUPPORTED, "CUDA driver: no device");
}

static void load_once(void)
{
    machine_status = load(&machine);
    if (machine_status == TIDE_OK)
        machine_status = start(&machine);
    if (machine_status != TIDE_OK)
        snprintf(machine_text, sizeof machine_text, "%s", tide_last_error());
}

int cuda_driver_get(const cuda_driver **out)
{
    const cuda_driver *f = atomic_load(&fake);

    *out = f ? f : &machine;
    if (f)
        return start(f);
    pthread_once(&once, load_once);
    return machine_status == TIDE_OK ? TIDE_OK : tide_fail(machine_status, "%s", machine_text);
}

void cuda_driver_fake(const cuda_driver *driver)
{
    atomic_store(&given_up, 0); /* another driver's GPUs */
    atomic_store(&fake, driver);
}

void cuda_gpu_give_up(cu_dev gpu)
{
    atomic_fetch_or(&given_up, UINT64_C(1) << gpu % GPUS);
}

bool cuda_gpu_given_up(cu_dev gpu)
{
    return atomic_load(&given_up) >> gpu % GPUS & 1;
}

void cuda_gpu_unsettle(cu_dev gpu, int by)
{
    atomic_fetch_add(&unsettled[gpu % GPUS], by);
}

bool cuda_gpu_unsettled(cu_dev gpu)
{
    return atomic_load(&unsettled[gpu % GPUS]) > 0;
}

int cuda_check(const cuda_driver *driver, cu_result result, const char *what)
{
    const char *name = NULL, *text = NULL;

    if (result == CU_OK)
        return TIDE_OK;
    driver->GetErrorName(result, &name);
    driver->GetErrorString(result, &text);
    return tide_fail(result == CU_OUT_OF_MEMORY    ? TIDE_ERR_MEMORY
                     : result == CU_NOT_SUPPORTED ? TIDE_ERR_UNSUPPORTED
                                                  : TIDE_ERR_SYSTEM,
                     "%s: %s (%s)", what, name ? name : "an unknown error", text ? text : "no text");
}
