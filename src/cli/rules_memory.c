/* rules_memory.c - rules of the driver, its contexts, memory and copies. */
#include <sys/stat.h>

#include "cli/rules_tools.h"

/* ---- rules: the driver, errors, contexts ----------------------------------------------------- */

static enum outcome rule_names(rules *r)
{
    const char *name = NULL, *text = NULL;
    GIVES(r->d->GetErrorName(CU_INVALID_VALUE, &name), CU_OK);
    MUST(name && strcmp(name, "CUDA_ERROR_INVALID_VALUE") == 0);
    GIVES(r->d->GetErrorName(CU_NOT_READY, &name), CU_OK);
    MUST(name && strcmp(name, "CUDA_ERROR_NOT_READY") == 0);
    GIVES(r->d->GetErrorString(CU_OUT_OF_MEMORY, &text), CU_OK);
    MUST(text && *text);
    REFUSED(r->d->GetErrorName(987654, &name));
    return OK;
}

static enum outcome rule_device(rules *r)
{
    int value = -1;
    cu_dev dev;
    REFUSED(r->d->DeviceGet(&dev, 1000));
    GIVES(r->d->DeviceGetAttribute(&value, CU_ATTR_SM_COUNT, r->device[0]), CU_OK);
    MUST(value > 0);
    GIVES(r->d->DeviceGetAttribute(&value, CU_ATTR_VMM, r->device[0]), CU_OK);
    MUST(value == 1);
    GIVES(r->d->DeviceGetAttribute(&value, CU_ATTR_HANDLE_FD, r->device[0]), CU_OK);
    MUST(value == 1);
    GIVES(r->d->DeviceGetAttribute(&value, CU_ATTR_STREAM_WAIT_64, r->device[0]), CU_OK);
    MUST(value == 1);
    return OK;
}

static enum outcome rule_context_needed(rules *r)
{
    cu_context c;
    cu_stream s = NULL;
    cu_event e = NULL;
    cu_module m = NULL;
    cu_ptr p = 0;
    void *h = NULL;
    cu_result result[5];

    GIVES(r->d->CtxPop(&c), CU_OK);
    result[0] = r->d->MemAlloc(&p, 64);
    result[1] = r->d->MemHostAlloc(&h, 64, 0);
    result[2] = r->d->StreamCreate(&s, CU_STREAM_NON_BLOCKING, 0);
    result[3] = r->d->EventCreate(&e, CU_EVENT_DISABLE_TIMING);
    result[4] = r->d->ModuleLoadData(&m, rules_ptx);
    GIVES(r->d->CtxPush(c), CU_OK);
    for (int i = 0; i < 5; i++) {
        snprintf(r->why, sizeof r->why, "call %d gives %d without a context", i, result[i]);
        if (result[i] != CU_INVALID_CONTEXT)
            return FAILED;
    }
    return OK;
}

static enum outcome rule_context_stack(rules *r)
{
    cu_context again = NULL, a = NULL, b = NULL;
    GIVES(r->d->PrimaryRetain(&again, r->device[0]), CU_OK);
    GIVES(r->d->PrimaryRelease(r->device[0]), CU_OK);
    MUST(again == r->context[0]);
    GIVES(r->d->CtxPush(r->context[0]), CU_OK);
    GIVES(r->d->CtxPop(&a), CU_OK);
    MUST(a == r->context[0]);
    GIVES(r->d->CtxPop(&b), CU_OK);
    a = NULL;
    int empty = r->d->CtxPop(&a);
    GIVES(r->d->CtxPush(b), CU_OK);
    MUST(b == r->context[0] && empty == CU_INVALID_CONTEXT);
    return OK;
}

static enum outcome rule_priorities(rules *r)
{
    int least = -100, greatest = 100;
    cu_stream s = NULL;
    GIVES(r->d->CtxGetStreamPriorityRange(&least, &greatest), CU_OK);
    MUST(greatest <= least);
    GIVES(r->d->StreamCreate(&s, CU_STREAM_NON_BLOCKING, greatest), CU_OK);
    rules_keep(r, A_STREAM, (uintptr_t)s, 0);
    MUST(rules_dry(r, s));
    return OK;
}

/* ---- rules: memory --------------------------------------------------------------------------- */

static enum outcome rule_two_mappings(rules *r)
{
    size_t bytes = 0;
    cu_handle h = rules_handle_on(r, 0, &bytes);
    cu_ptr a = rules_mapping(r, h, bytes, 0), b = rules_mapping(r, h, bytes, 0);
    MUST(h && a && b && a != b);
    MUST(rules_put_word(r, a + 64, 7) && rules_get_word(r, b + 64) == 7);
    return OK;
}

static enum outcome rule_handle_released(rules *r)
{
    size_t bytes = 0;
    cu_handle h = rules_handle_on(r, 0, &bytes);
    cu_ptr a = rules_mapping(r, h, bytes, 0);
    MUST(h && a);
    GIVES(r->d->MemRelease(h), CU_OK);
    rules_forget(r, A_HANDLE, h);
    MUST(rules_put_word(r, a, 9) && rules_get_word(r, a) == 9); /* what is mapped stays */
    return OK;
}

static enum outcome rule_export(rules *r)
{
    size_t bytes = 0;
    cu_handle h = rules_handle_on(r, 0, &bytes), again = 0;
    cu_ptr a = rules_mapping(r, h, bytes, 0), b;
    int fd = -1;
    struct stat st;
    MUST(h && a);
    GIVES(r->d->MemExport(&fd, h, CU_HANDLE_FD, 0), CU_OK);
    MUST(fd >= 0 && fstat(fd, &st) == 0);
    rules_keep(r, AN_FD, (uint64_t)fd, 0);
    GIVES(r->d->MemImport(&again, (void *)(intptr_t)fd, CU_HANDLE_FD), CU_OK);
    rules_keep(r, A_HANDLE, again, 0);
    close(fd); /* the handle needs it no more */
    rules_forget(r, AN_FD, (uint64_t)fd);
    b = rules_mapping(r, again, bytes, 0);
    MUST(b && rules_put_word(r, b + 8, 11) && rules_get_word(r, a + 8) == 11);
    GIVES(r->d->MemUnmap(a, bytes), CU_OK);
    rules_forget(r, A_MAPPING, a);
    GIVES(r->d->MemRelease(h), CU_OK);
    rules_forget(r, A_HANDLE, h);
    MUST(rules_get_word(r, b + 8) == 11); /* the importer's reference holds it */
    return OK;
}

static enum outcome rule_import_nonsense(rules *r)
{
    cu_handle h = 0;
    int pipes[2];
    cu_result result;
    MUST(pipe(pipes) == 0);
    result = r->d->MemImport(&h, (void *)(intptr_t)pipes[0], CU_HANDLE_FD);
    close(pipes[0]);
    close(pipes[1]);
    MUST(result != CU_OK);
    return OK;
}

static enum outcome rule_granularity(rules *r)
{
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD,
                          .location = {CU_LOCATION_DEVICE, r->device[0]}};
    size_t bytes = 0;
    cu_handle h = 0;
    GIVES(r->d->MemGetAllocationGranularity(&bytes, &prop, 0), CU_OK);
    MUST(bytes >= 4096 && (bytes & (bytes - 1)) == 0);
    GIVES(r->d->MemCreate(&h, bytes + 512, &prop, 0), CU_INVALID_VALUE);
    GIVES(r->d->MemCreate(&h, 0, &prop, 0), CU_INVALID_VALUE);
    return OK;
}

static enum outcome rule_address_in_use(rules *r)
{
    size_t bytes = 0;
    cu_handle h = rules_handle_on(r, 0, &bytes);
    cu_ptr a = rules_mapping(r, h, bytes, 0);
    MUST(h && a);
    REFUSED(r->d->MemAddressFree(a, bytes));
    REFUSED(r->d->MemMap(a, bytes, 0, h, 0));
    return OK;
}

static enum outcome rule_access_once(rules *r)
{
    size_t bytes = 0;
    cu_handle h = rules_handle_on(r, 0, &bytes);
    cu_ptr a = rules_mapping(r, h, bytes, 0);
    cu_access again = {{CU_LOCATION_DEVICE, r->device[0]}, CU_ACCESS_READ_WRITE};
    MUST(h && a);
    r->note = r->d->MemSetAccess(a, bytes, &again, 1) == CU_OK ? "the same again is fine" : "the same again is refused";
    MUST(rules_put_word(r, a, 5) && rules_get_word(r, a) == 5); /* it stays */
    return OK;
}

static enum outcome rule_free_unknown(rules *r)
{
    cu_ptr p = rules_device_memory(r, 4096);
    MUST(p);
    REFUSED(r->d->MemFree(p + 256));
    GIVES(r->d->MemFree(0), CU_OK);
    return OK;
}

static enum outcome rule_pointers(rules *r)
{
    cu_ptr p = rules_device_memory(r, 4096), q = 0;
    void *h = rules_host_memory(r, 4096);
    unsigned type = 0;
    int ordinal = -1;
    cu_context c = NULL;
    MUST(p && h);
    GIVES(r->d->PointerGetAttribute(&type, CU_POINTER_MEMORY_TYPE, p + 100), CU_OK);
    MUST(type == CU_MEMORY_DEVICE);
    GIVES(r->d->PointerGetAttribute(&ordinal, CU_POINTER_DEVICE_ORDINAL, p), CU_OK);
    MUST(ordinal == r->device[0]);
    GIVES(r->d->PointerGetAttribute(&c, CU_POINTER_CONTEXT, p), CU_OK);
    MUST(c == r->context[0]);
    GIVES(r->d->MemHostGetDevicePointer(&q, h, 0), CU_OK);
    MUST(q == (cu_ptr)(uintptr_t)h);
    GIVES(r->d->PointerGetAttribute(&type, CU_POINTER_MEMORY_TYPE, q), CU_OK);
    MUST(type == 1);
    GIVES(r->d->PointerGetAttribute(&type, CU_POINTER_MEMORY_TYPE, (cu_ptr)(uintptr_t)&type), CU_INVALID_VALUE);
    return OK;
}

/* ---- rules: copies --------------------------------------------------------------------------- */

static void pattern(unsigned char *at, size_t n, unsigned seed)
{
    for (size_t i = 0; i < n; i++)
        at[i] = (unsigned char)(i * 7 + i / 251 + seed);
}

static enum outcome rule_copy(rules *r)
{
    enum { N = 5000 };
    unsigned char in[N], out[N];
    cu_ptr a = rules_device_memory(r, N), b = rules_device_memory(r, N);
    cu_stream s = rules_stream(r);
    pattern(in, N, 1);
    MUST(a && b && s && rules_put(r, a, in, N));
    GIVES(r->d->MemsetD8Async(b, 0x11, N, s), CU_OK);
    GIVES(r->d->MemcpyAsync(b + 3, a + 1, 4001, s), CU_OK);
    GIVES(r->d->MemcpyAsync(b, a, 0, s), CU_OK);
    MUST(rules_dry(r, s) && rules_get(r, out, b, N));
    MUST(out[2] == 0x11 && out[4004] == 0x11 && memcmp(out + 3, in + 1, 4001) == 0);
    return OK;
}

static enum outcome rule_copy_2d(rules *r)
{
    enum { N = 8192, WIDTH = 37, ROWS = 41, FROM = 101, TO = 53 };
    unsigned char in[N], out[N];
    cu_ptr a = rules_device_memory(r, N), b = rules_device_memory(r, N);
    cu_stream s = rules_stream(r);
    cu_copy2d c = {.src_type = CU_MEMORY_DEVICE, .src_device = a + 1, .src_pitch = FROM, .dst_type = CU_MEMORY_DEVICE,
                   .dst_device = b + 7, .dst_pitch = TO, .width = WIDTH, .height = ROWS};
    pattern(in, N, 2);
    MUST(a && b && s && rules_put(r, a, in, N));
    GIVES(r->d->MemsetD8Async(b, 0x22, N, s), CU_OK);
    GIVES(r->d->Memcpy2DAsync(&c, s), CU_OK);
    GIVES(r->d->MemsetD2D8Async(b + 5000, 61, 0x33, 13, 5, s), CU_OK);
    MUST(rules_dry(r, s) && rules_get(r, out, b, N));
    for (int i = 0; i < ROWS; i++) {
        MUST(memcmp(out + 7 + i * TO, in + 1 + i * FROM, WIDTH) == 0);
        MUST(out[7 + i * TO + WIDTH] == 0x22);
    }
    for (int i = 0; i < 5; i++)
        MUST(out[5000 + i * 61] == 0x33 && out[5012 + i * 61] == 0x33 && out[5013 + i * 61] == 0x22);
    return OK;
}

static enum outcome rule_pitch(rules *r)
{
    cu_ptr a = rules_device_memory(r, 8192);
    cu_stream s = rules_stream(r);
    cu_copy2d c = {.src_type = CU_MEMORY_DEVICE, .src_device = a, .src_pitch = 16, .dst_type = CU_MEMORY_DEVICE,
                   .dst_device = a + 4096, .dst_pitch = 64, .width = 32, .height = 2};
    MUST(a && s);
    GIVES(r->d->Memcpy2DAsync(&c, s), CU_INVALID_VALUE); /* rows that overlap */
    return OK;
}

/* Rows that are equally far apart, each in an allocation of its own. */
static enum outcome rule_copy_2d_apart(rules *r)
{
    enum { ROWS = 3, BYTES = 4 << 20 };
    cu_ptr from[ROWS], to = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    cu_copy2d c = {.src_type = CU_MEMORY_DEVICE, .dst_type = CU_MEMORY_DEVICE, .dst_device = to, .dst_pitch = 16,
                   .width = 8, .height = ROWS};
    cu_result result;
    uint64_t words[2 * ROWS];

    for (int i = 0; i < ROWS; i++)
        MUST((from[i] = rules_device_memory(r, BYTES)) && rules_put_word(r, from[i], (uint64_t)i + 1));
    NEEDS(from[1] - from[0] == from[2] - from[1] && from[1] > from[0] && from[1] - from[0] < INT32_MAX,
          "allocations are not equally far apart");
    c.src_device = from[0];
    c.src_pitch = from[1] - from[0];
    result = r->d->Memcpy2DAsync(&c, s);
    r->note = result == CU_OK ? "copied" : "refused";
    MUST(to && rules_dry(r, s));
    MUST(rules_get(r, words, to, sizeof words));
    MUST(result != CU_OK || (words[0] == 1 && words[2] == 2 && words[4] == 3));
    return OK;
}

static enum outcome rule_batch(rules *r)
{
    enum { COPIES = 40, EACH = 300 };
    unsigned char in[COPIES * EACH], out[COPIES * EACH];
    cu_ptr a = rules_device_memory(r, sizeof in), b = rules_device_memory(r, sizeof in), to[COPIES], from[COPIES];
    size_t bytes[COPIES], first[2] = {0, 10};
    cu_copy_attributes how[2] = {{.src_access_order = CU_ORDER_STREAM},
                                 {.src_access_order = CU_ORDER_STREAM, .flags = CU_COPY_PREFER_OVERLAP}};
    cu_stream s = rules_stream(r);
    NEEDS(r->d->MemcpyBatchAsync, "no cuMemcpyBatchAsync");
    pattern(in, sizeof in, 3);
    MUST(a && b && s && rules_put(r, a, in, sizeof in));
    for (int i = 0; i < COPIES; i++) {
        to[i] = b + (cu_ptr)(COPIES - 1 - i) * EACH;
        from[i] = a + (cu_ptr)i * EACH;
        bytes[i] = EACH - (size_t)i;
    }
    GIVES(r->d->MemsetD8Async(b, 0x44, sizeof in, s), CU_OK);
    GIVES(r->d->MemcpyBatchAsync(to, from, bytes, COPIES, how, first, 2, s), CU_OK);
    memset(to, 0, sizeof to); /* read at the call */
    memset(from, 0, sizeof from);
    MUST(rules_dry(r, s) && rules_get(r, out, b, sizeof out));
    for (int i = 0; i < COPIES; i++) {
        const unsigned char *at = out + (COPIES - 1 - i) * EACH;
        MUST(memcmp(at, in + i * EACH, EACH - (size_t)i) == 0 && (i == 0 || at[EACH - i] == 0x44));
    }
    return OK;
}

static enum outcome rule_batch_refused(rules *r)
{
    cu_ptr a = rules_device_memory(r, 4096), to[2] = {a, a + 512}, from[2] = {a + 1024, a + 2048};
    size_t bytes[2] = {64, 64}, first[2] = {0, 0};
    cu_copy_attributes how[3] = {{.src_access_order = CU_ORDER_STREAM}, {.src_access_order = CU_ORDER_STREAM}};
    cu_stream s = rules_stream(r);
    NEEDS(r->d->MemcpyBatchAsync, "no cuMemcpyBatchAsync");
    MUST(a && s);
    GIVES(r->d->MemcpyBatchAsync(to, from, bytes, 2, how, first, 2, s), CU_INVALID_VALUE); /* not ascending */
    first[0] = 1;
    GIVES(r->d->MemcpyBatchAsync(to, from, bytes, 2, how, first, 1, s), CU_INVALID_VALUE); /* not from 0 */
    first[0] = 0;
    how[0].src_access_order = 0;
    GIVES(r->d->MemcpyBatchAsync(to, from, bytes, 2, how, first, 1, s), CU_INVALID_VALUE);
    how[0].src_access_order = CU_ORDER_STREAM;
    REFUSED(r->d->MemcpyBatchAsync(to, from, bytes, 2, how, first, 1, NULL)); /* the legacy stream */
    return OK;
}

const rule rules_of_memory[] = {
    {"errors have names and texts", rule_names},
    {"attributes: memory mappings, descriptors, 64-bit waits", rule_device},
    {"most calls need a current context", rule_context_needed},
    {"one primary context a device; push and pop nest", rule_context_stack},
    {"greater priorities have lower numbers", rule_priorities},
    {"two mappings show one memory", rule_two_mappings},
    {"a mapping outlives its handle", rule_handle_released},
    {"a handle travels as a file descriptor and holds the memory", rule_export},
    {"importing what is no handle is refused", rule_import_nonsense},
    {"memory comes in multiples of the granularity", rule_granularity},
    {"addresses in use are neither freed nor mapped again", rule_address_in_use},
    {"access that a device has already", rule_access_once},
    {"freeing what was not allocated is refused; 0 is fine", rule_free_unknown},
    {"pointers know their memory, device and context; host memory has one address", rule_pointers},
    {"copies and fills of any alignment", rule_copy},
    {"2-D copies and fills of odd widths and pitches", rule_copy_2d},
    {"2-D copies: pitch at least the width", rule_pitch},
    {"2-D copies whose rows are in several allocations", rule_copy_2d_apart},
    {"a batch of copies: all of them; its arrays are read at the call", rule_batch},
    {"a batch of copies: wrong attributes and the legacy stream are refused", rule_batch_refused},
    {NULL, NULL},
};
