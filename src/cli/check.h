/*
 * check.h - `tide check`: a configuration is data (topology, knobs, groups, a list of actions), made from a seed by
 * check_draw.c, carried out once or twice by every rank in check_run.c, compared and counted by check.c.
 */
#ifndef TIDE_CLI_CHECK_H
#define TIDE_CLI_CHECK_H

#include "cli/fabric.h"
#include "cli/oracle.h"
#include "cli/ranks.h"

/* What all ranks do, in this order. */
enum check_act {
    ACT_ADOPT,   /* sync, then fill the group's shards from a new key */
    ACT_GATHER,
    ACT_LOOK,    /* wait for READY, compare every byte of the landing */
    ACT_RELEASE,
    ACT_STASH,   /* copy gradients into the slot; overwrite them at once */
    ACT_READ,
    ACT_NET,
    ACT_BOTH,    /* read and net in one call */
    ACT_GONE,    /* wait for READ_DONE, overwrite the gradients */
    ACT_SUMS     /* wait for DONE, compare every element of the output */
};
typedef struct check_action {
    uint8_t kind;
    uint32_t group, call;
    uint64_t key; /* of ADOPT, and of GATHER when shards are arguments */
} check_action;

/* One collective. For a reduce-scatter, the rest says what goes in. */
typedef struct check_call {
    bool reduce;
    uint32_t group;
    uint8_t *present; /* n_params flags */
    bool subset;      /* some parameter is missing */
    int grad_dtype, kind, mode;
    uint64_t key;
    float alpha;
    bool accumulate;
} check_call;

typedef struct check_group {
    cli_shapes shapes;
    tide_group_desc desc;
    bool cast;
    uint32_t slot; /* ring groups take slots in array order, private ones follow */
} check_group;

/* How the actions are carried out. All runs of a configuration give the same bytes. */
typedef struct check_run {
    const cli_fabric *fabric;
    int gpus; /* 0: all there are */
    tide_options options; /* multicast is 0 on a fabric that has to be asked for it, unless the command line does */
    bool procs;
    bool in_place; /* Slot-Reuse calls are made In-Place */
    bool pauses;   /* each rank pauses before some actions */
    int64_t slow;  /* a rank that pauses before every action; -1: none */
    cli_trouble trouble;
} check_run;

typedef struct check_config {
    uint64_t seed;
    tide_topology topology;
    check_run runs[2];
    uint32_t n_runs;
    const check_run *run; /* the one under way */
    uint32_t w_wave;
    uint32_t n_waves, n_part;
    bool partial, stale, node_landing;
    uint32_t n_groups, n_slots;
    check_group *groups;
    check_action *actions;
    uint32_t n_actions, cap_actions;
    check_call *calls;
    uint32_t n_calls;
    struct check_shared *shared;
} check_config;

/* Written by ranks, read by the starter: memory from ranks_alloc. */
typedef struct check_report {
    int failed;     /* a call of the library failed, or memory ran out */
    int64_t when;   /* of the text, on the monotonic clock: what came first on any rank is the cause */
    char text[400]; /* the first thing that was wrong, or "" */
} check_report;
typedef struct check_shared {
    check_report *reports; /* one a rank */
    uint8_t *wrong;        /* one a call */
    uint64_t *results;     /* n_calls x n_ranks: digest of the bytes that a call gave a rank, every NaN the same */
} check_shared;

/* check_draw.c: what is drawn; ends with CHECK_END. */
enum { CHECK_END = 255 };
extern const uint8_t check_nodes[], check_local[];
/* Everything about a configuration follows from its seed and the command line. CLI_OK or CLI_BAD; clear it in any
 * case. The second run, if there is one, is on `fabric`; the first, and only, one on the first of cli_fabrics. */
int check_draw(const cli *c, const cli_fabric *fabric, uint64_t seed, uint32_t most_calls, check_config *config);
void check_clear(check_config *config);

/* check_run.c: a rank's part; start->job is the check_config. */
int check_rank(const rank_start *start);

#endif
