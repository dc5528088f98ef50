/*
 * audit.c - `tide verify --audit`: every wave plan at L = 8 against the definition (paper App. D and 5.3).
 *
 * The planner's answer is compared with a naive simulation of inbox blocks: contributor c's partial lies, on local rank
 * j, in block (j + c mod M) mod L; a block may be written once a wave, and when a wave lands, it holds this wave's
 * bytes or zeros.
 */
#include <stdlib.h>

#include "cli/cli.h"
#include "plan/plan.h"

enum { LOCAL = 8, MAX_K = 32, MAX_PART = 4, MAX_WAVE = 8 };

typedef struct audit_counts { uint64_t accepted[MAX_PART + 1], rejected, wrong_rejections, wrong; } audit_counts;

/* Do two contributors of a wave meet in a block? */
static bool collides(uint32_t nodes, uint32_t width)
{
    for (uint32_t first = 1; first <= nodes; first += width) {
        for (uint32_t j = 0; j < LOCAL; j++) {
            bool taken[LOCAL] = {false};
            for (uint32_t c = first; c < first + width && c <= nodes; c++) {
                uint32_t block = (j + c % nodes) % LOCAL;
                if (taken[block])
                    return true;
                taken[block] = true;
            }
        }
    }
    return false;
}

/* Two calls of all waves, block by block. */
static bool stale_free(const plan_rs *rs, uint32_t width)
{
    uint32_t waves = rs->n_waves * rs->n_part;
    for (uint32_t j = 0; j < LOCAL; j++) {
        uint64_t holds[2][LOCAL] = {{0}}; /* number of the wave whose bytes lie there; 0: zeros */
        uint64_t now = 0;
        for (uint32_t call = 0; call < 2; call++) {
            for (uint32_t g = 0; g < waves; g++) {
                uint32_t first = 1 + g % rs->n_waves * width, generation = g % rs->n_par;
                uint64_t zeroed = plan_rs_stale_mask(rs, g, j);
                now++;
                for (uint32_t s = 0; s < LOCAL; s++)
                    if (zeroed >> s & 1)
                        holds[generation][s] = 0;
                for (uint32_t c = first; c < first + width && c <= rs->nodes; c++) {
                    uint32_t block = (j + c % rs->nodes) % LOCAL;
                    if (zeroed >> block & 1)
                        return false; /* a fill would meet an arrival */
                    holds[generation][block] = now;
                }
                for (uint32_t s = 0; s < LOCAL; s++)
                    if (holds[generation][s] && holds[generation][s] != now)
                        return false;
            }
        }
    }
    return true;
}

/* Rounds take every remote contributor once, in order, k at most at a time and never across waves. Returns how many
 * outbox blocks keep sums two rounds ahead of the rail; 0 when the rounds are wrong. */
static uint32_t outbox_need(const plan_rs *rs, uint32_t width, uint32_t k)
{
    uint32_t c = 1, need = 0, before = 0, round = 0;
    if (rs->k > k || rs->n_waves != (rs->nodes + width - 1) / width)
        return 0;
    for (uint32_t w = 0; w < rs->n_waves; w++) {
        uint32_t end = 1 + (w + 1) * width < rs->nodes ? 1 + (w + 1) * width : rs->nodes; /* of remote contributors */
        uint32_t rounds = c < end ? (end - c + rs->k - 1) / rs->k : 0;
        if (rs->waves[w].first_round != round || rs->waves[w].n_rounds != rounds || rs->waves[w].first != 1 + w * width)
            return 0;
        for (; rounds > 0; rounds--, round++) {
            const plan_round *r = &rs->rounds[round];
            if (r->first != c || r->count < 1 || r->count > rs->k || c + r->count > end)
                return 0;
            need = r->count + before > need ? r->count + before : need;
            before = r->count;
            c += r->count;
        }
    }
    if (rs->n_part > 1 && rs->rounds[0].count + before > need) /* from one pass to the next */
        need = rs->rounds[0].count + before;
    return c == rs->nodes && round == rs->n_rounds && rs->n_blocks == rs->n_part * (rs->nodes - 1) ? need : 0;
}

/* One (M, W_wave) with every k, outbox and number of passes. */
static int audit_width(uint32_t nodes, uint32_t width, audit_counts *counts)
{
    bool bad = collides(nodes, width);
    for (uint32_t part = 1; part <= MAX_PART; part++) {
        uint32_t waves = (nodes + width - 1) / width * part;
        bool fresh = true, clean = true;
        for (uint32_t k = 1; k <= MAX_K; k++) {
            plan_rs rs;
            uint32_t need;
            int status = plan_rs_init(&rs, nodes, LOCAL, width, k, waves == 1 ? 1 : 2, part, 0);
            if (status == TIDE_ERR_MEMORY)
                return status;
            if (status != TIDE_OK) { /* with a full outbox and with a partial one */
                counts->rejected += part == 1 ? 2 : 0;
                counts->wrong_rejections += part == 1 && !bad ? 2 : 0;
                continue;
            }
            if (fresh) /* waves do not depend on k: outbox_need compares them */
                clean = !bad && stale_free(&rs, width);
            fresh = false;
            counts->accepted[part] += 2;
            need = outbox_need(&rs, width, k);
            counts->wrong += !clean || need == 0 || need > rs.n_blocks;
            counts->wrong += !clean || need == 0 || need != plan_rs_partial_outbox(&rs);
            plan_rs_clear(&rs);
        }
    }
    return TIDE_OK;
}

int cli_audit(const cli *c)
{
    audit_counts counts = {{0}, 0, 0, 0};
    bool accepted;
    plan_rs rs;

    for (uint32_t nodes = 2; nodes <= TIDE_MAX_NODES; nodes++)
        for (uint32_t width = 1; width <= MAX_WAVE; width++)
            if (audit_width(nodes, width, &counts) != TIDE_OK)
                return cli_fail_library(c);
    accepted = plan_rs_init(&rs, 9, LOCAL, 3, 2, 2, 1, 0) == TIDE_OK; /* contributors 8 and 9 meet in wave 2 */
    counts.wrong += accepted;
    if (accepted)
        plan_rs_clear(&rs);
    if (c->json) {
        printf("{\"schema\": 1, \"accepted\": %llu, \"rejected\": %llu, \"wrongly_accepted\": %llu, "
               "\"wrongly_rejected\": %llu}\n",
               (unsigned long long)counts.accepted[1], (unsigned long long)counts.rejected,
               (unsigned long long)counts.wrong, (unsigned long long)counts.wrong_rejections);
    } else {
        printf("plans: M 2..%d, L %d, W_wave 1..%d, k 1..%d, full and partial outbox\n", TIDE_MAX_NODES, LOCAL,
               MAX_WAVE, MAX_K);
        for (uint32_t part = 2; part <= MAX_PART; part++)
            printf("n_part %u: %llu accepted\n", part, (unsigned long long)counts.accepted[part]);
        printf("M 9, W_wave 3: %s%s\n", accepted ? "accepted" : "rejected: ", accepted ? "" : tide_last_error());
        if (counts.wrong_rejections)
            printf("%llu rejected without a collision\n", (unsigned long long)counts.wrong_rejections);
        printf("audit: %llu accepted, %llu rejected, %llu accepted with a collision or a stale block\n",
               (unsigned long long)counts.accepted[1], (unsigned long long)counts.rejected,
               (unsigned long long)counts.wrong);
    }
    return counts.wrong || counts.wrong_rejections ? CLI_WRONG : CLI_OK;
}
