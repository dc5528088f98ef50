/*
 * rs.c - Latin-square waves (paper 4.2, App. D) and the cut of the packed output into sub-slices and passes.
 *
 * Contributor c = 1..M of a destination node; c = M is the node itself. Its partial of sub-slice s lies in inbox block
 * s of local rank j = (s - cbar) mod L, so that two contributors of a wave meet in one block exactly when their cbar
 * agree modulo L. One rank a node (L = 1) keeps contributors apart instead: block (c - 1) mod W_wave.
 */
#include "plan/plan.h"

static int check_wave(const plan_rs *rs, uint32_t w)
{
    const plan_wave *wave = &rs->waves[w];
    uint64_t taken = 0;

    for (uint32_t c = wave->first; c < wave->first + wave->count && rs->local > 1; c++) {
        uint64_t bit = UINT64_C(1) << plan_cbar(rs->nodes, c) % rs->local;
        if (taken & bit) {
            uint32_t other = wave->first;
            while (plan_cbar(rs->nodes, other) % rs->local != plan_cbar(rs->nodes, c) % rs->local)
                other++;
            return tide_fail(
                TIDE_ERR_UNSUPPORTED,
                "w_wave: %u with %u nodes of %u: contributors %u and %u of wave %u would share an inbox block; "
                "expected a divisor of %u",
                rs->w_wave, rs->nodes, rs->local, other, c, w, rs->local);
        }
        taken |= bit;
    }
    return TIDE_OK;
}

int plan_rs_init(plan_rs *rs, uint32_t nodes, uint32_t local, uint32_t w_wave, uint32_t k, uint32_t n_par,
                 uint32_t n_part, uint32_t n_out)
{
    uint32_t k_max = nodes > 2 ? nodes - 1 : 1, n_rounds = 0;
    int status;

    memset(rs, 0, sizeof *rs);
    rs->nodes = nodes;
    rs->local = local;
    rs->w_wave = w_wave;
    rs->k = k < k_max ? k : k_max;
    rs->n_par = n_par;
    rs->n_part = n_part;
    rs->n_out = n_out;
    rs->n_inbox = local > 1 || nodes < 2 ? local : w_wave < nodes - 1 ? w_wave : nodes - 1;
    if (nodes < 2)
        return TIDE_OK;
    rs->n_waves = (nodes + w_wave - 1) / w_wave;
    rs->n_blocks = n_part * (nodes - 1);
    rs->waves = tide_calloc(rs->n_waves, sizeof *rs->waves);
    rs->rounds = tide_calloc(nodes - 1, sizeof *rs->rounds); /* a round sends at least one block */
    if (!rs->waves || !rs->rounds) {
        plan_rs_clear(rs);
        return TIDE_ERR_MEMORY;
    }
    for (uint32_t w = 0; w < rs->n_waves; w++) {
        plan_wave *wave = &rs->waves[w];
        uint32_t end;
        wave->first = 1 + w * w_wave;
        wave->count = nodes - wave->first + 1 < w_wave ? nodes - wave->first + 1 : w_wave;
        wave->first_round = n_rounds;
        end = wave->first + wave->count; /* of all contributors; the own node sends nothing */
        end = end > nodes ? nodes : end;
        for (uint32_t c = wave->first; c < end; c += rs->k)
            rs->rounds[n_rounds++] = (plan_round){c, end - c < rs->k ? end - c : rs->k};
        wave->n_rounds = n_rounds - wave->first_round;
        status = check_wave(rs, w);
        if (status != TIDE_OK) {
            plan_rs_clear(rs);
            return status;
        }
    }
    rs->n_rounds = n_rounds;
    return TIDE_OK;
}

void plan_rs_clear(plan_rs *rs)
{
    tide_free(rs->waves);
    tide_free(rs->rounds);
    memset(rs, 0, sizeof *rs);
}

uint64_t plan_rs_wave_mask(const plan_rs *rs, uint32_t wave, uint32_t j)
{
    const plan_wave *w = &rs->waves[wave];
    uint64_t mask = 0;
    for (uint32_t c = w->first; c < w->first + w->count; c++)
        mask |= UINT64_C(1) << plan_rs_block(rs, j, c);
    return mask;
}

uint64_t plan_rs_stale_mask(const plan_rs *rs, uint32_t g, uint32_t j)
{
    uint32_t total = rs->n_waves * rs->n_part, generation = g % rs->n_par, previous;
    if (rs->local == 1)
        return 0;
    if (g >= rs->n_par)
        previous = g - rs->n_par;
    else /* the last wave of the call before that used this generation: itself when it is the only one */
        previous = (total - 1 - generation) / rs->n_par * rs->n_par + generation;
    return plan_rs_wave_mask(rs, previous % rs->n_waves, j) & ~plan_rs_wave_mask(rs, g % rs->n_waves, j);
}

uint32_t plan_rs_partial_outbox(const plan_rs *rs)
{
    uint32_t most = 0, before = 0;
    /* a second pass adds the step from the last round to the first; further passes repeat it */
    for (uint32_t pass = 0; pass < rs->n_part && pass < 2; pass++)
        for (uint32_t i = 0; i < rs->n_rounds; i++) {
            if (rs->rounds[i].count + before > most)
                most = rs->rounds[i].count + before;
            before = rs->rounds[i].count;
        }
    return most;
}

/*
 * M > 1:  E  | sub 0          | sub 1          | ... | sub L-1   (short, maybe empty)
 *            | q=0  q=1  q=2  |                                   part elements each, the last ones short
 * M = 1:  one sub-slice, one part.
 */
void plan_cut_init(plan_cut *cut, uint32_t nodes, uint32_t local, uint32_t n_part, uint64_t elements, uint64_t chunk)
{
    cut->elements = elements;
    cut->rows = nodes == 1 ? 1 : local;
    cut->sub = tide_align_up(nodes == 1 ? elements : tide_ceil_div(elements, local), PLAN_VECTOR);
    cut->part = nodes == 1 ? cut->sub : tide_align_up(tide_ceil_div(cut->sub, n_part), PLAN_VECTOR);
    cut->chunk = tide_max_u64(1, tide_min_u64(tide_align_up(chunk, PLAN_VECTOR), cut->part));
    cut->n_chunks = (uint32_t)tide_ceil_div(cut->part, cut->chunk);
}

void plan_cut_range(const plan_cut *cut, uint32_t s, uint32_t q, uint64_t *begin, uint64_t *end)
{
    uint64_t stop = tide_min_u64((s + UINT64_C(1)) * cut->sub, cut->elements);
    *begin = tide_min_u64(s * cut->sub + q * cut->part, stop);
    *end = tide_min_u64(*begin + cut->part, stop);
}
