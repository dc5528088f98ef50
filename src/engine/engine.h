/*
 * engine.h - runs schedules: binds them to addresses once, replays them with argument pointers and counter bases.
 *
 * One engine per tide_groups_create: its arenas, counters, ledger, streams and events. It names no fabric.
 */
#ifndef TIDE_ENGINE_H
#define TIDE_ENGINE_H

#include "fabric/fabric.h"
#include "schedule/schedule.h"

typedef struct engine engine;
typedef struct engine_program engine_program; /* a schedule bound to this engine's addresses */

/* C  Allocates this rank's arenas as tide_plan_bytes promises, exchanges handles, maps the peers it addresses, zeroes
 * counters and inbox. All or none; the same error on all ranks. `plan` must outlive the engine. */
int engine_create(fab_device *device, const tide_plan *plan, engine **out);
/* Waits for nothing: the caller has synced or the device has failed. Arena memory stays while views live. NULL is fine.
 */
void engine_destroy(engine *e);

/* Own address of {region, bank} + offset; for a landing shared by the node, the shared one. */
void *engine_address(const engine *e, int region, uint32_t bank, uint64_t offset);
/* Bytes allocated by this rank, and views that keep arenas alive. A view outlives the engine. */
uint64_t engine_allocated(const engine *e);
typedef struct engine_view engine_view;
engine_view *engine_view_take(engine *e); /* NULL when out of memory */
void engine_view_drop(engine_view *v);    /* any thread, also after engine_destroy */
uint64_t engine_views(const engine *e);

/* Resolves every address; keeps no pointer to `s` after the call. */
int engine_bind(engine *e, const schedule *s, engine_program **out);
void engine_unbind(engine_program *p);

enum engine_part { ENGINE_ALL, ENGINE_READ, ENGINE_NET };
typedef struct engine_args {
    const void *const *args; /* n_args pointers, copied at the call; ENGINE_NET reuses those of its READ */
    uint32_t n_args;
    float alpha;
    int accumulate;
    uint64_t call; /* number of the collective, for messages */
} engine_args;
/* E  Enqueues the part's ops; validates everything before the first op; allocates nothing; never waits for a peer. IN
 * (and GATE for the NET part) is "this point of `stream`". The RS call parity advances with each READ; READ and NET
 * pair up in order. */
int engine_run(engine *e, engine_program *p, int part, const engine_args *args, void *stream);
/* Records EXTERN FREE of a landing slot at this point of `stream`. */
int engine_free_slot(engine *e, uint32_t slot, void *stream);
/* `stream` (host: the caller) waits for the latest READY / READ_DONE / DONE (op_extern_event) of `group`; no-op when
 * none. */
int engine_wait(engine *e, uint32_t group, int event, void *stream);
/* Whether `stream` can be a caller's on this fabric. */
int engine_check_stream(const fab_device *device, void *stream);
/* Own arena memory at this point of `stream`: filled, or copied from the caller's memory, which may be part of it. */
int engine_fill(engine *e, void *dst, uint8_t value, uint64_t bytes, void *stream);
int engine_copy(engine *e, void *dst, const void *src, uint64_t bytes, void *stream);
/* All that was enqueued has completed. */
int engine_sync(engine *e);
/* Ops enqueued so far and digest of the program's ops as executed (equals schedule_digest of its source). */
uint64_t engine_ops(const engine *e);
uint64_t engine_program_digest(const engine_program *p);

/* Failure is a property of the device, shared by its engines. */
int engine_failure(const fab_device *device, tide_failure *out); /* returns out->code */
int engine_abort(fab_device *device);

#endif
