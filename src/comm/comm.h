/*
 * comm.h - what the public calls share: the communicator, its sets of groups, and the agreement between ranks.
 *
 * A set is what one tide_groups_create made: one plan, one engine, landing slots that its groups share.
 */
#ifndef TIDE_COMM_H
#define TIDE_COMM_H

#include "engine/engine.h"
#include "plan/machine.h"

typedef struct comm_set comm_set;

struct tide_comm {
    fab_open open; /* rank, size and the all-gather of every set-up call; options points at the ones below */
    fab_device *device;
    tide_options options; /* multicast resolved; the rest as given */
    uint32_t nodes, local;
    int fabric;
    uint64_t *machines; /* per rank */
    int64_t *scratch; /* n_ranks * COMM_FIELDS: agreements use no other heap */
    uint64_t calls;   /* collectives enqueued */
    comm_set *sets;
    char nodes_reason[192];     /* why the nodes are what they are */
    char path[64], reason[512]; /* of the sets that are still to come */
    bool rates_given;   /* the planner's rates are ... */
    plan_machine rates; /* ... these, alike on all ranks */
};

/* A compiled reduce-scatter or stash of one subset of the parameters; kept until the communicator goes. */
typedef struct comm_program {
    struct comm_program *next;
    engine_program *run;
    uint8_t *present; /* n_params flags */
    bool stash;
    int grad_dtype, mode;
    uint32_t n_args;
    uint64_t bytes;      /* written by this rank: copies and puts */
    bool late_read_done; /* READ_DONE is recorded by the network phase: partial outbox */
    bool late_free;      /* so is FREE of the slot */
} comm_program;

struct tide_group {
    comm_set *set;
    uint32_t index;
    const plan_group *plan;
    engine_program *all_gather;
    uint64_t all_gather_bytes, reduce_scatter_bytes;
    uint64_t all_gathers, reduce_scatters;
    comm_program *programs;
    uint8_t *present;  /* n_params: scratch of a call */
    const void **args; /* n_params + 1: scratch of a call */
};

/*
 *            all_gather            slot_release
 *     FREE ------------> HELD ---------------------> FREE
 *                         | grads_stash
 *                         v         read, mode 1                      net
 *                      STASHED ------------------> READING (partial outbox) ---> FREE
 *                         |         read, mode 1
 *                         +--------------------------------------------------> FREE (read_done frees it on the device)
 */
enum comm_slot_state { SLOT_FREE, SLOT_HELD, SLOT_STASHED, SLOT_READING };
typedef struct comm_slot {
    int state;
    tide_group *owner;   /* NULL when free */
    comm_program *stash; /* STASHED: the reduce-scatter that reads it; NULL when no parameter has a gradient */
    int stash_dtype;
} comm_slot;

/* A read phase whose network phase has not been enqueued; program NULL: no parameter had a gradient. */
typedef struct comm_pending {
    tide_group *group;
    comm_program *program;
    uint64_t call;
    bool frees_slot;
} comm_pending;
/* Outbox and spare alternate between two banks, so that many reads may be ahead of the network phases. */
enum { COMM_BANKS = 2 };

struct comm_set {
    comm_set *next;
    tide_comm *comm;
    tide_plan *plan;
    engine *engine;
    uint32_t n_groups;
    tide_group *groups;
    comm_slot *slots; /* plan->n_slots */
    comm_pending pending[COMM_BANKS];
    uint32_t n_pending;
    char path[64], reason[512];
};

/* ---- entering a call ---------------------------------------------------------------------------- */

/* TIDE_OK, or why the communicator can do nothing more: forked, or failed (its failure's code and text). */
int comm_enter(const tide_comm *comm);
int comm_enter_group(const tide_group *group); /* the same; group NULL is an argument error */
/* Path and reason, once the device has said what it can do. Without multicast from then on where it has found that it
 * cannot. */
void comm_name_path(tide_comm *comm);
/* "group 3 'layers.3'" */
const char *comm_group_label(const tide_group *group, char buffer[96]);

/* ---- groups.c ----------------------------------------------------------------------------------- */

/* The program for a subset (n_params flags), compiled at its first use. */
int comm_program_find(tide_group *group, bool stash, const uint8_t *present, int grad_dtype, int mode,
                      comm_program **out);
void comm_set_free(comm_set *set); /* NULL is fine */

/* ---- agree.c: the same verdict, in the same words, on all ranks. No heap but `scratch`. --------- */

enum { COMM_FIELDS = 32 }; /* fields an exchange */
enum comm_value { VALUE_INT, VALUE_KNOB, VALUE_HEX, VALUE_VERSION };
typedef struct comm_field {
    const char *name;
    int kind; /* comm_value: how it is written */
    int64_t value;
} comm_field;

/* C  n_ranks and rank as every rank believes them to be, before anything may rely on them. */
int comm_agree_size(const fab_open *open);
/* C  Compares at most COMM_FIELDS; the first that differs: "<where>k: 2 on ranks 0-2, 4 on rank 3". */
int comm_agree_fields(const fab_open *open, int64_t *scratch, const char *where, const comm_field *fields,
                      uint32_t n_fields);
/* C  Signatures, capabilities and plan digest of a set. status: this rank's so far; groups and plan are read only when
 * it is OK. */
int comm_agree_groups(const fab_open *open, int64_t *scratch, int status, const tide_group_desc *groups,
                      uint32_t n_groups, int64_t multicast, uint64_t plan_digest);

/* ---- rates.c ------------------------------------------------------------------------------------ */

/* L  The machine file that TIDE_MACHINE names; *given: whether it names one. */
int comm_rates_read(plan_machine *out, bool *given);
/* C  The lowest rate and the longest time of any rank. */
int comm_rates_agree(const fab_open *open, int64_t *scratch, plan_machine *m);

/* ---- topology.c --------------------------------------------------------------------------------- */

extern _Thread_local uint64_t comm_pretended_host; /* of tide_host_identity, for the ranks of a test; 0: none */
/* Ranks a node from every rank's machine. node_size 0: the machines decide. reason: one clause, alike on all ranks. */
int comm_node_size(const uint64_t *hosts, uint32_t n_ranks, uint32_t node_size, uint32_t *local, char *reason,
                   size_t room);

#endif
