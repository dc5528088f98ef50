/*
 * fake_multicast.c - multicast objects: one address, and memory of several devices behind it. What is written there comes to
 * all of them; nothing reads through it but a kernel that adds.
 *
 * The team is in shared memory, so that another process can import it, join and bind. Memory of another process is found
 * through that process' descriptors, as long as it lives. None of these rules is asked of a real driver: a multicast object
 * is made nowhere but where a user wants one.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_internal.h"

static const uint64_t team_magic = 0x66616b65636d6361;

/* One page of a memfd. */
typedef struct seat {
    int pid, fd; /* whose descriptor of the memory; pid 0: nothing is bound */
    uint64_t offset, memory_offset, bytes;
    uint64_t inode;
} seat;
struct fake_team {
    uint64_t magic, bytes;
    unsigned n_devices;
    uint32_t added; /* a bit a device */
    seat seats[FAKE_MAX_DEVICES];
};

/* Memory of a team as this process writes it. */
typedef struct fake_view {
    struct fake_view *next;
    uint64_t inode, bytes;
    char *at;
} fake_view;
static fake_view *views;

/* What this process has bound. */
typedef struct binding {
    struct binding *next;
    fake_memory *team, *memory;
    int device;
} binding;
static binding *bindings;

static uint64_t granularity(void) { return fake.options.multicast_granularity; }

int fake_multicast_bindings(void)
{
    int n = 0;
    for (binding *b = bindings; b; b = b->next)
        n++;
    return n;
}

void fake_multicast_clear(void)
{
    while (bindings) {
        binding *b = bindings;
        bindings = b->next;
        fake_memory_drop(b->memory);
        fake_memory_drop(b->team);
        free(b);
    }
    while (views) {
        fake_view *v = views;
        views = v->next;
        munmap(v->at, v->bytes);
        free(v);
    }
}

fake_memory *fake_team_open(int fd, uint64_t inode)
{
    struct fake_team *team = mmap(NULL, sizeof *team, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    fake_memory *m;

    if (team == MAP_FAILED)
        return NULL;
    if (team->magic != team_magic) {
        munmap(team, sizeof *team);
        return NULL;
    }
    m = calloc(1, sizeof *m);
    *m = (fake_memory){0, fcntl(fd, F_DUPFD_CLOEXEC, 0), -1, team->bytes, inode, team};
    return m;
}

void fake_team_close(struct fake_team *team)
{
    munmap(team, sizeof *team);
}

/* A refusal that this project must not run into. */
static cu_result forbidden(const char *what, const char *why)
{
    fake_complain("%s: %s", what, why);
    return CU_INVALID_VALUE;
}

static bool good_prop(const cu_multicast_prop *p)
{
    return p && p->n_devices >= 1 && p->n_devices <= (unsigned)fake.options.devices && p->handle_types == CU_HANDLE_FD &&
           p->flags == 0;
}

cu_result fake_MulticastGetGranularity(size_t *bytes, const cu_multicast_prop *prop, int option)
{
    cu_result r = fake_enter(FAKE_MulticastGetGranularity, 0);
    if (r == CU_OK && !fake.options.multicast)
        r = CU_NOT_SUPPORTED;
    if (r == CU_OK && (!good_prop(prop) || option < 0 || option > 1))
        r = CU_INVALID_VALUE;
    if (r == CU_OK)
        *bytes = option ? 4 * granularity() : granularity();
    return fake_leave(r);
}

cu_result fake_MulticastCreate(cu_handle *handle, const cu_multicast_prop *prop)
{
    cu_result r = fake_enter(FAKE_MulticastCreate, ALLOCATES);

    fake.multicasts++;
    if (r == CU_OK && !fake.options.multicast)
        r = CU_NOT_SUPPORTED;
    if (r == CU_OK && (!good_prop(prop) || prop->size == 0 || prop->size % granularity()))
        r = CU_INVALID_VALUE;
    if (r == CU_OK) {
        struct fake_team team = {.magic = team_magic, .bytes = prop->size, .n_devices = prop->n_devices};
        int fd = memfd_create("fake-multicast", MFD_CLOEXEC);
        struct stat st;
        fake_memory *m = NULL;
        if (fd >= 0 && write(fd, &team, sizeof team) == sizeof team && fstat(fd, &st) == 0)
            m = fake_team_open(fd, st.st_ino);
        if (fd >= 0)
            close(fd);
        if (m)
            *handle = fake_handle_add(m);
        else
            r = CU_OUT_OF_MEMORY;
    }
    return fake_leave(r);
}

/* NULL unless the handle is a team's. */
static fake_memory *team_of(cu_handle handle)
{
    fake_memory *m = fake_handle_memory(handle);
    return m && m->team ? m : NULL;
}

static bool complete(const struct fake_team *team)
{
    return (unsigned)__builtin_popcount(__atomic_load_n(&team->added, __ATOMIC_ACQUIRE)) == team->n_devices;
}

cu_result fake_MulticastAddDevice(cu_handle handle, cu_dev device)
{
    cu_result r = fake_enter(FAKE_MulticastAddDevice, 0);
    fake_memory *m = team_of(handle);
    if (r == CU_OK && (!m || device < 0 || device >= fake.options.devices))
        r = CU_INVALID_VALUE;
    if (r == CU_OK && (complete(m->team) || m->team->added >> device & 1))
        r = forbidden("cuMulticastAddDevice", "a device that is in the team, or one too many");
    if (r == CU_OK)
        __atomic_fetch_or(&m->team->added, 1u << device, __ATOMIC_ACQ_REL);
    return fake_leave(r);
}

cu_result fake_MulticastBindMem(cu_handle handle, size_t offset, cu_handle memory, size_t memory_offset, size_t bytes,
                                unsigned long long flags)
{
    cu_result r = fake_enter(FAKE_MulticastBindMem, ALLOCATES);
    fake_memory *t = team_of(handle), *m = fake_handle_memory(memory);
    uint64_t g = granularity();

    if (r == CU_OK && (!t || !m || m->team || flags || bytes == 0 || offset % g || memory_offset % g || bytes % g ||
                       offset > t->bytes || bytes > t->bytes - offset || memory_offset > m->bytes ||
                       bytes > m->bytes - memory_offset || !(t->team->added >> m->device & 1)))
        r = CU_INVALID_VALUE;
    if (r == CU_OK && !complete(t->team)) /* the driver waits until they are, for ever if one never comes */
        r = forbidden("cuMulticastBindMem", "not all devices are in the team");
    if (r == CU_OK && t->team->seats[m->device].pid)
        r = forbidden("cuMulticastBindMem", "a device whose memory is bound already");
    if (r == CU_OK) {
        binding *b = calloc(1, sizeof *b);
        seat *s = &t->team->seats[m->device];
        *b = (binding){bindings, t, m, m->device};
        bindings = b;
        t->refs++;
        m->refs++;
        *s = (seat){0, m->fd, offset, memory_offset, bytes, m->inode};
        __atomic_store_n(&s->pid, (int)getpid(), __ATOMIC_RELEASE);
    }
    return fake_leave(r);
}

cu_result fake_MulticastUnbind(cu_handle handle, cu_dev device, size_t offset, size_t bytes)
{
    cu_result r = fake_enter(FAKE_MulticastUnbind, RELEASES);
    fake_memory *t = team_of(handle);
    binding **at = &bindings, *b;
    seat *s = NULL;

    while (*at && ((*at)->team != t || (*at)->device != device))
        at = &(*at)->next;
    b = *at;
    if (r == CU_OK && (!t || device < 0 || device >= fake.options.devices))
        r = CU_INVALID_VALUE;
    if (r == CU_OK)
        s = &t->team->seats[device];
    if (r == CU_OK && (!b || s->offset != offset || s->bytes != bytes))
        r = forbidden("cuMulticastUnbind", "what was not bound so");
    if (r == CU_OK && fake_multicast_used(t, device))
        fake_complain("cuMulticastUnbind: device %d: its own mapping is there, or somebody's work on one", device);
    if (r == CU_OK) {
        __atomic_store_n(&s->pid, 0, __ATOMIC_RELEASE);
        *at = b->next;
        fake_memory_drop(b->memory);
        fake_memory_drop(t);
        free(b);
    }
    return fake_leave(r);
}

cu_result fake_multicast_map(const fake_memory *t, uint64_t bytes)
{
    if (bytes % granularity())
        return CU_INVALID_VALUE;
    return complete(t->team) ? CU_OK : forbidden("cuMemMap", "a multicast object whose team is not complete");
}

bool fake_multicast_member(const fake_memory *t, int device)
{
    return t->team->added >> device & 1;
}

void fake_multicast_released(const fake_memory *m)
{
    uint32_t bound = 0;
    for (binding *b = bindings; b; b = b->next)
        bound += b->team == m || b->memory == m;
    if (bound && m->refs == bound + 1)
        fake_complain("cuMemRelease: the last of %s", m->team ? "a multicast object behind which memory is bound"
                                                              : "memory that is bound to a multicast object");
}

/* Memory that is bound, as it can be written here; NULL: that process is gone, or nothing is bound. */
static char *view_of(const seat *s)
{
    int pid = __atomic_load_n(&s->pid, __ATOMIC_ACQUIRE), fd;
    char path[64];
    struct stat st;
    fake_view *v = views;

    if (!pid)
        return NULL;
    while (v && v->inode != s->inode)
        v = v->next;
    if (v)
        return v->at;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, s->fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) == 0 && st.st_ino == s->inode) {
        void *at = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at != MAP_FAILED) {
            v = calloc(1, sizeof *v);
            *v = (fake_view){views, s->inode, (uint64_t)st.st_size, at};
            views = v;
        }
    }
    close(fd);
    return v ? v->at : NULL;
}

int fake_multicast_memories(uintptr_t address, uint64_t bytes, int device, uintptr_t memories[FAKE_MAX_DEVICES])
{
    fake_span *span = fake_find_multicast(address, bytes, device);
    int n = 0;

    for (int d = 0; span && d < FAKE_MAX_DEVICES; d++) {
        const seat *s = &span->memory->team->seats[d];
        uint64_t at = address - span->base;
        char *view = span->memory->team->added >> d & 1 ? view_of(s) : NULL;
        if (view && at >= s->offset && at - s->offset <= s->bytes && bytes <= s->bytes - (at - s->offset))
            memories[n++] = (uintptr_t)view + s->memory_offset + (at - s->offset);
    }
    return n;
}

bool fake_multicast_bound(const fake_span *span)
{
    for (int d = 0; d < FAKE_MAX_DEVICES; d++)
        if (span->memory->team->added >> d & 1 && !span->memory->team->seats[d].pid)
            return false;
    return true;
}
