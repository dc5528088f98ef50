/*
 * multicast.h - one address behind which the arenas of a node's ranks lie: what is written there comes to all of them, and a
 * kernel can have the switch add what lies there.
 *
 * A multicast object belongs to the switches of the whole machine, and one that is mishandled can take all its GPUs out of
 * service. So none is made unless the knob multicast is 1 (TIDE_AUTO never means it here), every GPU says that it can, and
 * nobody has switched multicast off in the environment.
 */
#ifndef TIDE_CUDA_MULTICAST_H
#define TIDE_CUDA_MULTICAST_H

#include "fabric/cuda/driver.h"

struct cuda_device;
struct cuda_memory;
typedef struct cuda_multicast cuda_multicast;

/* Whether GPU, driver and environment allow it: TIDE_OK, or TIDE_ERR_UNSUPPORTED with the reason. Asks, and creates nothing. */
int cuda_multicast_allowed(const cuda_driver *driver, cu_dev gpu);

/* C  What is to be had of this device's nodes, when who shares a GPU is known. Sets face.multicast, or the reason why not. */
int cuda_multicast_settle(struct cuda_device *d);
/* What an arena's bytes have to be a multiple of besides; 1 where there is none or it is not to be had. Context current. */
uint64_t cuda_multicast_granularity(const struct cuda_device *d, uint64_t bytes);
/* C  All ranks of the device, each with its arena, which is zeroed and unused, and a descriptor of it. All or none: when a step
 * fails anywhere, TIDE_OK and *out NULL on all ranks, and the device does without from now on, with one reason. Other errors
 * are those of the exchange. Context current. */
int cuda_multicast_create(struct cuda_device *d, const struct cuda_memory *own, int fd, cuda_multicast **out);
void *cuda_multicast_base(const cuda_multicast *m);
/* Before the arena's memory goes, and while the device is open. After a failure it waits for the peers to come to rest. NULL
 * is fine. */
void cuda_multicast_drop(cuda_multicast *m);

#endif
