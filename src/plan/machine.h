/*
 * machine.h - a machine as a table of rates and times: what the solver and the simulation are fed with.
 *
 * A machine file is plain text, a line a key: `nic_rate = 47.5 GB/s   # comment`. Every key stands once; units are checked.
 * Parsing is pure: the text is the caller's, a failure names the line.
 */
#ifndef TIDE_MACHINE_H
#define TIDE_MACHINE_H

#include "plan/plan.h"

enum plan_unit { UNIT_RATE /* B/s */, UNIT_TIME /* s */, UNIT_COUNT, UNIT_FLOPS /* FLOP/s */, UNIT_FLAG /* yes: 1, no: 0 */, UNIT_KINDS };

/* X(key, unit, required, help). Rates and counts are > 0, times >= 0. What is not required is 0 when it is missing: the other side
 * of a comparison, compute, and copies by kernels, which then go as those by copy engines. */
#define PLAN_MACHINE_KEYS(X) \
    X(sms, UNIT_COUNT, true, "streaming multiprocessors of a GPU (host: cores)") \
    X(hbm_rate, UNIT_RATE, true, "memory of a GPU: bytes read and written") \
    X(nvlink_rate, UNIT_RATE, true, "a GPU's port into its node, each direction") \
    X(multicast, UNIT_FLAG, true, "one write reaches all GPUs of a node, one read folds them") \
    X(copy_rate, UNIT_RATE, true, "copy engines of a GPU together, to peers") \
    X(copy_descriptor, UNIT_TIME, true, "engine time of one 2-D copy to a peer, hidden while it moves more bytes") \
    X(local_copy_rate, UNIT_RATE, true, "copy engines of a GPU together, to itself: bytes copied") \
    X(local_copy_descriptor, UNIT_TIME, true, "engine time of one 2-D copy within a GPU") \
    X(copy_cta_rate, UNIT_RATE, false, "copy within a GPU by a kernel, of one CTA: bytes copied") \
    X(sum_cta_rate, UNIT_RATE, true, "Level 1 sum of one CTA alone: bytes read and written (the solver's)") \
    X(sum_cta_rate_in_situ, UNIT_RATE, true, "the same while pushes and puts run (the simulation's)") \
    X(land_cta_rate, UNIT_RATE, true, "landing of one CTA: bytes of output") \
    X(land_rate_cap, UNIT_RATE, true, "landing of any number of CTAs: bytes of output") \
    X(nic_rate, UNIT_RATE, true, "one rail, each direction") \
    X(nic_latency, UNIT_TIME, true, "from a put's last byte, or a signal, to the waiter on another node") \
    X(round_wait, UNIT_TIME, true, "what a round costs in waits (the solver's)") \
    X(device_op, UNIT_TIME, true, "start of an operation on a stream") \
    X(signal_latency, UNIT_TIME, true, "from a local signal to the waiter on the node") \
    X(host_op, UNIT_TIME, true, "host time to enqueue an operation") \
    X(host_item, UNIT_TIME, true, "host time to enqueue one of its copies, puts or posts") \
    X(pack_rate, UNIT_RATE, false, "stock FSDP2's layout copies: bytes read and written") \
    X(ring_rate, UNIT_RATE, false, "ring collectives inside a node: bytes into a GPU") \
    X(ring_ctas, UNIT_COUNT, false, "CTAs of a ring collective") \
    X(flops, UNIT_FLOPS, false, "matrix products of a GPU with nothing beside them")

#define PLAN_MACHINE_NAME 64
#define PLAN_MACHINE_BYTES 65535 /* of a file, at most */
typedef struct plan_machine {
    char name[PLAN_MACHINE_NAME];
#define TIDE_X(key, unit, required, help) double key;
    PLAN_MACHINE_KEYS(TIDE_X)
#undef TIDE_X
} plan_machine;

typedef struct plan_machine_key { const char *name; int unit; bool required; const char *help; size_t offset; } plan_machine_key;
extern const plan_machine_key plan_machine_keys[];
extern const uint32_t plan_machine_n_keys;

/* `file` names the text in messages ("machines/a.txt:12: nic_rate: ..."). TIDE_ERR_ARGUMENT. */
int plan_machine_parse(const char *file, const char *text, size_t bytes, plan_machine *out);
/* One value, as a file gives it ("47.5 GB/s"); `where` begins the message. */
int plan_machine_set(plan_machine *m, const char *where, const char *key, const char *text);
/* The text of a machine file; parsing it gives the same machine to 9 digits. */
void plan_machine_print(const plan_machine *m, tide_text *out);
/* Value of a key. */
static inline double plan_machine_get(const plan_machine *m, uint32_t key)
{
    return *(const double *)((const char *)m + plan_machine_keys[key].offset);
}
/* tide_plan_create with the solver's rates from a machine. */
int plan_machine_create(const plan_machine *m, const tide_topology *topology, const tide_group_desc *groups,
                        uint32_t n_groups, const tide_options *options, tide_plan **out);

#endif
