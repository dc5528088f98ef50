/* solver.c - CTA budgets and round width from rates (paper App. G, equations 13 and 14). */
#include <math.h>

#include "plan/plan.h"

const plan_rates plan_rates_paper = {47.5e9, 99e9, 21e9, 90e9, 1.3e-3};

enum { MAX_CTAS = 148, MAX_K = 4 };
static const double gamma_skew = 1.5;  /* slack for ranks that arrive late */
static const double eta_tail = 0.05;   /* the last wave's landing may take this share of the wire time */
static const double round_share = 0.1; /* waits of all rounds may take this share of the wire time */

/* Rounds of a pass: waves of w_wave contributors 1..M, the own node (c = M) sends nothing. */
static uint32_t count_rounds(uint32_t nodes, uint32_t w_wave, uint32_t k)
{
    uint32_t rounds = 0;
    for (uint32_t first = 1; first < nodes; first += w_wave) {
        uint32_t remote = nodes - first < w_wave ? nodes - first : w_wave;
        rounds += (remote + k - 1) / k;
    }
    return rounds;
}

double plan_wire_bytes(uint32_t local, double s32_bytes, uint32_t grad_item)
{
    return local == 1 ? s32_bytes / sizeof(float) * grad_item : s32_bytes;
}

static uint32_t clamp_ctas(double wanted)
{
    return wanted >= MAX_CTAS ? MAX_CTAS : wanted >= 1 ? (uint32_t)wanted : 1;
}

void plan_solve(const plan_rates *rates, uint32_t nodes, uint32_t local, uint32_t w_wave, uint32_t n_part,
                uint64_t s32_bytes, uint32_t grad_item, plan_choice *out)
{
    double t_nic = (double)(nodes - 1) * plan_wire_bytes(local, (double)s32_bytes, grad_item) / rates->bw_nic;
    double traffic = local * (double)grad_item / 4 + 1; /* bytes read and written for each output byte */
    double land = t_nic > 0 ? ceil((double)s32_bytes / n_part / (eta_tail * t_nic * rates->bw_land)) : 1;

    out->c_sum = local == 1 ? 1 : clamp_ctas(ceil(gamma_skew * traffic * rates->bw_nic / rates->bw_sum));
    out->c_land = clamp_ctas(fmin(land, floor(rates->bw_cap / rates->bw_land)));
    out->k = 1;
    if (nodes < 2)
        return;
    out->k = nodes - 1 < 2 ? nodes - 1 : 2;
    while (out->k < MAX_K) {
        uint32_t wider = out->k * 2 < nodes - 1 ? out->k * 2 : nodes - 1;
        uint32_t rounds = count_rounds(nodes, w_wave, out->k);
        if (rounds * rates->t_round <= round_share * t_nic || count_rounds(nodes, w_wave, wider) >= rounds)
            break;
        out->k = wider;
    }
}

/* Two H200s on NVLink, measured: a peer's pushes arrive at 396 GB/s, a thin CTA adds at 25 GB/s. */
const plan_node_rates plan_node_rates_h200 = {396e9, 25e9};

/* A sum also starts, waits for its chunk and posts: with 96 CTAs instead of 64 two H200s are 3 to 9 % faster at 32 to 512 MiB,
 * with 132 no more than 1 % beyond that. */
static const double node_slack = 1.5;

uint32_t plan_solve_node(const plan_node_rates *rates, uint32_t local, uint32_t grad_item)
{
    double arriving, traffic;

    if (local < 2)
        return 1;
    arriving = rates->bw_link / ((local - 1) * (double)grad_item); /* elements a second, complete with all peers' parts */
    traffic = arriving * (local * (double)grad_item + sizeof(float));
    return clamp_ctas(ceil(node_slack * traffic / rates->bw_sum));
}
