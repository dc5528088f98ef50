/* spent.h - the processor time of this thread: promises about speed hold on a busy machine too. */
#ifndef HARNESS_SPENT_H
#define HARNESS_SPENT_H

#include <stdint.h>
#include <time.h>

static inline int64_t spent_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

#endif
