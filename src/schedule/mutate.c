/*
 * mutate.c - proves the prover: breaks an op list in one place and asks whether verify notices.
 *
 * A mutant that is not reported has to be equivalent: the order of all conflicting accesses, byte by byte, is that of
 * the original (verify_result.digest). A mutant that is neither is missed, and verify has a hole.
 */
#include <stdio.h>

#include "schedule/proof.h"

static const char *const mutation_names[MUTATE_KIND_COUNT] = {"op deleted",       "neighbours swapped", "counter delta",
                                                              "rail count",       "offset",             "signal index"};
static const char *const op_names[OP_KIND_COUNT] = {"COPY", "REDUCE", "PUT", "SIGNAL", "WAIT", "RECORD", "JOIN"};
static const char *const verdict_names[] = {"reported", "equivalent", "missed"};

const char *mutation_name(int mutation)
{
    return mutation >= 0 && mutation < MUTATE_KIND_COUNT ? mutation_names[mutation] : "unknown";
}

typedef struct mutator {
    proof *p;
    proof_case c;
    verify_result original;
    const mutate_options *options;
    mutate_result *result;
    proof_program *program; /* what is being broken, on `rank` */
    uint32_t rank;
    schedule *s;
    const op *ops; /* as built */
    int status;
} mutator;

/* Runs the mutant of op `index`; `detail` says what was done to it. */
static void judge(mutator *m, int mutation, uint32_t index, const char *detail)
{
    const verify_options options = {.stop_after = 1, .digest = true};
    const op *o = &m->ops[index];
    verify_result r;
    char stream[24];
    int verdict;

    if (m->status != TIDE_OK)
        return;
    m->status = proof_case_verify(m->p, &m->c, &options, &r);
    if (m->status != TIDE_OK)
        return;
    verdict = r.violations ? MUTANT_REPORTED : r.digest == m->original.digest ? MUTANT_EQUIVALENT : MUTANT_MISSED;
    m->result->mutants++;
    m->result->by_kind[mutation][verdict]++;
    m->result->reported += verdict == MUTANT_REPORTED;
    m->result->equivalent += verdict == MUTANT_EQUIVALENT;
    m->result->missed += verdict == MUTANT_MISSED;
    for (int i = 0; i < VERIFY_CLASS_COUNT; i++)
        m->result->by_class[i] += r.by_class[i];
    if (m->options->visit)
        m->options->visit(m->options->context, &m->c, mutation, verdict, &r);
    if (m->options->out && (verdict != MUTANT_REPORTED || m->options->list))
        tide_text_put(m->options->out, "%s: %s %s: %s of group %u, rank %u op %u %s on %s (%s)\n",
                      verdict_names[verdict], mutation_names[mutation], detail,
                      m->s->kind == SCHEDULE_AG ? "all_gather" : "reduce_scatter", m->program->group, m->rank, index,
                      op_names[o->kind], op_stream_name(o->stream, stream), op_phase_name(o->phase));
}

/* The op list with op `gone` left out (UINT32_MAX: none) and ops a and b exchanged. */
static void judge_order(mutator *m, int mutation, uint32_t gone, uint32_t a, uint32_t b)
{
    schedule *s = m->s;
    op *whole = s->ops;
    uint32_t n_ops = s->n_ops, n_read = s->n_read, n = 0;
    op *ops = tide_calloc(n_ops, sizeof *ops);
    uint32_t *names = tide_calloc(n_ops, sizeof *names);

    if (ops && names) {
        char detail[32] = "";
        for (uint32_t i = 0; i < n_ops; i++) {
            if (i == gone)
                continue;
            names[n] = i == a ? b : i == b ? a : i;
            ops[n] = whole[names[n]];
            n++;
        }
        s->ops = ops;
        s->n_ops = n;
        s->n_read = n_read - (gone < n_read);
        m->program->origins[m->rank] = names;
        if (gone == UINT32_MAX)
            snprintf(detail, sizeof detail, "with op %u", b);
        judge(m, mutation, gone == UINT32_MAX ? a : gone, detail);
        s->ops = whole;
        s->n_ops = n_ops;
        s->n_read = n_read;
        m->program->origins[m->rank] = NULL;
    } else {
        m->status = TIDE_ERR_MEMORY;
    }
    tide_free(names);
    tide_free(ops);
}

static void shift_u64(mutator *m, int mutation, uint32_t index, uint64_t *field, uint64_t by, const char *what)
{
    char detail[48];
    snprintf(detail, sizeof detail, "%s + %llu", what, (unsigned long long)by);
    *field += by;
    judge(m, mutation, index, detail);
    *field -= by;
    if (*field < by)
        return;
    snprintf(detail, sizeof detail, "%s - %llu", what, (unsigned long long)by);
    *field -= by;
    judge(m, mutation, index, detail);
    *field += by;
}

static void mutate_offsets(mutator *m, uint32_t index)
{
    const op *o = &m->ops[index];
    uint64_t item =
        m->program->contract.kind == VERIFY_AG ? m->program->contract.out_item : m->program->contract.in_item;
    uint64_t src = o->src_dtype == TIDE_OPAQUE ? item : tide_dtype_bytes(o->src_dtype);
    uint64_t dst = o->dst_dtype == TIDE_OPAQUE ? item : tide_dtype_bytes(o->dst_dtype);

    for (uint32_t i = o->first; i < o->first + o->count; i++) {
        if (o->kind == OP_COPY) {
            if (m->s->runs[i].src.space != SPACE_ZERO)
                shift_u64(m, MUTATE_OFFSET, index, &m->s->runs[i].src.offset, src, "source");
            shift_u64(m, MUTATE_OFFSET, index, &m->s->runs[i].dst.offset, dst, "destination");
        } else if (o->kind == OP_REDUCE) {
            op_segment *g = &m->s->segments[i];
            shift_u64(m, MUTATE_OFFSET, index, &g->dst.offset, 4, "destination");
            for (uint32_t k = 0; k < g->n_sets; k++)
                shift_u64(m, MUTATE_OFFSET, index, &g->source[k].at.offset, tide_dtype_bytes(g->source[k].dtype),
                          "source");
        } else if (o->kind == OP_PUT) {
            item = m->s->kind == SCHEDULE_AG ? item : 4;
            shift_u64(m, MUTATE_OFFSET, index, &m->s->puts[i].src.offset, item, "source");
            shift_u64(m, MUTATE_OFFSET, index, &m->s->puts[i].dst.offset, item, "destination");
        }
    }
}

static void mutate_posts(mutator *m, uint32_t index)
{
    const op *o = &m->ops[index];
    if (o->scope == SCOPE_LOCAL) {
        shift_u64(m, MUTATE_DELTA, index, &m->s->ops[index].delta, 1, "delta");
        return;
    }
    for (uint32_t i = o->first; o->kind == OP_WAIT && i < o->first + o->count; i++) {
        for (int by = -1; by <= 1; by += 2) {
            m->s->posts[i].count += (uint32_t)by;
            judge(m, MUTATE_COUNT, index, by < 0 ? "- 1" : "+ 1");
            m->s->posts[i].count -= (uint32_t)by;
        }
    }
}

static void mutate_signal(mutator *m, uint32_t index, uint16_t *sig, uint32_t used)
{
    uint16_t before = *sig;
    for (uint16_t other = 0; other < SIG_COUNT; other++) {
        char detail[32];
        if (other == before || !(used >> other & 1))
            continue;
        snprintf(detail, sizeof detail, "%u for %u", other, before);
        *sig = other;
        judge(m, MUTATE_SIGNAL, index, detail);
    }
    *sig = before;
}

static uint32_t used_signals(const schedule *s)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < s->n_puts; i++)
        used |= 1u << s->puts[i].sig;
    for (uint32_t k = 0; k < s->n_ops; k++) {
        const op *o = &s->ops[k];
        for (uint32_t i = o->first;
             (o->kind == OP_SIGNAL || o->kind == OP_WAIT) && o->scope == SCOPE_RAIL && i < o->first + o->count; i++)
            used |= 1u << s->posts[i].sig;
    }
    return used;
}

/* Two that only wait, or two that only tell, next to each other on a stream: their exchange is no change at all. */
static bool exchangeable(const op *a, const op *b)
{
    bool waits_a = a->kind == OP_JOIN || (a->kind == OP_WAIT && a->scope == SCOPE_LOCAL);
    bool waits_b = b->kind == OP_JOIN || (b->kind == OP_WAIT && b->scope == SCOPE_LOCAL);
    bool tells_a = a->kind == OP_RECORD || (a->kind == OP_SIGNAL && a->scope == SCOPE_LOCAL);
    bool tells_b = b->kind == OP_RECORD || (b->kind == OP_SIGNAL && b->scope == SCOPE_LOCAL);
    return (waits_a && waits_b) || (tells_a && tells_b);
}

static void mutate_op(mutator *m, uint32_t index, uint32_t used)
{
    const op *o = &m->ops[index];

    judge_order(m, MUTATE_DELETE, index, UINT32_MAX, UINT32_MAX);
    for (uint32_t i = index + 1; i < m->s->n_ops; i++) {
        if (m->ops[i].stream == o->stream && (i < m->s->n_read) == (index < m->s->n_read)) {
            if (!exchangeable(o, &m->ops[i]))
                judge_order(m, MUTATE_SWAP, UINT32_MAX, index, i);
            break;
        }
    }
    if (o->kind == OP_SIGNAL || o->kind == OP_WAIT)
        mutate_posts(m, index);
    if (o->kind == OP_COPY || o->kind == OP_REDUCE || o->kind == OP_PUT)
        mutate_offsets(m, index);
    for (uint32_t i = o->first; i < o->first + o->count && m->status == TIDE_OK; i++) {
        if (o->kind == OP_PUT)
            mutate_signal(m, index, &m->s->puts[i].sig, used);
        else if ((o->kind == OP_SIGNAL || o->kind == OP_WAIT) && o->scope == SCOPE_RAIL)
            mutate_signal(m, index, &m->s->posts[i].sig, used);
    }
}

int mutate_case(proof *p, int order, uint32_t length, const mutate_options *options, mutate_result *result)
{
    mutator m = {.p = p, .options = options, .result = result};
    const verify_options verify = {.out = options->out, .lines = 4, .digest = true};

    m.status = proof_case_create(p, order, length, options->seed, &m.c);
    if (m.status != TIDE_OK)
        return m.status;
    m.status = proof_case_verify(p, &m.c, &verify, &m.original);
    if (m.status == TIDE_OK && m.original.violations)
        m.status = tide_fail(TIDE_ERR_STATE, "mutate: the plan itself has %llu violations",
                             (unsigned long long)m.original.violations);
    for (uint32_t i = 0; i < p->n_programs && m.status == TIDE_OK; i++) {
        bool called = false;
        m.program = p->programs[i];
        for (uint32_t k = 0; m.program && k < m.c.n_calls; k++)
            called = called || m.c.calls[k].by_rank == m.program->lists;
        for (m.rank = 0; called && m.rank < p->n_ranks && m.status == TIDE_OK; m.rank++) {
            uint32_t used;
            if (options->only_rank >= 0 && m.rank != options->only_rank)
                continue;
            m.s = &m.program->by_rank[m.rank];
            m.ops = m.s->ops;
            used = used_signals(m.s);
            for (uint32_t index = 0; index < m.s->n_ops && m.status == TIDE_OK; index++)
                mutate_op(&m, index, used);
        }
    }
    proof_case_clear(&m.c);
    return m.status;
}
