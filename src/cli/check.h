/*
 * check.h - `tide check`: a configuration is data (topology, knobs, groups, a list of actions), made from a seed by
 * check.c and carried out by every rank in check_run.c.
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

typedef struct check_config {
    uint64_t seed;
    const cli_fabric *fabric;
    tide_topology topology;
    tide_options options;
    bool procs, jitter;
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

/* check_run.c: a rank's part; start->job is the check_config. */
int check_rank(const rank_start *start);

#endif
