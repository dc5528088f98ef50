/*
 * agree.c - what must be equal on all ranks is compared before anything depends on it.
 *
 * Equal ranks exchange one short table. Only when it differs do they look closer: which group, which parameter, which
 * field; every step is taken by all ranks alike, since all see the same exchanged values.
 */
#include <stdarg.h>
#include <stdio.h>

#include "comm/comm.h"

enum { MAX_RANKS = TIDE_MAX_NODES * TIDE_MAX_LOCAL, NAME_BYTES = 64, TEXT_BYTES = 448 };

int comm_agree_size(const fab_open *open)
{
    /* On the stack and large enough for any group, since n_ranks is what is in doubt. Entries nobody writes keep the
     * preset. */
    uint16_t seen[MAX_RANKS], own = (uint16_t)(open->n_ranks - 1);
    uint32_t n = open->n_ranks;
    int status;

    for (uint32_t r = 0; r < MAX_RANKS; r++)
        seen[r] = own;
    status = fab_allgather(open, &own, seen, sizeof own);
    if (status != TIDE_OK)
        return status;
    for (uint32_t r = 0; r < n; r++) { /* as far as the largest belief, so that all see the same difference */
        if ((uint32_t)seen[r] + 1 > n)
            n = (uint32_t)seen[r] + 1;
        if (seen[r] != seen[0])
            return tide_fail(TIDE_ERR_MISMATCH, "n_ranks: %u on rank 0, %u on rank %u", seen[0] + 1u, seen[r] + 1u, r);
    }
    own = (uint16_t)open->rank;
    for (uint32_t r = 0; r < MAX_RANKS; r++)
        seen[r] = UINT16_MAX;
    status = fab_allgather(open, &own, seen, sizeof own);
    for (uint32_t r = 0; status == TIDE_OK && r < n; r++) {
        if (seen[r] != r)
            return tide_fail(TIDE_ERR_MISMATCH,
                             "rank: entry %u of the all-gather came from rank %u; expected rank order and %u entries",
                             r, seen[r], n);
    }
    return status;
}

/* ---- text: "2 on ranks 0-2, 4 on rank 3" -------------------------------------------------------- */

typedef struct line {
    char text[TEXT_BYTES];
    size_t used;
} line;

static void put(line *l, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(line *l, const char *format, ...)
{
    va_list args;
    int n;
    va_start(args, format);
    n = vsnprintf(l->text + l->used, sizeof l->text - l->used, format, args);
    va_end(args);
    l->used = n < 0 ? l->used : tide_min_u64(l->used + (size_t)n, sizeof l->text - 1);
}

static void put_value(line *l, int kind, const void *value)
{
    int64_t v;
    if (kind < 0) { /* a name */
        put(l, "'%.*s'", NAME_BYTES - 1, (const char *)value);
        return;
    }
    memcpy(&v, value, sizeof v);
    if (kind == VALUE_KNOB && v == TIDE_AUTO)
        put(l, "auto");
    else if (kind == VALUE_HEX)
        put(l, "%016llx", (unsigned long long)v);
    else if (kind == VALUE_VERSION)
        put(l, "%lld.%lld.%lld", (long long)(v >> 16), (long long)(v >> 8 & 0xff), (long long)(v & 0xff));
    else
        put(l, "%lld", (long long)v);
}

/* Ranks whose value equals that of `which`, as ranges. */
static void put_ranks(line *l, const char *values, size_t stride, size_t bytes, uint32_t n_ranks, uint32_t which)
{
    uint32_t count = 0, ranges = 0;
    line list = {{0}, 0};
    for (uint32_t r = 0, end; r < n_ranks; r = end) {
        for (end = r; end < n_ranks && memcmp(values + end * stride, values + which * stride, bytes) == 0; end++)
            count++;
        if (end == r) {
            end++;
            continue;
        }
        if (++ranges > 6)
            continue; /* counted, not listed */
        put(&list, ranges > 1 ? ", " : "");
        if (end - r > 1)
            put(&list, "%u-%u", r, end - 1);
        else
            put(&list, "%u", r);
    }
    put(l, "%s %s%s", count > 1 ? "ranks" : "rank", list.text, ranges > 6 ? " and others" : "");
}

/* Every distinct value with the ranks that hold it, in rank order of its first holder; four of them are enough to see.
 */
static int mismatch(const char *where, const char *name, int kind, const char *values, size_t stride, size_t bytes,
                    uint32_t n_ranks)
{
    line l = {{0}, 0};
    uint32_t distinct = 0;

    put(&l, "%s%s: ", where, name);
    for (uint32_t r = 0; r < n_ranks; r++) {
        bool known = false;
        for (uint32_t q = 0; q < r && !known; q++)
            known = memcmp(values + q * stride, values + r * stride, bytes) == 0;
        if (known)
            continue;
        if (++distinct > 4) {
            put(&l, ", ...");
            break;
        }
        put(&l, distinct > 1 ? ", " : "");
        put_value(&l, kind, values + r * stride);
        put(&l, " on ");
        put_ranks(&l, values, stride, bytes, n_ranks, r);
    }
    return tide_fail(TIDE_ERR_MISMATCH, "%s", l.text);
}

static bool all_equal(const char *values, size_t stride, size_t bytes, uint32_t n_ranks)
{
    for (uint32_t r = 1; r < n_ranks; r++) {
        if (memcmp(values + r * stride, values, bytes) != 0)
            return false;
    }
    return true;
}

int comm_agree_fields(const fab_open *open, int64_t *scratch, const char *where, const comm_field *fields,
                      uint32_t n_fields)
{
    int64_t own[COMM_FIELDS] = {0};
    size_t stride = n_fields * sizeof(int64_t);
    int status;

    for (uint32_t i = 0; i < n_fields; i++)
        own[i] = fields[i].value;
    status = fab_allgather(open, own, scratch, stride);
    for (uint32_t i = 0; status == TIDE_OK && i < n_fields; i++) {
        const char *values = (const char *)(scratch + i);
        if (!all_equal(values, stride, sizeof(int64_t), open->n_ranks))
            status = mismatch(where, fields[i].name, fields[i].kind, values, stride, sizeof(int64_t), open->n_ranks);
    }
    return status;
}

static int agree_name(const fab_open *open, int64_t *scratch, const char *where, const char *name)
{
    char own[NAME_BYTES] = {0};
    int status;
    snprintf(own, sizeof own, "%s", name ? name : "");
    status = fab_allgather(open, own, scratch, sizeof own);
    if (status == TIDE_OK && !all_equal((const char *)scratch, NAME_BYTES, NAME_BYTES, open->n_ranks))
        status = mismatch(where, "name", -1, (const char *)scratch, NAME_BYTES, NAME_BYTES, open->n_ranks);
    return status;
}

/* ---- signatures --------------------------------------------------------------------------------- */

enum { GROUP_FIELDS = 7, PARAM_FIELDS = 2 + TIDE_MAX_DIMS };

static void param_fields(const tide_param *p, comm_field out[PARAM_FIELDS])
{
    static const char *const dims[TIDE_MAX_DIMS] = {"dims[0]", "dims[1]", "dims[2]", "dims[3]",
                                                    "dims[4]", "dims[5]", "dims[6]", "dims[7]"};
    out[0] = (comm_field){"ndim", VALUE_INT, p->ndim};
    out[1] = (comm_field){"shard_dim", VALUE_INT, p->shard_dim};
    for (int d = 0; d < TIDE_MAX_DIMS; d++)
        out[2 + d] = (comm_field){dims[d], VALUE_INT, d < p->ndim ? p->dims[d] : 0};
}

static void group_fields(const tide_group_desc *g, comm_field out[GROUP_FIELDS])
{
    out[0] = (comm_field){"n_params", VALUE_INT, g->n_params};
    out[1] = (comm_field){"dtype", VALUE_INT, g->dtype};
    out[2] = (comm_field){"item_size", VALUE_INT, g->item_size};
    out[3] = (comm_field){"shard_dtype", VALUE_INT, g->shard_dtype};
    out[4] = (comm_field){"grad_dtype", VALUE_INT, g->grad_dtype};
    out[5] = (comm_field){"input", VALUE_INT, g->input};
    out[6] = (comm_field){"landing", VALUE_INT, g->landing};
}

static uint64_t digest_fields(uint64_t h, const comm_field *fields, uint32_t n, const char *name)
{
    for (uint32_t i = 0; i < n; i++)
        h = tide_fnv_u64(h, (uint64_t)fields[i].value);
    return tide_fnv_bytes(h, name ? name : "", name ? strlen(name) + 1 : 1);
}

static uint64_t param_digest(const void *items, uint32_t i)
{
    const tide_param *p = (const tide_param *)items + i;
    comm_field fields[PARAM_FIELDS];
    param_fields(p, fields);
    return digest_fields(TIDE_FNV_BASIS, fields, PARAM_FIELDS, p->name);
}

static uint64_t group_digest(const void *items, uint32_t i)
{
    const tide_group_desc *g = (const tide_group_desc *)items + i;
    comm_field fields[GROUP_FIELDS];
    uint64_t h;
    group_fields(g, fields);
    h = digest_fields(TIDE_FNV_BASIS, fields, GROUP_FIELDS, g->name);
    for (uint32_t p = 0; p < g->n_params; p++)
        h = tide_fnv_u64(h, param_digest(g->params, p));
    return h;
}

/* C  Index of the first of n items whose digest differs; n when none does. */
static int first_difference(const fab_open *open, int64_t *scratch, const void *items, uint32_t n,
                            uint64_t (*digest)(const void *items, uint32_t i), uint32_t *index)
{
    for (uint32_t base = 0; base < n; base += COMM_FIELDS) {
        uint32_t count = (uint32_t)tide_min_u64(COMM_FIELDS, n - base);
        uint64_t own[COMM_FIELDS];
        int status;
        for (uint32_t i = 0; i < count; i++)
            own[i] = digest(items, base + i);
        status = fab_allgather(open, own, scratch, count * sizeof own[0]);
        if (status != TIDE_OK)
            return status;
        for (uint32_t i = 0; i < count; i++) {
            if (!all_equal((const char *)(scratch + i), count * sizeof own[0], sizeof own[0], open->n_ranks)) {
                *index = base + i;
                return TIDE_OK;
            }
        }
    }
    *index = n;
    return TIDE_OK;
}

/* "group 3 'layers.3' " : the name only once all ranks are known to use it. */
static int explain_group(const fab_open *open, int64_t *scratch, const tide_group_desc *groups, uint32_t g)
{
    char where[256];
    comm_field fields[GROUP_FIELDS > PARAM_FIELDS ? GROUP_FIELDS : PARAM_FIELDS];
    const tide_group_desc *group = &groups[g];
    const tide_param *param;
    uint32_t p;
    int used, status;

    snprintf(where, sizeof where, "group %u ", g);
    status = agree_name(open, scratch, where, group->name);
    if (status != TIDE_OK)
        return status;
    used = group->name && group->name[0] ? snprintf(where, sizeof where, "group %u '%.63s' ", g, group->name)
                                         : snprintf(where, sizeof where, "group %u ", g);
    group_fields(group, fields);
    status = comm_agree_fields(open, scratch, where, fields, GROUP_FIELDS);
    if (status == TIDE_OK)
        status = first_difference(open, scratch, group->params, group->n_params, param_digest, &p);
    if (status != TIDE_OK)
        return status;
    if (p == group->n_params) /* the names differ past what agree_name compares */
        return tide_fail(TIDE_ERR_MISMATCH, "%sname: differs after its first %d bytes", where, NAME_BYTES - 1);
    param = &group->params[p];
    snprintf(where + used, sizeof where - (size_t)used, "param %u ", p);
    status = agree_name(open, scratch, where, param->name);
    if (status != TIDE_OK)
        return status;
    if (param->name && param->name[0])
        snprintf(where + used, sizeof where - (size_t)used, "param %u '%.63s' ", p, param->name);
    param_fields(param, fields);
    status = comm_agree_fields(open, scratch, where, fields, PARAM_FIELDS);
    return status != TIDE_OK
               ? status
               : tide_fail(TIDE_ERR_MISMATCH, "%sname: differs after its first %d bytes", where, NAME_BYTES - 1);
}

int comm_agree_groups(const fab_open *open, int64_t *scratch, int status, const tide_group_desc *groups,
                      uint32_t n_groups, int64_t multicast, uint64_t plan_digest)
{
    comm_field table[2] = {{"n_groups", VALUE_INT, n_groups}, {"fabric multicast", VALUE_INT, multicast}};
    comm_field plan = {"plan digest", VALUE_HEX, (int64_t)plan_digest};
    uint32_t g;

    status = fab_agree(open, status);
    if (status == TIDE_OK)
        status = comm_agree_fields(open, scratch, "", table, 2);
    if (status == TIDE_OK)
        status = first_difference(open, scratch, groups, n_groups, group_digest, &g);
    if (status == TIDE_OK && g < n_groups)
        status = explain_group(open, scratch, groups, g);
    if (status == TIDE_OK)
        status = comm_agree_fields(open, scratch, "", &plan, 1);
    return status;
}
