/* wrap.c - stands between the library and the calls by which it gets memory, descriptors and threads (ld --wrap). */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fault.h"
#include "plan/plan.h"

static _Atomic int armed = -1;
static _Atomic int64_t left;
static _Atomic bool fired;
static int (*strike)(void);
static _Thread_local bool plan_differs; /* plans are made in their caller's thread */

void wrap_arm(int call, int64_t at, int (*fn)(void))
{
    strike = fn;
    left = at;
    fired = false;
    armed = call;
}

bool wrap_disarm(void)
{
    armed = -1;
    return fired;
}

void wrap_plan(bool differ)
{
    plan_differs = differ;
}

/* An errno when this call is to fail. */
static int struck(int call)
{
    if (armed != call || atomic_fetch_sub(&left, 1) != 1)
        return 0;
    fired = true;
    return strike();
}

/* Prototype, result on failure, forwarding. */
#define WRAP(type, name, call, parameters, arguments, bad)                                                             \
    type __real_##name parameters;                                                                                     \
    type __wrap_##name parameters;                                                                                     \
    type __wrap_##name parameters                                                                                      \
    {                                                                                                                  \
        int error = struck(call);                                                                                      \
        if (error) {                                                                                                   \
            errno = error;                                                                                             \
            return bad;                                                                                                \
        }                                                                                                              \
        return __real_##name arguments;                                                                                \
    }

WRAP(int, memfd_create, CALL_MEMFD, (const char *name, unsigned flags), (name, flags), -1)
WRAP(int, fallocate, CALL_FALLOCATE, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n), -1)
WRAP(void *, mmap, CALL_MMAP, (void *at, size_t n, int prot, int flags, int fd, off_t offset),
     (at, n, prot, flags, fd, offset), MAP_FAILED)
WRAP(int, socket, CALL_SOCKET, (int domain, int type, int protocol), (domain, type, protocol), -1)
WRAP(int, bind, CALL_BIND, (int fd, const struct sockaddr *a, socklen_t n), (fd, a, n), -1)
WRAP(int, listen, CALL_LISTEN, (int fd, int n), (fd, n), -1)
WRAP(int, connect, CALL_CONNECT, (int fd, const struct sockaddr *a, socklen_t n), (fd, a, n), -1)
WRAP(ssize_t, sendmsg, CALL_SENDMSG, (int fd, const struct msghdr *m, int flags), (fd, m, flags), -1)
WRAP(int, accept4, CALL_ACCEPT, (int fd, struct sockaddr *a, socklen_t *n, int flags), (fd, a, n, flags), -1)
WRAP(ssize_t, recvmsg, CALL_RECVMSG, (int fd, struct msghdr *m, int flags), (fd, m, flags), -1)
WRAP(int, eventfd, CALL_EVENTFD, (unsigned value, int flags), (value, flags), -1)

int __real_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *argument);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *argument);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*fn)(void *), void *argument)
{
    int error = struck(CALL_THREAD);
    return error ? error : __real_pthread_create(t, a, fn, argument);
}

/* Futexes come through here as well. */
long __real_syscall(long number, ...);
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f);
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f)
{
    int error = number == SYS_pidfd_open ? struck(CALL_PIDFD) : 0;
    if (error) {
        errno = error;
        return -1;
    }
    return __real_syscall(number, a, b, c, d, e, f);
}

int __real_tide_plan_create(const tide_topology *topology, const tide_group_desc *groups, uint32_t n_groups,
                            const tide_options *options, tide_plan **out);
int __wrap_tide_plan_create(const tide_topology *topology, const tide_group_desc *groups, uint32_t n_groups,
                            const tide_options *options, tide_plan **out);
int __wrap_tide_plan_create(const tide_topology *topology, const tide_group_desc *groups, uint32_t n_groups,
                            const tide_options *options, tide_plan **out)
{
    int status = __real_tide_plan_create(topology, groups, n_groups, options, out);
    if (status == TIDE_OK && plan_differs)
        (*out)->digest ^= 1;
    return status;
}
