/* Geometry against brute force: every element of every parameter is located by counting. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "geometry/geometry.h"

static tide_topology topo(uint32_t nodes, uint32_t local)
{
    tide_topology t = TIDE_TOPOLOGY_INIT;
    t.nodes = nodes;
    t.local = local;
    return t;
}

static int init_one(geo_group *g, uint32_t nodes, uint32_t local, const tide_param *params, uint32_t n)
{
    tide_topology t = topo(nodes, local);
    tide_group_desc d = TIDE_GROUP_DESC_INIT;
    d.n_params = n;
    d.params = params;
    return geo_group_init(g, &t, &d, 3);
}

static void rows_are_padded_and_packed(void **state)
{
    const tide_param params[] = {
        {"w", 2, 0, {10, 3}}, {"b", 1, 0, {3}}, {"scalar", 0, 0, {0}}, {"empty", 2, 0, {0, 7}}, {NULL, 3, 1, {2, 8, 5}},
    };
    geo_group g;
    (void)state;
    assert_int_equal(init_one(&g, 2, 2, params, 5), TIDE_OK);
    /* N = 4: ceil(10 / 4) = 3 rows of 3; 1 row; 1 row; nothing; 2 strips of 2 * 5 */
    const uint64_t shard[] = {9, 1, 1, 0, 20}, offset[] = {0, 9, 10, 11, 11}, whole[] = {30, 3, 1, 0, 80};
    for (int i = 0; i < 5; i++) {
        assert_int_equal(g.params[i].shard, shard[i]);
        assert_int_equal(g.params[i].offset, offset[i]);
        assert_int_equal(g.params[i].whole, whole[i]);
        assert_int_equal(g.params[i].landing % TIDE_ALIGN, 0);
    }
    assert_int_equal(g.elements, 31);
    assert_int_equal(g.shard_bytes, 62);
    assert_int_equal(g.landing_bytes, 4 * TIDE_ALIGN); /* 72, 8, 8, 0 and 160 bytes */
    assert_string_equal(g.params[0].name, "w");
    assert_string_equal(g.params[4].name, "");
    const uint64_t valid0[] = {9, 9, 9, 3}, valid1[] = {1, 1, 1, 0}, valid2[] = {1, 0, 0, 0};
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(geo_valid(&g.params[0], r), valid0[r]);
        assert_int_equal(geo_valid(&g.params[1], r), valid1[r]);
        assert_int_equal(geo_valid(&g.params[2], r), valid2[r]);
        assert_int_equal(geo_valid(&g.params[3], r), 0);
        assert_int_equal(geo_valid(&g.params[4], r), 20);
    }
    geo_group_clear(&g);
}

/* Spans of every [begin, end) of every rank enumerate exactly the elements that indexing by coordinates finds. */
static void spans_match_coordinates(void **state)
{
    const tide_param params[] = {
        {"a", 2, 0, {10, 3}}, {"b", 3, 1, {3, 8, 2}}, {"c", 2, 1, {4, 4}}, {"d", 2, 1, {1, 12}}};
    geo_group g;
    (void)state;
    assert_int_equal(init_one(&g, 1, 4, params, 4), TIDE_OK);
    for (uint32_t i = 0; i < g.n_params; i++) {
        const geo_param *p = &g.params[i];
        const tide_param *t = &params[i];
        for (uint32_t r = 0; r < 4; r++) {
            uint64_t where[64], n = 0;
            if (t->shard_dim == 0) {
                for (uint64_t e = 0; e < p->shard; e++)
                    where[n++] = r * p->shard + e;
            } else { /* walk the full tensor in row-major order and keep what belongs to r */
                uint64_t inner = t->ndim == 3 ? (uint64_t)t->dims[2] : 1, mid = (uint64_t)t->dims[1];
                for (uint64_t e = 0; e < p->whole; e++)
                    if (e / inner % mid / (mid / 4) == r)
                        where[n++] = e;
            }
            assert_int_equal(n, p->shard);
            for (uint64_t begin = 0; begin <= n; begin++)
                for (uint64_t end = begin; end <= n; end++) {
                    geo_span span[3];
                    uint64_t at = begin;
                    int count = geo_spans(p, 4, r, begin, end, span);
                    assert_in_range(count, begin < end, begin < end ? 3 : 0);
                    for (int k = 0; k < count; k++) {
                        assert_true(span[k].rows > 0 && span[k].width > 0);
                        for (uint64_t row = 0; row < span[k].rows; row++)
                            for (uint64_t x = 0; x < span[k].width; x++) {
                                assert_int_equal(span[k].shard + row * span[k].shard_pitch + x, at);
                                assert_int_equal(span[k].full + row * span[k].full_pitch + x, where[at]);
                                at++;
                            }
                    }
                    assert_int_equal(at, end);
                }
        }
    }
    geo_group_clear(&g);
}

static void subset_packs_anew(void **state)
{
    const tide_param params[] = {{"a", 1, 0, {10}}, {"b", 1, 0, {7}}, {"c", 2, 0, {4, 4}}};
    const uint8_t present[] = {1, 0, 1};
    uint32_t index[3];
    geo_group g, sub;
    (void)state;
    assert_int_equal(init_one(&g, 1, 2, params, 3), TIDE_OK);
    assert_int_equal(geo_group_subset(&sub, &g, present, index), TIDE_OK);
    assert_int_equal(sub.n_params, 2);
    assert_int_equal(index[1], 2);
    assert_int_equal(sub.params[1].offset, 5);
    assert_int_equal(sub.params[1].landing, g.params[2].landing);
    assert_int_equal(sub.elements, 13);
    assert_string_equal(sub.params[1].name, "c");
    geo_group_clear(&sub);
    assert_int_equal(geo_group_subset(&sub, &g, NULL, NULL), TIDE_OK);
    assert_int_equal(sub.elements, g.elements);
    geo_group_clear(&sub);
    geo_group_clear(&g);
}

static void bad_descriptions_name_the_field(void **state)
{
    static const struct {
        tide_param param;
        const char *text;
    } bad[] = {
        {{"a", 9, 0, {0}}, "group 3 param 0 ndim: 9 is not in 0..8"},
        {{"a", -1, 0, {0}}, "group 3 param 0 ndim: -1 is not in 0..8"},
        {{"a", 2, 0, {4, -5}}, "group 3 param 0 dims[1]: -5 is negative"},
        {{"a", 2, 2, {4, 4}}, "group 3 param 0 shard_dim: 2 is not in 0..1"},
        {{"a", 0, 1, {0}}, "group 3 param 0 shard_dim: 1 is not in 0..0"},
        {{"a", 2, 1, {4, 6}}, "group 3 param 0 dims[1]: 6 is not a multiple of the 4 ranks, as shard_dim 1 > 0 needs"},
        {{"a", 1, 0, {INT64_MAX}}, "group 3 param 0: the parameter padded over all ranks exceeds 2^63 bytes"},
        {{"a", 3, 0, {INT64_C(1) << 31, INT64_C(1) << 31, 4}},
         "group 3 param 0: the parameter padded over all ranks exceeds 2^63 bytes"},
        {{"a", 2, 1, {INT64_C(1) << 40, INT64_C(1) << 40}},
         "group 3 param 0: the parameter padded over all ranks exceeds 2^63 bytes"},
        {{"a", 1, 0, {INT64_C(1) << 61}}, "group 3 param 0: the parameter padded over all ranks exceeds 2^63 bytes"},
    };
    geo_group g;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(init_one(&g, 2, 2, &bad[i].param, 1), TIDE_ERR_ARGUMENT);
        assert_string_equal(tide_last_error(), bad[i].text);
    }
    /* each fits, the sum does not */
    const tide_param three[] = {
        {"a", 1, 0, {INT64_C(1) << 60}}, {"b", 1, 0, {INT64_C(1) << 60}}, {"c", 1, 0, {INT64_C(1) << 60}}};
    assert_int_equal(init_one(&g, 2, 2, three, 1), TIDE_OK);
    geo_group_clear(&g);
    assert_int_equal(init_one(&g, 2, 2, three, 3), TIDE_ERR_ARGUMENT);
}

static void every_failed_allocation_is_reported(void **state)
{
    const tide_param params[] = {{"a", 1, 0, {10}}, {"b", 1, 0, {7}}};
    geo_group g;
    uint64_t n = 1;
    (void)state;
    for (;; n++) {
        tide_alloc_fail_at(n);
        int status = init_one(&g, 1, 2, params, 2);
        tide_alloc_fail_at(0);
        if (status == TIDE_OK)
            break;
        assert_int_equal(status, TIDE_ERR_MEMORY);
    }
    assert_int_equal(n, 5); /* two names of parameters, the group's, the array */
    for (n = 1; n < 10; n++) {
        geo_group sub;
        tide_alloc_fail_at(n);
        int status = geo_group_subset(&sub, &g, NULL, NULL);
        tide_alloc_fail_at(0);
        if (status == TIDE_OK) {
            geo_group_clear(&sub);
            break;
        }
        assert_int_equal(status, TIDE_ERR_MEMORY);
    }
    assert_int_equal(n, 5);
    geo_group_clear(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_padded_and_packed),
        cmocka_unit_test(spans_match_coordinates),
        cmocka_unit_test(subset_packs_anew),
        cmocka_unit_test(bad_descriptions_name_the_field),
        cmocka_unit_test(every_failed_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
