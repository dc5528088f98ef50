/*
 * proof.h - what a plan has to do, said from its geometry, and in which orders its calls may come: the input of verify.
 *
 * A proof holds the op lists of all ranks for each kind of call, and their contracts; a case is a legal sequence of
 * calls. Training steps come in the orders that an adapter uses; random ones interleave groups as far as the rules of
 * the public calls allow.
 */
#ifndef TIDE_PROOF_H
#define TIDE_PROOF_H

#include "schedule/verify.h"

/* What a call is compiled for. RS variants: all gradients as described; a subset; another gradient dtype. */
enum proof_kind { PROOF_AG, PROOF_RS, PROOF_RS_SUBSET, PROOF_RS_DTYPE, PROOF_RS_REUSE, PROOF_STASH, PROOF_KIND_COUNT };

typedef struct proof_program {
    int kind;
    uint32_t group;
    schedule *by_rank;
    const schedule **lists;   /* the same, as verify wants them */
    const uint32_t **origins; /* per rank: NULL, or the names of a mutant's ops */
    verify_contract contract;
    uint64_t *input_bytes, *input_offset;
    verify_span *spans;
    uint32_t *first_span;
} proof_program;

typedef struct proof {
    const tide_plan *plan;
    uint32_t n_ranks, n_programs;
    proof_program **programs; /* by group * PROOF_KIND_COUNT + kind; NULL: not compiled yet */
} proof;
int proof_create(const tide_plan *plan, proof *out);
void proof_clear(proof *p);
/* Compiles on first use. TIDE_ERR_UNSUPPORTED: the group has no such call. */
int proof_compile(proof *p, int kind, uint32_t group, proof_program **out);

typedef struct proof_case {
    verify_call *calls;  uint32_t n_calls, cap_calls;
    verify_step *steps;  uint32_t n_steps, cap_steps;
    uint32_t n_groups; /* distinct ones that are called */
} proof_case;

enum proof_order {
    PROOF_TRAIN,       /* In-Place: the next all-gather goes ahead of a reduce-scatter's network phase */
    PROOF_TRAIN_PLAIN, /* the stock order; with a full outbox two reads go ahead of their network phases */
    PROOF_TRAIN_REUSE, /* Slot-Reuse where a group allows it */
    PROOF_RANDOM,      /* seeded: groups left out, repeated, subsets, other dtypes */
    PROOF_ORDER_COUNT
};
/* `length`: training steps, or random choices. */
int proof_case_create(proof *p, int order, uint32_t length, uint64_t seed, proof_case *out);
void proof_case_clear(proof_case *c);
int proof_case_verify(const proof *p, const proof_case *c, const verify_options *options, verify_result *result);

/* The orders whose bits are set, for a plan; sums up. */
enum { PROOF_ALL_ORDERS = (1 << PROOF_ORDER_COUNT) - 1 };
typedef struct proof_result {
    uint64_t ag_ops, rs_ops, calls, groups, violations, cases, accesses;
} proof_result;
int proof_plan(const tide_plan *plan, uint32_t orders, uint64_t seed, const verify_options *options, proof_result *out);

/* ---- mutation (mutate.c) ---------------------------------------------------------------------------------- */

enum mutation {
    MUTATE_DELETE, MUTATE_SWAP, MUTATE_DELTA, MUTATE_COUNT, MUTATE_OFFSET, MUTATE_SIGNAL, MUTATE_KIND_COUNT
};
const char *mutation_name(int mutation); /* "op deleted" */

enum mutate_verdict { MUTANT_REPORTED, MUTANT_EQUIVALENT, MUTANT_MISSED };
typedef struct mutate_options {
    int64_t only_rank; /* -1: the ops of all ranks */
    uint64_t seed;
    bool list;         /* a line a mutant, else only equivalent and missed ones */
    tide_text *out;
    /* Called for each mutant while the proof's op lists are the mutant's; may be NULL. */
    void (*visit)(void *context, const proof_case *c, int mutation, int verdict, const verify_result *first);
    void *context;
} mutate_options;
typedef struct mutate_result {
    uint64_t mutants, reported, equivalent, missed;
    uint64_t by_kind[MUTATE_KIND_COUNT][3];         /* reported, equivalent, missed */
    uint64_t by_class[VERIFY_CLASS_COUNT];          /* of the first report */
} mutate_result;
/* Every mutant of the programs that `order` calls; adds to *result. */
int mutate_case(proof *p, int order, uint32_t length, const mutate_options *options, mutate_result *result);

#endif
