/* fake_memory.c - the fake driver's memory: handles, mappings, allocations; what an address may be used for. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_internal.h"

enum { ALREADY_MAPPED = 208 };
enum { PAGE = 4096, GARBAGE = 0xa5 }; /* new memory holds anything but zeros */

/* The page behind the memory of a memfd. */
typedef struct trailer { uint64_t magic, bytes; int device; } trailer;
static const uint64_t trailer_magic = 0x66616b6563756d6d;

/* Number of spans that begin at or before the address. */
static size_t spans_up_to(uintptr_t base)
{
    size_t lo = 0, hi = fake.n_spans;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (fake.spans[mid]->base <= base)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static fake_span *find(uintptr_t base, uint64_t bytes, int device, bool multicast)
{
    size_t n = spans_up_to(base);
    fake_span *s = n ? fake.spans[n - 1] : NULL;
    if (!s || base - s->base > s->bytes || bytes > s->bytes - (base - s->base) || (s->kind == SPAN_MULTICAST) != multicast)
        return NULL;
    return s->access >> device & 1 ? s : NULL;
}

fake_span *fake_find(uintptr_t base, uint64_t bytes, int device) { return find(base, bytes, device, false); }
fake_span *fake_find_multicast(uintptr_t base, uint64_t bytes, int device) { return find(base, bytes, device, true); }

int fake_memory_count(enum fake_span_kind kind)
{
    int n = 0;
    for (size_t i = 0; i < fake.n_spans; i++)
        n += fake.spans[i]->kind == kind;
    return n;
}

static fake_span *add_span(enum fake_span_kind kind, void *base, uint64_t bytes, int device, uint32_t access)
{
    fake_span *s = calloc(1, sizeof *s);
    size_t at = spans_up_to((uintptr_t)base);
    *s = (fake_span){kind, (uintptr_t)base, bytes, device, access, NULL};
    if (fake.n_spans == fake.cap_spans) {
        fake.cap_spans = fake.cap_spans ? 2 * fake.cap_spans : 64;
        fake.spans = realloc(fake.spans, fake.cap_spans * sizeof(fake_span *));
    }
    memmove(fake.spans + at + 1, fake.spans + at, (fake.n_spans++ - at) * sizeof(fake_span *));
    return fake.spans[at] = s;
}

void fake_memory_drop(fake_memory *m)
{
    if (--m->refs == 0) {
        if (m->team)
            fake_team_close(m->team);
        close(m->fd);
        free(m);
    }
}

static void drop_span(fake_span *s)
{
    size_t at = spans_up_to(s->base);
    memmove(fake.spans + at - 1, fake.spans + at, (fake.n_spans-- - at) * sizeof(fake_span *));
    if (s->memory) {
        mmap((void *)s->base, s->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        fake_memory_drop(s->memory);
    } else {
        free((void *)s->base);
    }
    free(s);
}

void fake_memory_clear(void)
{
    while (fake.n_spans)
        drop_span(fake.spans[fake.n_spans - 1]);
    free(fake.spans);
    fake.spans = NULL;
    fake.cap_spans = 0;
    while (fake.reservations) {
        fake_reservation *r = fake.reservations;
        fake.reservations = r->next;
        munmap((void *)r->base, r->bytes);
        free(r);
    }
    fake_multicast_clear();
    while (fake.handles) {
        fake_handle *h = fake.handles;
        fake.handles = h->next;
        fake_memory_drop(h->memory);
        free(h);
    }
}

/* ---- physical memory ------------------------------------------------------------------------- */

static bool good_prop(const cu_alloc_prop *p)
{
    return p && p->type == CU_ALLOC_PINNED && p->location.type == CU_LOCATION_DEVICE && p->location.id >= 0 &&
           p->location.id < fake.options.devices;
}

cu_result fake_MemGetAllocationGranularity(size_t *bytes, const cu_alloc_prop *prop, int option)
{
    cu_result r = fake_enter(FAKE_MemGetAllocationGranularity, 0);
    if (r == CU_OK && (!good_prop(prop) || option < 0 || option > 1))
        r = CU_INVALID_VALUE;
    if (r == CU_OK)
        *bytes = fake.options.granularity;
    return fake_leave(r);
}

cu_handle fake_handle_add(fake_memory *m)
{
    fake_handle *h = calloc(1, sizeof *h);
    m->refs++;
    h->memory = m;
    h->number = (cu_handle)fake.next_handle++ << 8 | 0x48;
    h->next = fake.handles;
    fake.handles = h;
    return h->number;
}

static fake_handle **find_handle(cu_handle number)
{
    fake_handle **at = &fake.handles;
    while (*at && (*at)->number != number)
        at = &(*at)->next;
    return at;
}

fake_memory *fake_handle_memory(cu_handle handle)
{
    fake_handle *h = *find_handle(handle);
    return h ? h->memory : NULL;
}

cu_result fake_MemCreate(cu_handle *handle, size_t bytes, const cu_alloc_prop *prop, unsigned long long flags)
{
    cu_result r = fake_enter(FAKE_MemCreate, ALLOCATES);
    if (r == CU_OK && (!good_prop(prop) || flags || bytes == 0 || bytes % fake.options.granularity))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        fake_memory *m = calloc(1, sizeof *m);
        struct stat st;
        void *at;
        trailer t = {trailer_magic, bytes, prop->location.id};
        m->fd = memfd_create("fake-cuda", MFD_CLOEXEC);
        m->bytes = bytes;
        m->device = prop->location.id;
        if (m->fd < 0 || ftruncate(m->fd, (off_t)bytes + PAGE) != 0 || fstat(m->fd, &st) != 0 ||
            pwrite(m->fd, &t, sizeof t, (off_t)bytes) != sizeof t ||
            (at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0)) == MAP_FAILED) {
            if (m->fd >= 0)
                close(m->fd);
            free(m);
            r = CU_OUT_OF_MEMORY;
        } else {
            memset(at, GARBAGE, bytes);
            munmap(at, bytes);
            m->inode = st.st_ino;
            *handle = fake_handle_add(m);
        }
    }
    return fake_leave(r);
}

cu_result fake_MemRelease(cu_handle handle)
{
    cu_result r = fake_enter(FAKE_MemRelease, RELEASES);
    fake_handle **at = find_handle(handle), *h = *at;
    if (r == CU_OK && !h)
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        *at = h->next;
        fake_multicast_released(h->memory);
        fake_memory_drop(h->memory);
        free(h);
    }
    return fake_leave(r);
}

cu_result fake_MemExport(void *fd, cu_handle handle, int type, unsigned long long flags)
{
    cu_result r = fake_enter(FAKE_MemExport, 0);
    fake_handle *h = *find_handle(handle);
    if (r == CU_OK && (!h || type != CU_HANDLE_FD || flags))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        int copy = fcntl(h->memory->fd, F_DUPFD_CLOEXEC, 0);
        if (copy < 0)
            r = CU_OUT_OF_MEMORY;
        else
            memcpy(fd, &copy, sizeof copy);
    }
    return fake_leave(r);
}

cu_result fake_MemImport(cu_handle *handle, void *fd, int type)
{
    cu_result r = fake_enter(FAKE_MemImport, ALLOCATES);
    int own = (int)(intptr_t)fd;
    fake_memory *m = NULL;
    struct stat st;
    trailer t;

    if (r == CU_OK && (type != CU_HANDLE_FD || fstat(own, &st) != 0))
        r = CU_INVALID_VALUE;
    for (fake_handle *h = fake.handles; r == CU_OK && h && !m; h = h->next)
        m = h->memory->inode == st.st_ino ? h->memory : NULL;
    for (size_t i = 0; r == CU_OK && i < fake.n_spans && !m; i++)
        m = fake.spans[i]->memory && fake.spans[i]->memory->inode == st.st_ino ? fake.spans[i]->memory : NULL;
    if (r == CU_OK && !m) {
        if (st.st_size >= PAGE && pread(own, &t, sizeof t, st.st_size - PAGE) == sizeof t && t.magic == trailer_magic &&
            t.bytes == (uint64_t)st.st_size - PAGE && t.device < fake.options.devices) {
            m = calloc(1, sizeof *m);
            *m = (fake_memory){0, fcntl(own, F_DUPFD_CLOEXEC, 0), t.device, t.bytes, st.st_ino, NULL};
            fake.foreign = true;
        } else if (!(m = fake_team_open(own, st.st_ino))) {
            r = CU_INVALID_VALUE;
        }
    }
    if (r == CU_OK)
        *handle = fake_handle_add(m);
    return fake_leave(r);
}

/* ---- addresses ------------------------------------------------------------------------------- */

cu_result fake_MemAddressReserve(cu_ptr *address, size_t bytes, size_t alignment, cu_ptr hint, unsigned long long flags)
{
    cu_result r = fake_enter(FAKE_MemAddressReserve, ALLOCATES);
    uint64_t align = alignment > fake.options.granularity ? alignment : fake.options.granularity;
    if (r == CU_OK && (bytes == 0 || bytes % fake.options.granularity || flags || hint || (alignment & (alignment - 1))))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        char *at = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), *base;
        if (at == MAP_FAILED) {
            r = CU_OUT_OF_MEMORY;
        } else {
            fake_reservation *v = calloc(1, sizeof *v);
            base = at + (align - (uintptr_t)at % align) % align;
            if (base > at)
                munmap(at, (size_t)(base - at));
            munmap(base + bytes, (size_t)(at + align - base));
            *v = (fake_reservation){fake.reservations, (uintptr_t)base, bytes};
            fake.reservations = v;
            *address = (cu_ptr)(uintptr_t)base;
        }
    }
    return fake_leave(r);
}

static bool mapped(uintptr_t base, uint64_t bytes)
{
    size_t n = spans_up_to(base + bytes - 1);
    return n && fake.spans[n - 1]->base + fake.spans[n - 1]->bytes > base;
}

cu_result fake_MemAddressFree(cu_ptr address, size_t bytes)
{
    cu_result r = fake_enter(FAKE_MemAddressFree, RELEASES);
    fake_reservation **at = &fake.reservations, *v;
    while (*at && (*at)->base != address)
        at = &(*at)->next;
    v = *at;
    if (r == CU_OK && (!v || v->bytes != bytes || mapped(v->base, v->bytes)))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        *at = v->next;
        munmap((void *)v->base, v->bytes);
        free(v);
    }
    return fake_leave(r);
}

cu_result fake_MemMap(cu_ptr address, size_t bytes, size_t offset, cu_handle handle, unsigned long long flags)
{
    cu_result r = fake_enter(FAKE_MemMap, ALLOCATES);
    fake_handle *h = *find_handle(handle);
    fake_reservation *v = fake.reservations;
    while (v && !(address >= v->base && address - v->base <= v->bytes && bytes <= v->bytes - (address - v->base)))
        v = v->next;
    if (r == CU_OK && (!h || !v || offset || flags || bytes == 0 || bytes > h->memory->bytes ||
                       bytes % fake.options.granularity || address % fake.options.granularity || mapped(address, bytes)))
        r = CU_INVALID_VALUE;
    if (r == CU_OK && h->memory->team)
        r = fake_multicast_map(h->memory, bytes);
    if (r == CU_OK && !h->memory->team &&
        mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, h->memory->fd, 0) == MAP_FAILED)
        r = CU_OUT_OF_MEMORY;
    if (r == CU_OK) {
        fake_span *s = add_span(h->memory->team ? SPAN_MULTICAST : SPAN_MAPPING, (void *)(uintptr_t)address, bytes,
                                h->memory->device, 0);
        s->memory = h->memory;
        h->memory->refs++;
    }
    return fake_leave(r);
}

static fake_span *find_span(enum fake_span_kind kind, uintptr_t base)
{
    size_t n = spans_up_to(base);
    return n && fake.spans[n - 1]->base == base && fake.spans[n - 1]->kind == kind ? fake.spans[n - 1] : NULL;
}

static fake_span *find_mapping(uintptr_t base)
{
    fake_span *s = find_span(SPAN_MAPPING, base);
    return s ? s : find_span(SPAN_MULTICAST, base);
}

bool fake_multicast_used(const fake_memory *team, int device)
{
    for (size_t i = 0; i < fake.n_spans; i++) {
        const fake_span *s = fake.spans[i];
        if (s->memory == team && (s->access >> device & 1 || fake_going_away(s->base, s->bytes, "cuMulticastUnbind", false)))
            return true;
    }
    return false;
}

cu_result fake_MemUnmap(cu_ptr address, size_t bytes)
{
    cu_result r = fake_enter(FAKE_MemUnmap, RELEASES);
    fake_span *s = find_mapping(address);
    if (r == CU_OK && (!s || s->bytes != bytes))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        fake_going_away(s->base, s->bytes, "cuMemUnmap", false);
        drop_span(s);
    }
    return fake_leave(r);
}

cu_result fake_MemSetAccess(cu_ptr address, size_t bytes, const cu_access *access, size_t count)
{
    cu_result r = fake_enter(FAKE_MemSetAccess, 0);
    fake_span *s = find_mapping(address);
    if (r == CU_OK && (!s || s->bytes != bytes || !access || !count))
        r = CU_INVALID_VALUE;
    for (size_t i = 0; r == CU_OK && i < count; i++) {
        int d = access[i].location.id;
        if (access[i].location.type != CU_LOCATION_DEVICE || access[i].flags != CU_ACCESS_READ_WRITE || d < 0 ||
            d >= fake.options.devices)
            r = CU_INVALID_VALUE;
        else if (s->kind == SPAN_MULTICAST && !fake_multicast_member(s->memory, d))
            r = CU_INVALID_DEVICE;
        else if (d != s->device && s->kind != SPAN_MULTICAST && fake.options.no_peers)
            r = CU_INVALID_DEVICE;
        else if (s->access >> d & 1)
            r = ALREADY_MAPPED;
        else
            s->access |= 1u << d;
    }
    if (r == CU_OK && s->kind != SPAN_MULTICAST && mprotect((void *)s->base, s->bytes, PROT_READ | PROT_WRITE) != 0)
        r = CU_OUT_OF_MEMORY;
    return fake_leave(r);
}

/* ---- allocations ----------------------------------------------------------------------------- */

cu_result fake_MemAlloc(cu_ptr *address, size_t bytes)
{
    cu_result r = fake_enter(FAKE_MemAlloc, NEEDS_CONTEXT | ALLOCATES);
    void *at = NULL;
    if (r == CU_OK && bytes == 0)
        r = CU_INVALID_VALUE;
    if (r == CU_OK && posix_memalign(&at, 512, bytes) != 0)
        r = CU_OUT_OF_MEMORY;
    if (r == CU_OK) {
        int d = fake_current()->device;
        memset(at, GARBAGE, bytes);
        add_span(SPAN_ALLOCATION, at, bytes, d, 1u << d);
        *address = (cu_ptr)(uintptr_t)at;
    }
    return fake_leave(r);
}

/* Both kinds of freeing wait until the device is idle, as the driver does: a rank that frees while another one on its
 * device waits for something that never comes is stuck. */
cu_result fake_MemFree(cu_ptr address)
{
    cu_result r = fake_enter(FAKE_MemFree, NEEDS_CONTEXT | RELEASES);
    fake_span *s = find_span(SPAN_ALLOCATION, address);
    if (r == CU_OK && address == 0)
        return fake_leave(CU_OK);
    if (r == CU_OK && !s)
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        fake_wait_idle(s->device, s, "cuMemFree");
        drop_span(find_span(SPAN_ALLOCATION, address));
    }
    return fake_leave(r);
}

cu_result fake_MemHostAlloc(void **host, size_t bytes, unsigned flags)
{
    cu_result r = fake_enter(FAKE_MemHostAlloc, NEEDS_CONTEXT | ALLOCATES);
    void *at = NULL;
    if (r == CU_OK && (bytes == 0 || flags & ~(unsigned)(CU_HOSTALLOC_PORTABLE | CU_HOSTALLOC_MAPPED)))
        r = CU_INVALID_VALUE;
    if (r == CU_OK && posix_memalign(&at, 512, bytes) != 0)
        r = CU_OUT_OF_MEMORY;
    if (r == CU_OK) {
        memset(at, GARBAGE, bytes);
        add_span(SPAN_HOST, at, bytes, fake_current()->device, UINT32_MAX);
        *host = at;
    }
    return fake_leave(r);
}

cu_result fake_MemFreeHost(void *host)
{
    cu_result r = fake_enter(FAKE_MemFreeHost, NEEDS_CONTEXT | RELEASES);
    fake_span *s = find_span(SPAN_HOST, (uintptr_t)host);
    if (r == CU_OK && !s)
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        fake_wait_idle(s->device, s, "cuMemFreeHost");
        drop_span(find_span(SPAN_HOST, (uintptr_t)host));
    }
    return fake_leave(r);
}

cu_result fake_MemHostGetDevicePointer(cu_ptr *address, void *host, unsigned flags)
{
    cu_result r = fake_enter(FAKE_MemHostGetDevicePointer, NEEDS_CONTEXT);
    fake_span *s = fake_find((uintptr_t)host, 1, 0);
    if (r == CU_OK && (flags || !s || s->kind != SPAN_HOST))
        r = CU_INVALID_VALUE;
    if (r == CU_OK)
        *address = (cu_ptr)(uintptr_t)host;
    return fake_leave(r);
}

cu_result fake_PointerGetAttribute(void *value, int attribute, cu_ptr address)
{
    cu_result r = fake_enter(FAKE_PointerGetAttribute, 0);
    fake_span *s = NULL;
    for (int d = 0; d < fake.options.devices && !s; d++)
        s = fake_find(address, 1, d);
    if (r == CU_OK && !s)
        r = CU_INVALID_VALUE;
    if (r == CU_OK && attribute == CU_POINTER_CONTEXT) {
        cu_context c = s->kind == SPAN_MAPPING ? NULL : &fake.contexts[s->device];
        memcpy(value, &c, sizeof c);
    } else if (r == CU_OK && attribute == CU_POINTER_MEMORY_TYPE) {
        *(unsigned *)value = s->kind == SPAN_HOST ? 1 : CU_MEMORY_DEVICE;
    } else if (r == CU_OK && attribute == CU_POINTER_DEVICE_ORDINAL) {
        *(int *)value = s->device;
    } else if (r == CU_OK) {
        r = CU_INVALID_VALUE;
    }
    return fake_leave(r);
}
