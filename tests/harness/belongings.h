/* belongings.h - what a process holds, so that a test can say that nothing of it is left behind. */
#ifndef HARNESS_BELONGINGS_H
#define HARNESS_BELONGINGS_H

#include <stdint.h>

typedef struct belongings {
    int fds, threads, maps; /* maps: of the library's shared memory */
    uint64_t allocations;   /* of the library */
} belongings;

belongings belongings_now(void);
/* "2 descriptors, 1 threads ..." into `text`; "" when no more is held than before. Looks for up to a second: a joined
 * thread's entry outlives the join for a moment. */
void belongings_left(const belongings *before, char text[128]);

#endif
