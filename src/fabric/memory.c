/* memory.c - shared memory under a file descriptor: creation, mappings, exchange; identity of machine and process. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fabric/peers.h"

/* Reserves the pages in steps: a signal that interrupts a step takes only that step back, and a program with a timer
 * still gets to the end. */
static int reserve(int fd, uint64_t bytes)
{
    enum { STEP = 4 << 20 };
    uint64_t machine = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);

    if (bytes > machine) /* the kernel would find out by killing somebody */
        return tide_fail(TIDE_ERR_MEMORY, "shared memory: %llu bytes, expected at most the machine's %llu",
                         (unsigned long long)bytes, (unsigned long long)machine);
    for (uint64_t at = 0; at < bytes;) {
        uint64_t n = tide_min_u64(STEP, bytes - at);
        if (fallocate(fd, 0, (off_t)at, (off_t)n) == 0)
            at += n;
        else if (errno != EINTR)
            return tide_fail(TIDE_ERR_MEMORY, "fallocate of %llu bytes: %s", (unsigned long long)bytes,
                             strerror(errno));
    }
    return TIDE_OK;
}

int fab_memory_create(const char *name, uint64_t bytes, fab_memory **out)
{
    fab_memory *m = tide_calloc(1, sizeof *m);
    int status = TIDE_OK;

    *out = NULL;
    if (!m)
        return TIDE_ERR_MEMORY;
    m->refs = 1;
    m->bytes = tide_align_up(tide_max_u64(bytes, 1), (uint64_t)sysconf(_SC_PAGESIZE));
    m->fd = memfd_create(name, MFD_CLOEXEC);
    /* Pages are reserved here, where running out of them is an error code, and not at first touch, where it is a
     * SIGBUS. */
    if (m->fd < 0)
        status = tide_fail(TIDE_ERR_SYSTEM, "memfd_create: %s", strerror(errno));
    else
        status = reserve(m->fd, m->bytes);
    if (status == TIDE_OK) {
        m->base = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
        if (m->base == MAP_FAILED) {
            m->base = NULL;
            status =
                tide_fail(TIDE_ERR_MEMORY, "mmap of %llu bytes: %s", (unsigned long long)m->bytes, strerror(errno));
        }
    }
    if (status != TIDE_OK) {
        fab_memory_drop(m);
        return status;
    }
    *out = m;
    return TIDE_OK;
}

int fab_memory_private(uint64_t bytes, fab_memory **out)
{
    fab_memory *m = tide_calloc(1, sizeof *m);

    if (!m)
        return TIDE_ERR_MEMORY;
    *m = (fab_memory){.refs = 1, .fd = -1, .bytes = bytes};
    m->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m->base == MAP_FAILED) {
        tide_free(m);
        return tide_fail(TIDE_ERR_MEMORY, "mmap of %llu bytes: %s", (unsigned long long)bytes, strerror(errno));
    }
    *out = m;
    return TIDE_OK;
}

static int map_peer(int fd, fab_memory **out)
{
    fab_memory *m = tide_calloc(1, sizeof *m);
    off_t bytes;

    if (!m)
        return TIDE_ERR_MEMORY;
    m->refs = 1;
    m->fd = -1;
    bytes = lseek(fd, 0, SEEK_END);
    if (bytes > 0) {
        m->base = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        m->bytes = (uint64_t)bytes;
    }
    if (bytes <= 0 || m->base == MAP_FAILED) {
        int why = errno;
        tide_free(m);
        return tide_fail(TIDE_ERR_MEMORY, "mmap of a peer's memory: %s", strerror(why));
    }
    *out = m;
    return TIDE_OK;
}

void fab_memory_drop(fab_memory *m)
{
    if (!m || atomic_fetch_sub(&m->refs, 1) != 1)
        return;
    if (m->base)
        munmap(m->base, m->bytes);
    if (m->fd >= 0)
        close(m->fd);
    tide_free(m);
}

/* What ranks tell each other: the object itself helps only within one process. */
typedef struct identity {
    uint64_t process;
    int64_t pid;
    uint64_t object;
} identity;

int fab_objects_exchange(const fab_open *desc, int status, uint64_t process, void *own, int fd, const uint8_t *peers,
                         void **objects, int *fds, int64_t *pids)
{
    uint32_t n = desc->n_ranks;
    identity id = {process, getpid(), (uint64_t)(uintptr_t)own}, *ids = NULL;
    uint8_t *remote = NULL;

    if (status == TIDE_OK && (!(ids = tide_calloc(n, sizeof *ids)) || !(remote = tide_calloc(n, 1))))
        status = TIDE_ERR_MEMORY;
    status = fab_agree(desc, status);
    if (status == TIDE_OK)
        status = fab_allgather(desc, &id, ids, sizeof id);
    for (uint32_t r = 0; status == TIDE_OK && r < n; r++) {
        bool here = ids[r].pid == id.pid && ids[r].process == id.process && fab_same_machine(desc, r);
        remote[r] = peers[r] && r != desc->rank && !here;
        objects[r] = (peers[r] || r == desc->rank) && here ? (void *)(uintptr_t)ids[r].object : NULL;
        if (pids)
            pids[r] = fab_same_machine(desc, r) ? 0 : -1 - (int64_t)r;
    }
    if (status == TIDE_OK)
        status = fab_handles_exchange(desc, status, remote, fd, fds, pids);
    tide_free(remote);
    tide_free(ids);
    return status;
}

int fab_memory_exchange(const fab_open *desc, int status, uint64_t process, fab_memory *own, const uint8_t *peers,
                        fab_memory **memory, int64_t *pids)
{
    uint32_t n = desc->n_ranks;
    void **here = tide_calloc(n, sizeof *here);
    int *fds = tide_calloc(n, sizeof *fds);

    if (status == TIDE_OK && (!here || !fds))
        status = TIDE_ERR_MEMORY;
    status = fab_objects_exchange(desc, status, process, own, own ? own->fd : -1, peers, here, fds, pids);
    if (status == TIDE_OK) {
        for (uint32_t r = 0; r < n && status == TIDE_OK; r++) {
            if (here[r]) {
                memory[r] = here[r];
                atomic_fetch_add(&memory[r]->refs, 1);
            } else if (fds[r] >= 0) {
                status = map_peer(fds[r], &memory[r]);
            }
        }
        for (uint32_t r = 0; r < n; r++)
            if (fds[r] >= 0)
                close(fds[r]);
        status = fab_agree(desc, status);
    }
    for (uint32_t r = 0; status != TIDE_OK && memory && r < n; r++) {
        fab_memory_drop(memory[r]);
        memory[r] = NULL;
    }
    tide_free(fds);
    tide_free(here);
    return status;
}

uint64_t fab_machine(void)
{
    uint64_t h = TIDE_FNV_BASIS;
    char text[128];
    size_t n = 0;
    struct stat net;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");

    if (f) {
        n = fread(text, 1, sizeof text, f);
        fclose(f);
    }
    if (n == 0 && gethostname(text, sizeof text) == 0)
        n = strnlen(text, sizeof text);
    h = tide_fnv_bytes(h, text, n);
    if (stat("/proc/self/ns/net", &net) == 0) /* handles travel over abstract sockets, which end at the namespace */
        h = tide_fnv_u64(h, net.st_ino);
    return h;
}

static pthread_once_t process_once = PTHREAD_ONCE_INIT;
static uint64_t process_token;
static int process_errno;

static void draw_process_token(void)
{
    if (getrandom(&process_token, sizeof process_token, 0) != (ssize_t)sizeof process_token)
        process_errno = errno ? errno : EIO;
}

int fab_process(uint64_t *token)
{
    pthread_once(&process_once, draw_process_token);
    *token = process_token;
    return process_errno ? tide_fail(TIDE_ERR_SYSTEM, "getrandom: %s", strerror(process_errno)) : TIDE_OK;
}
