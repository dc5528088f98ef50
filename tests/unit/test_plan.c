/* The planner: waves and rounds, cuts, memory, solver, validation, against formulas and brute force. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "../harness/spent.h"
#include "plan/plan.h"

static int make_plan(uint32_t nodes, uint32_t local, int64_t dim, const tide_options *options, tide_plan **plan)
{
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_param param = {"w", 1, 0, {dim}};
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    t.nodes = nodes;
    t.local = local;
    d.n_params = 1;
    d.params = &param;
    return tide_plan_create(&t, &d, 1, options, plan);
}

static void all_gather_rounds_cover_every_slot(void **state)
{
    plan_ag_round r[11];
    (void)state;
    assert_int_equal(plan_ag_rounds(5, r), 3);
    assert_int_equal(r[0].count, 1);
    assert_int_equal(r[1].count, 2);
    assert_int_equal(r[2].count, 1);
    for (uint32_t m = 1; m <= TIDE_MAX_NODES; m++) {
        uint32_t n = plan_ag_rounds(m, r), have = 1;
        for (uint32_t d = 0; d < n; d++) {
            assert_int_equal(r[d].distance, have); /* slots so far = first new slot */
            assert_true(r[d].count >= 1 && r[d].count <= have);
            have += r[d].count;
        }
        assert_int_equal(have, m);
        assert_int_equal(n, m == 1 ? 0 : (uint32_t)ceil(log2(m)));
    }
}

/* ---- the audit of the paper's App. D -------------------------------------------------------- */

/* Two calls: the blocks of rank j that hold a partial when a wave lands are exactly the wave's, one a contributor. */
static bool stale_free(const plan_rs *rs, uint32_t j)
{
    uint64_t dirty[2] = {0, 0};
    uint32_t total = rs->n_waves * rs->n_part;
    for (uint32_t i = 0; i < 2 * total; i++) {
        uint32_t g = i % total;
        uint64_t mask = plan_rs_wave_mask(rs, g % rs->n_waves, j), *generation = &dirty[g % rs->n_par];
        *generation = (*generation & ~plan_rs_stale_mask(rs, g, j)) | mask;
        if (*generation != mask || (uint32_t)__builtin_popcountll(mask) != rs->waves[g % rs->n_waves].count)
            return false;
    }
    return true;
}

/* Straight from the definition: no two contributors of a wave on one local GPU, for any sub-slice. */
static bool collision_free(uint32_t nodes, uint32_t local, uint32_t w_wave)
{
    for (uint32_t first = 1; first <= nodes; first += w_wave)
        for (uint32_t a = first; a < first + w_wave && a <= nodes; a++)
            for (uint32_t b = a + 1; b < first + w_wave && b <= nodes; b++)
                if (a % nodes % local == b % nodes % local)
                    return false;
    return true;
}

static uint32_t rounds_by_formula(uint32_t nodes, uint32_t w_wave, uint32_t k)
{
    uint32_t rounds = 0;
    for (uint32_t first = 1; first <= nodes; first += w_wave) {
        uint32_t remote = 0;
        for (uint32_t c = first; c < first + w_wave && c < nodes; c++)
            remote++;
        rounds += (remote + k - 1) / k;
    }
    return rounds;
}

static void audit_counts(void **state)
{
    uint32_t accepted = 0, rejected = 0;
    (void)state;
    for (uint32_t m = 2; m <= 1024; m++)
        for (uint32_t w = 1; w <= 8; w++) {
            bool fine = collision_free(m, 8, w);
            for (uint32_t k = 1; k <= 32; k++) {
                plan_rs rs;
                uint32_t n_par = m > w ? 2 : 1, sent = 0;
                int status = plan_rs_init(&rs, m, 8, w, k, n_par, 1, 0);
                assert_int_equal(status, fine ? TIDE_OK : TIDE_ERR_UNSUPPORTED);
                if (status != TIDE_OK) {
                    rejected += 2;
                    continue;
                }
                assert_int_equal(rs.k, k < m ? k : (m > 1 ? m - 1 : 1));
                assert_int_equal(rs.n_rounds, rounds_by_formula(m, w, rs.k));
                for (uint32_t i = 0; i < rs.n_rounds; i++) { /* every remote contributor once, in order */
                    assert_int_equal(rs.rounds[i].first, sent + 1);
                    sent += rs.rounds[i].count;
                }
                assert_int_equal(sent, m - 1);
                assert_in_range(plan_rs_partial_outbox(&rs), 1, 2 * rs.k < m - 1 ? 2 * rs.k : m - 1);
                accepted += 2; /* full and partial outbox */
                if (k == 1)    /* neither k nor the outbox moves a block */
                    for (uint32_t n_part = 1; n_part <= 4; n_part++) {
                        plan_rs parts;
                        assert_int_equal(plan_rs_init(&parts, m, 8, w, 1, m > w || n_part > 1 ? 2 : 1, n_part, 0),
                                         TIDE_OK);
                        assert_true(stale_free(&parts, m % 8));
                        if (m <= 33)
                            for (uint32_t j = 0; j < 8; j++)
                                assert_true(stale_free(&parts, j));
                        plan_rs_clear(&parts);
                    }
                plan_rs_clear(&rs);
            }
        }
    assert_int_equal(accepted, 458304);
    assert_int_equal(rejected, 65472);
}

static void collision_names_wave_and_contributors(void **state)
{
    plan_rs rs;
    (void)state;
    assert_int_equal(plan_rs_init(&rs, 9, 8, 3, 4, 2, 1, 8), TIDE_ERR_UNSUPPORTED);
    assert_string_equal(tide_last_error(),
                        "w_wave: 3 with 9 nodes of 8: contributors 8 and 9 of wave 2 would share an inbox block; "
                        "expected a divisor of 8");
    assert_int_equal(plan_rs_init(&rs, 8, 2, 4, 4, 2, 1, 8), TIDE_ERR_UNSUPPORTED); /* wider than the node */
}

/* The mask says where contributors' partials lie: holder and sub-slice are inverse, every block at most once. */
static void masks_follow_the_latin_square(void **state)
{
    (void)state;
    for (uint32_t local = 1; local <= 9; local++)
        for (uint32_t m = 2; m <= 40; m++) {
            plan_rs rs;
            assert_int_equal(plan_rs_init(&rs, m, local, local, 2, m > local ? 2 : 1, 1, 0), TIDE_OK);
            for (uint32_t w = 0; w < rs.n_waves; w++)
                for (uint32_t j = 0; j < local; j++) {
                    uint64_t mask = plan_rs_wave_mask(&rs, w, j), expected = 0;
                    for (uint32_t s = 0; s < local; s++)
                        for (uint32_t c = rs.waves[w].first; c < rs.waves[w].first + rs.waves[w].count; c++)
                            if (plan_holder(local, s, plan_cbar(m, c)) == j) {
                                assert_int_equal(plan_subslice(local, j, plan_cbar(m, c)), s);
                                assert_false(expected >> s & 1);
                                expected |= UINT64_C(1) << s;
                            }
                    assert_true(mask == expected);
                }
            plan_rs_clear(&rs);
        }
}

static void partial_outbox_is_two_rounds(void **state)
{
    plan_rs rs;
    (void)state;
    assert_int_equal(plan_rs_init(&rs, 8, 8, 2, 2, 2, 1, 0), TIDE_OK); /* waves of 2, 2, 2, 1 remote */
    assert_int_equal(rs.n_waves, 4);
    assert_int_equal(plan_rs_partial_outbox(&rs), 4);
    plan_rs_clear(&rs);
    assert_int_equal(plan_rs_init(&rs, 2, 8, 8, 4, 2, 1, 0), TIDE_OK);
    assert_int_equal(plan_rs_partial_outbox(&rs), 1);
    plan_rs_clear(&rs);
    assert_int_equal(plan_rs_init(&rs, 2, 8, 8, 4, 2, 3, 0), TIDE_OK); /* passes follow each other */
    assert_int_equal(plan_rs_partial_outbox(&rs), 2);
    plan_rs_clear(&rs);
    assert_int_equal(plan_rs_init(&rs, 9, 8, 8, 4, 2, 1, 0), TIDE_OK); /* 4, 4, and an own-only wave without a round */
    assert_int_equal(rs.waves[1].n_rounds, 0);
    assert_int_equal(rs.n_rounds, 2);
    assert_int_equal(plan_rs_partial_outbox(&rs), 8);
    plan_rs_clear(&rs);
}

/* ---- the cut -------------------------------------------------------------------------------- */

static void ranges_tile_the_packed_output(void **state)
{
    (void)state;
    for (uint32_t nodes = 1; nodes <= 2; nodes++)
        for (uint32_t local = 1; local <= 9; local += 2)
            for (uint32_t n_part = 1; n_part <= 5; n_part++)
                for (uint64_t e = 0; e < 200; e++) {
                    plan_cut cut;
                    uint64_t at = 0;
                    plan_cut_init(&cut, nodes, local, n_part, e, 20);
                    assert_int_equal(cut.rows, nodes == 1 ? 1 : local);
                    assert_int_equal(cut.sub % PLAN_VECTOR, 0);
                    assert_int_equal(cut.part % PLAN_VECTOR, 0);
                    assert_true(cut.chunk >= 1 && cut.chunk <= (cut.part ? cut.part : 1));
                    assert_int_equal(cut.n_chunks, (cut.part + cut.chunk - 1) / cut.chunk);
                    for (uint32_t s = 0; s < cut.rows; s++)
                        for (uint32_t q = 0; q < (nodes == 1 ? 1 : n_part); q++) {
                            uint64_t begin, end;
                            plan_cut_range(&cut, s, q, &begin, &end);
                            assert_true(begin <= end && end - begin <= cut.part && end <= e);
                            if (begin < end) {
                                assert_int_equal(begin, at); /* in order, no gap, no overlap */
                                assert_int_equal(begin % PLAN_VECTOR, 0);
                                /* a pass never moves an element to another sub-slice */
                                assert_int_equal(begin / cut.sub, s);
                                assert_int_equal((end - 1) / cut.sub, s);
                            }
                            at = begin < end ? end : at;
                        }
                    assert_int_equal(at, e);
                }
}

/* ---- solver and the paper's constants ------------------------------------------------------- */

static void solver_reproduces_the_paper(void **state)
{
    plan_choice c;
    (void)state;
    plan_solve(&plan_rates_paper, 8, 8, 8, 1, UINT64_C(32) << 20, 2, &c);
    assert_int_equal(c.k, 4);
    assert_int_equal(c.c_sum, 4);
    assert_int_equal(c.c_land, 4);
    /* a wire time so long that waits do not matter keeps k = 2 */
    plan_solve(&plan_rates_paper, 8, 8, 8, 1, UINT64_C(8) << 30, 2, &c);
    assert_int_equal(c.k, 2);
    /* doubling that saves no round is not taken: waves of two */
    plan_solve(&plan_rates_paper, 8, 8, 2, 1, UINT64_C(32) << 20, 2, &c);
    assert_int_equal(c.k, 2);
    for (uint32_t m = 1; m < 70; m++) { /* never past the number of targets, never 0 */
        plan_solve(&plan_rates_paper, m, 8, 8, 1, 0, 4, &c);
        assert_in_range(c.k, 1, m > 2 ? m - 1 : 1);
        assert_true(c.c_sum >= 1 && c.c_land >= 1);
    }
}

static double in_ns(uint64_t s32_blocks, uint32_t nodes, uint32_t local)
{
    return 2.0 * (double)s32_blocks / (nodes * local); /* bf16: S32 = 2 S */
}

static void closed_forms_give_the_papers_constants(void **state)
{
    const uint32_t m = 64, l = 8, n_par = 2, k = 4;
    double in_place = in_ns(plan_area_bound(2, n_par, m - 1), m, l),
           slot = in_ns(plan_area_bound(2, n_par, 2 * k), m, l);
    double ring_and_stage = 2 + 1.0 / l;
    (void)state;
    assert_int_equal(plan_area_bound(2, n_par, m - 1), 2 * m + 8 * n_par + 8);
    assert_int_equal(plan_area_bound(2, n_par, 2 * k), 4 * k + 8 * n_par + 10);
    assert_int_equal(lround(in_place * 1000), 594);
    assert_int_equal(lround(slot * 1000), 164);
    assert_int_equal(lround((ring_and_stage + in_place + 1) * 100), 372); /* and the previous layer's gradients */
    assert_int_equal(lround((ring_and_stage + slot) * 100), 229);
}

static uint64_t rs_area(const tide_bytes *b)
{
    return b->staging + b->outbox + b->spare + b->inbox;
}

static void exact_memory_keeps_the_bound(void **state)
{
    (void)state;
    for (uint32_t m = 2; m <= 96; m = m * 3 / 2 + 1)
        for (int64_t rows = 1; rows <= 1 << 20; rows = rows * 5 + 3)
            for (int mode = 0; mode <= 1; mode++)
                for (int64_t n_stg = 1; n_stg <= 4; n_stg++)
                    for (int64_t chunk = 64; chunk <= 1 << 30; chunk *= 64) {
                        tide_options o = TIDE_OPTIONS_INIT;
                        tide_bytes b = TIDE_BYTES_INIT;
                        tide_plan *plan;
                        uint64_t s32;
                        o.mode = mode;
                        o.n_stg = n_stg;
                        o.chunk = chunk;
                        assert_int_equal(make_plan(m, 8, rows * m * 8, &o, &plan), TIDE_OK);
                        assert_int_equal(tide_plan_bytes(plan, 0, &b), TIDE_OK);
                        assert_int_equal(plan->groups[0].geo.elements, rows);
                        /* blocks are whole TIDE_ALIGN units of eight vector-aligned rows: S32 rounded up to 64 elements
                         */
                        s32 = (uint64_t)((rows + 63) / 64 * 64 * 4);
                        assert_true(rs_area(&b) <=
                                    plan_area_bound((uint32_t)n_stg, plan->rs.n_par, plan->rs.n_out) * s32);
                        assert_int_equal(plan->map.block_stride, (8 * plan->groups[0].cut.sub * 4 + 255) / 256 * 256);
                        tide_plan_destroy(plan);
                    }
}

static void fixed_chunks_bring_in_place_to_056(void **state)
{
    tide_bytes b = TIDE_BYTES_INIT;
    tide_plan *plan;
    const int64_t elements = INT64_C(1) << 25; /* a 64 MiB bf16 shard */
    (void)state;
    assert_int_equal(make_plan(64, 8, elements * 64 * 8, NULL, &plan), TIDE_OK);
    assert_int_equal(tide_plan_bytes(plan, 0, &b), TIDE_OK);
    assert_in_range(lround(1000.0 * (double)rs_area(&b) / ((double)elements * 2 * 512)), 555, 569);
    tide_plan_destroy(plan);
}

/* ---- whole plans ---------------------------------------------------------------------------- */

static void regions_are_what_they_must_hold(void **state)
{
    tide_topology t = TIDE_TOPOLOGY_INIT;
    const tide_param a[] = {{"a0", 2, 0, {100, 6}}, {"a1", 1, 0, {9}}}, b[] = {{"b", 1, 0, {4000}}};
    tide_group_desc d[5];
    const tide_group_desc init = TIDE_GROUP_DESC_INIT;
    tide_bytes bytes = TIDE_BYTES_INIT;
    tide_options o = TIDE_OPTIONS_INIT;
    tide_plan *plan;
    (void)state;
    for (int i = 0; i < 5; i++) {
        d[i] = init;
        d[i].n_params = i % 2 ? 1 : 2;
        d[i].params = i % 2 ? b : a;
    }
    d[1].landing = TIDE_LANDING_PRIVATE;
    d[3].input = TIDE_INPUT_ARGUMENT;
    d[3].shard_dtype = TIDE_F32;
    d[4].grad_dtype = TIDE_NONE;
    t.nodes = 3;
    t.local = 2;
    o.n_stg = 3;
    o.chunk = 64;
    o.multicast = 1;
    assert_int_equal(tide_plan_create(&t, d, 5, &o, &plan), TIDE_OK);
    /* N = 6: a = 17 * 6 + 2 = 104 elements, b = 667; ring: groups 0, 2, 3, 4 on slots 0, 1, 0, 1; group 1 alone on 2 */
    assert_int_equal(plan->groups[0].geo.elements, 104);
    assert_int_equal(plan->groups[1].geo.elements, 667);
    const uint32_t slots[] = {0, 2, 1, 0, 1};
    for (int i = 0; i < 5; i++)
        assert_int_equal(plan->groups[i].slot, slots[i]);
    assert_int_equal(plan->n_slots, 3);
    assert_int_equal(plan->map.region[REGION_LANDING].banks[0].bytes, 8192);       /* 6 * 667 * 2 */
    assert_int_equal(plan->map.region[REGION_LANDING].banks[1].bytes, 1280 + 256); /* 6 * 102 * 2 and 6 * 2 * 2 */
    assert_int_equal(plan->map.region[REGION_LANDING].banks[2].offset, 8192 + 1536);
    assert_int_equal(plan->map.region[REGION_RESIDENT].bytes, 3 * 256 + 1536); /* 208, 1334, 208, not 3, 208 */
    assert_int_equal(plan->map.region[REGION_STAGE].bytes, 4096);              /* 3 * 1334: a cast keeps slot 0 too */
    assert_int_equal(plan->map.region[REGION_STAGING].bytes, 3 * 256);         /* one peer, two rows of 64 bf16 */
    /* E_sub = 336: two rows of fp32; 2 remote nodes; waves of 2 and 1 */
    assert_int_equal(plan->map.block_stride, 2816);
    assert_int_equal(plan->rs.n_out, 2);
    assert_int_equal(plan->rs.n_par, 2);
    assert_int_equal(plan->map.region[REGION_OUTBOX].bytes, 2 * 2 * 2816);
    assert_int_equal(plan->map.region[REGION_SPARE].bytes, 2 * 2816);
    assert_int_equal(plan->map.region[REGION_INBOX].bytes, 2 * 2 * 2816);
    for (uint32_t rank = 0; rank < 6; rank++) {
        assert_int_equal(tide_plan_bytes(plan, rank, &bytes), TIDE_OK);
        assert_int_equal(bytes.landing, rank % 2 ? 0 : 8192 + 1536 + 8192);
        assert_int_equal(bytes.control, (2 + 3) * 2 * 2 * 64 + 2 * 3 * 16 * 4 * 16);
        assert_int_equal(bytes.total, bytes.control + bytes.landing + bytes.resident + bytes.stage + bytes.staging +
                                          bytes.outbox + bytes.spare + bytes.inbox);
    }
    assert_int_equal(tide_plan_bytes(plan, 6, &bytes), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(), "rank: 6 is not in 0..5");
    for (int i = 0; i < REGION_COUNT; i++) /* banks lie one after the other */
        for (uint32_t k = 0, at = 0; k < plan->map.region[i].n_banks; k++) {
            assert_int_equal(plan->map.region[i].banks[k].offset, at);
            assert_int_equal(at % TIDE_ALIGN, 0);
            at += (uint32_t)plan->map.region[i].banks[k].bytes;
        }
    tide_plan_destroy(plan);
}

static void one_node_and_one_rank_need_little(void **state)
{
    tide_bytes b = TIDE_BYTES_INIT;
    tide_plan *plan;
    (void)state;
    assert_int_equal(make_plan(1, 4, 4096, NULL, &plan), TIDE_OK);
    assert_int_equal(tide_plan_bytes(plan, 3, &b), TIDE_OK);
    assert_int_equal(b.stage + b.outbox + b.spare + b.inbox, 0);
    assert_int_equal(b.staging, 2 * 3 * 1024 * 2);
    assert_int_equal(b.landing, 8192);
    tide_plan_destroy(plan);
    assert_int_equal(make_plan(1, 1, 4096, NULL, &plan), TIDE_OK);
    assert_int_equal(tide_plan_bytes(plan, 0, &b), TIDE_OK);
    assert_int_equal(b.staging, 0);
    tide_plan_destroy(plan);
    assert_int_equal(make_plan(4, 2, 0, NULL, &plan), TIDE_OK); /* a group without elements */
    assert_int_equal(tide_plan_bytes(plan, 0, &b), TIDE_OK);
    assert_int_equal(b.total, b.control);
    tide_plan_destroy(plan);
}

static void resolved_options_are_a_fixed_point(void **state)
{
    (void)state;
    for (uint32_t m = 1; m <= 20; m++)
        for (int mode = 0; mode <= 1; mode++) {
            tide_options o = TIDE_OPTIONS_INIT, resolved = TIDE_OPTIONS_INIT, again = TIDE_OPTIONS_INIT;
            tide_plan *plan, *same;
            o.mode = mode;
            assert_int_equal(make_plan(m, 4, 1000 * m, &o, &plan), TIDE_OK);
            assert_int_equal(tide_plan_options(plan, &resolved), TIDE_OK);
            assert_int_equal(tide_options_check(&resolved), TIDE_OK);
            assert_int_equal(resolved.w_wave, 4);
            assert_true(resolved.k >= 1 && resolved.n_par >= 1 && resolved.n_part == 1 && resolved.n_out >= 1);
            assert_true(resolved.chunk >= 16 && resolved.c_sum >= 1 && resolved.c_land >= 1 && resolved.multicast == 0);
            assert_int_equal(make_plan(m, 4, 1000 * m, &resolved, &same), TIDE_OK);
            assert_int_equal(tide_plan_options(same, &again), TIDE_OK);
            assert_memory_equal(&again, &resolved, sizeof again);
            assert_true(tide_plan_digest(plan) == tide_plan_digest(same) && tide_plan_digest(plan) != 0);
            tide_plan_destroy(same);
            assert_int_equal(make_plan(m, 4, 1000 * m + 4 * m, &resolved, &same), TIDE_OK);
            assert_true(tide_plan_digest(plan) != tide_plan_digest(same));
            tide_plan_destroy(same);
            tide_plan_destroy(plan);
        }
}

static void bad_plans_name_the_field(void **state)
{
    static const struct {
        uint32_t nodes, local;
        const char *knob;
        int64_t value;
        int code;
        const char *text;
    } bad[] = {
        {0, 1, "k", 1, TIDE_ERR_ARGUMENT, "nodes: 0 is not in 1..1024"},
        {1025, 1, "k", 1, TIDE_ERR_ARGUMENT, "nodes: 1025 is not in 1..1024"},
        {1, 0, "k", 1, TIDE_ERR_ARGUMENT, "local: 0 is not in 1..64"},
        {1, 65, "k", 1, TIDE_ERR_ARGUMENT, "local: 65 is not in 1..64"},
        {9, 8, "n_par", 1, TIDE_ERR_ARGUMENT, "n_par: 1, expected 2 for a plan of 2 waves (w_wave 8, n_part 1)"},
        {9, 8, "n_out", 3, TIDE_ERR_ARGUMENT,
         "n_out: 3, expected at least 8: two consecutive rounds send that many blocks (k 4)"},
        {9, 8, "w_wave", 3, TIDE_ERR_UNSUPPORTED,
         "w_wave: 3 with 9 nodes of 8: contributors 8 and 9 of wave 2 would share an inbox block; expected a divisor "
         "of 8"},
    };
    tide_topology t = TIDE_TOPOLOGY_INIT;
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    tide_options o = TIDE_OPTIONS_INIT;
    const tide_param p = {"p", 1, 0, {8}}, huge = {"p", 1, 0, {INT64_C(1) << 60}};
    tide_plan *plan = NULL;
    char text[100];
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tide_options knob = TIDE_OPTIONS_INIT;
        assert_int_equal(tide_options_set(&knob, bad[i].knob, bad[i].value), TIDE_OK);
        assert_int_equal(make_plan(bad[i].nodes, bad[i].local, 1000, &knob, &plan), bad[i].code);
        assert_string_equal(tide_last_error(), bad[i].text);
    }
#define REJECTED(call, message)                                                                                        \
    do {                                                                                                               \
        assert_int_equal(call, TIDE_ERR_ARGUMENT);                                                                     \
        assert_string_equal(tide_last_error(), message);                                                               \
    } while (0)
#define WITH(field, value, message)                                                                                    \
    do {                                                                                                               \
        tide_group_desc two[2] = {d, d};                                                                               \
        two[1].field = value;                                                                                          \
        REJECTED(tide_plan_create(&t, two, 2, NULL, &plan), message);                                                  \
    } while (0)
    d.n_params = 1;
    d.params = &p;
    REJECTED(tide_plan_create(NULL, &d, 1, NULL, &plan), "topology: NULL, expected a tide_topology");
    REJECTED(tide_plan_create(&t, NULL, 1, NULL, &plan), "groups: NULL, expected 1 descriptions");
    REJECTED(tide_plan_create(&t, &d, 0, NULL, &plan), "n_groups: 0 is not in 1..65000");
    REJECTED(tide_plan_create(&t, &d, 1, NULL, NULL), "out: NULL, expected where to put the plan");
    o.size = 3;
    snprintf(text, sizeof text, "options.size: 3, expected %zu", sizeof o);
    REJECTED(tide_plan_create(&t, &d, 1, &o, &plan), text);
    WITH(n_params, 0, "group 1 n_params: 0 is not in 1..4096");
    WITH(n_params, 4097, "group 1 n_params: 4097 is not in 1..4096");
    WITH(params, NULL, "group 1 params: NULL, expected 1 descriptions");
    WITH(dtype, 9, "group 1 dtype: 9 is not fp32, bf16, fp16 or opaque");
    WITH(dtype, TIDE_NONE, "group 1 dtype: 4 is not fp32, bf16, fp16 or opaque");
    WITH(dtype, TIDE_OPAQUE, "group 1 item_size: 0, expected the bytes of an opaque item");
    WITH(item_size, 4, "group 1 item_size: 4, expected 0 for dtype bf16");
    WITH(shard_dtype, TIDE_F32,
         "group 1 shard_dtype: fp32 differs from dtype bf16, which needs input TIDE_INPUT_ARGUMENT");
    WITH(shard_dtype, TIDE_OPAQUE, "group 1 shard_dtype: opaque, expected bf16 or a dtype that can be cast to it");
    WITH(grad_dtype, TIDE_OPAQUE, "group 1 grad_dtype: 3 is not fp32, bf16, fp16 or none");
    WITH(input, 2, "group 1 input: 2 is not TIDE_INPUT_ADOPTED or TIDE_INPUT_ARGUMENT");
    WITH(landing, -1, "group 1 landing: -1 is not TIDE_LANDING_RING or TIDE_LANDING_PRIVATE");
    snprintf(text, sizeof text, "group 1 size: 1, expected %zu (TIDE_GROUP_DESC_INIT)", sizeof d);
    WITH(size, 1, text);
    o.size = sizeof o;
    o.chunk = 16;
    assert_int_equal(make_plan(1, 1, INT64_C(1) << 60, &o, &plan), TIDE_ERR_ARGUMENT);
    assert_string_equal(tide_last_error(),
                        "chunk: 16 cuts the 1152921504606846976 elements of group 0 into more than 2^32 chunks");
    d.params = &huge; /* every group fits, the landings together do not */
    tide_group_desc many[8];
    for (int i = 0; i < 8; i++) {
        many[i] = d;
        many[i].landing = TIDE_LANDING_PRIVATE;
    }
    REJECTED(tide_plan_create(&t, many, 8, NULL, &plan), "groups: region landing would exceed 2^63 bytes");
    assert_null(plan);
    tide_plan_destroy(NULL);
}

static void every_failed_allocation_is_reported(void **state)
{
    tide_plan *plan = NULL;
    uint64_t n = 1;
    (void)state;
    for (;; n++) {
        tide_alloc_fail_at(n);
        int status = make_plan(3, 2, 1000, NULL, &plan);
        tide_alloc_fail_at(0);
        if (status == TIDE_OK)
            break;
        assert_int_equal(status, TIDE_ERR_MEMORY);
        assert_null(plan);
    }
    assert_true(n > 10);
    tide_plan_destroy(plan);
}

static void planning_is_fast(void **state)
{
    static const struct {
        uint32_t nodes;
        double limit_ms;
    } cases[] = {{64, 5}, {1024, 200}};
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        tide_topology t = TIDE_TOPOLOGY_INIT;
        tide_group_desc d = TIDE_GROUP_DESC_INIT;
        tide_param params[30];
        tide_plan *plan;
        int64_t start;
        for (int p = 0; p < 30; p++)
            params[p] = (tide_param){"w", 2, 0, {1000 + 77 * p, 512}};
        d.n_params = 30;
        d.params = params;
        t.nodes = cases[i].nodes;
        t.local = 8;
        start = spent_ns();
        assert_int_equal(tide_plan_create(&t, &d, 1, NULL, &plan), TIDE_OK);
        assert_true((double)(spent_ns() - start) / 1e6 < cases[i].limit_ms);
        tide_plan_destroy(plan);
    }
}

/* 396 GB/s arrive. L = 2, bf16: 198 G elements a second, 4 bytes read and 4 written each, 25 GB/s a CTA: 63.4, and half as many
 * more. L = 8: 28.3 G elements, 20 bytes: 22.6. */
static void one_node_of_gpus(void **state)
{
    tide_options o = TIDE_OPTIONS_INIT;
    struct { uint32_t local; int64_t elements, chunk, c_sum; } cases[] = {
        {2, 16 << 20, 4 << 20, 96}, {8, 4 << 20, 1 << 20, 34}};
    (void)state;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tide_plan *gpu = NULL, *cpu = NULL;
        o.target = 1;
        assert_int_equal(make_plan(1, cases[i].local, 32 << 20, &o, &gpu), TIDE_OK);
        assert_int_equal(gpu->groups[0].geo.elements, cases[i].elements);
        assert_int_equal(gpu->options.chunk, cases[i].chunk);
        assert_int_equal(gpu->options.c_sum, cases[i].c_sum);
        o.target = 0;
        assert_int_equal(make_plan(1, cases[i].local, 32 << 20, &o, &cpu), TIDE_OK);
        assert_true(cpu->options.chunk < gpu->options.chunk);
        tide_plan_destroy(gpu);
        tide_plan_destroy(cpu);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_gather_rounds_cover_every_slot),
        cmocka_unit_test(audit_counts),
        cmocka_unit_test(one_node_of_gpus),
        cmocka_unit_test(collision_names_wave_and_contributors),
        cmocka_unit_test(masks_follow_the_latin_square),
        cmocka_unit_test(partial_outbox_is_two_rounds),
        cmocka_unit_test(ranges_tile_the_packed_output),
        cmocka_unit_test(solver_reproduces_the_paper),
        cmocka_unit_test(closed_forms_give_the_papers_constants),
        cmocka_unit_test(exact_memory_keeps_the_bound),
        cmocka_unit_test(fixed_chunks_bring_in_place_to_056),
        cmocka_unit_test(regions_are_what_they_must_hold),
        cmocka_unit_test(one_node_and_one_rank_need_little),
        cmocka_unit_test(resolved_options_are_a_fixed_point),
        cmocka_unit_test(bad_plans_name_the_field),
        cmocka_unit_test(every_failed_allocation_is_reported),
        cmocka_unit_test(planning_is_fast),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
