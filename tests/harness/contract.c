/* contract.c - see contract.h. */
#include <stdlib.h>

#include "contract.h"

enum { ROOM = 64 };

static float number(uint32_t key, uint32_t rank, uint32_t input, uint64_t element)
{
    uint64_t h = tide_fnv_u64(tide_fnv_u64(tide_fnv_u64(key * 131 + 7, rank), input), element);
    return (float)((int)(h >> 40 & 127) - 64);
}

static uint64_t bytes_of(const verify_contract *c, uint32_t i)
{
    return (i < c->n_inputs ? c->input_bytes[i] : c->elements * 4) + ROOM;
}

void **contract_buffers(const verify_contract *c)
{
    void **buffers = calloc(c->n_inputs + 1, sizeof *buffers);

    for (uint32_t i = 0; buffers && i <= c->n_inputs; i++) {
        buffers[i] = malloc(bytes_of(c, i));
        if (!buffers[i]) {
            contract_buffers_free(c, buffers);
            return NULL;
        }
        memset(buffers[i], 0xff, bytes_of(c, i));
    }
    return buffers;
}

void contract_buffers_free(const verify_contract *c, void **buffers)
{
    for (uint32_t i = 0; buffers && i <= c->n_inputs; i++)
        free(buffers[i]);
    free(buffers);
}

static void fill(void *to, int dtype, uint32_t key, uint32_t rank, uint32_t input, uint64_t first, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float x = number(key, rank, input, first + i);
        uint16_t h = tide_f32_to_bf16(x);
        if (dtype == TIDE_F32)
            memcpy((char *)to + 4 * i, &x, 4);
        else
            memcpy((char *)to + 2 * i, &h, 2);
    }
}

void contract_give(const verify_contract *c, uint32_t key, uint32_t rank, void **buffers, uint8_t *resident)
{
    bool gather = c->kind == VERIFY_AG;

    if (gather && c->adopted)
        fill(resident + c->resident, c->in_dtype, key, rank, 0, 0, c->packed / c->in_item);
    for (uint32_t i = 0; i < c->n_inputs; i++)
        fill(buffers[i], c->in_dtype, key, rank, gather ? 0 : i, gather ? c->input_offset[i] / c->in_item : 0,
             c->input_bytes[i] / c->in_item);
}

void contract_take(const verify_contract *c, void **buffers)
{
    for (uint32_t i = 0; i < c->n_inputs; i++)
        memset(buffers[i], 0xee, c->input_bytes[i]);
}

bool contract_landing_right(const verify_contract *c, uint32_t key, const uint8_t *landing, uint64_t *wrong)
{
    for (uint32_t i = 0; i < c->n_spans; i++) {
        const verify_span *s = &c->spans[i];
        for (uint64_t row = 0; row < s->rows; row++) {
            uint64_t at = s->at + row * s->at_pitch, from = s->from + row * s->from_pitch;
            for (uint64_t x = 0; x < s->width; x += c->out_item) {
                uint16_t is, expected = tide_f32_to_bf16(number(key, s->source, 0, (from + x) / c->out_item));
                memcpy(&is, landing + at + x, 2);
                if (is != expected) {
                    *wrong = at + x;
                    return false;
                }
            }
        }
    }
    return true;
}

bool contract_output_right(const verify_contract *c, uint32_t key, uint32_t n_ranks, uint32_t rank, const float *out,
                           uint64_t *wrong)
{
    for (uint32_t i = c->first_span[rank]; i < c->first_span[rank + 1]; i++) {
        const verify_span *s = &c->spans[i];
        for (uint64_t k = 0; k < s->rows * s->width; k++) {
            uint64_t at = s->at + k / s->width * s->at_pitch + k % s->width,
                     from = s->from + k / s->width * s->from_pitch + k % s->width;
            float sum = 0;
            for (uint32_t r = 0; r < n_ranks; r++)
                sum += number(key, r, s->source, from);
            if (out[at] != sum) {
                *wrong = at;
                return false;
            }
        }
    }
    return true;
}

tide_plan *contract_plan(uint32_t nodes, uint32_t local, const char *const (*knobs)[2])
{
    static const tide_param params[] = {
        {"a", 2, 0, {9, 2}}, {"b", 1, 0, {5}}, {"c", 2, 0, {12, 3}}, {"d", 2, 1, {2, 12}}};
    const tide_group_desc init = TIDE_GROUP_DESC_INIT;
    tide_topology topology = TIDE_TOPOLOGY_INIT;
    tide_options options = TIDE_OPTIONS_INIT;
    tide_group_desc groups[CONTRACT_GROUPS];
    tide_plan *plan = NULL;

    topology.nodes = nodes;
    topology.local = local;
    for (; (*knobs)[0]; knobs++)
        if (tide_options_set(&options, (*knobs)[0], strtoll((*knobs)[1], NULL, 10)) != TIDE_OK)
            return NULL;
    for (uint32_t g = 0; g < CONTRACT_GROUPS; g++) {
        groups[g] = init;
        groups[g].params = params;
        groups[g].n_params = sizeof params / sizeof *params - g;
        groups[g].input = g ? TIDE_INPUT_ARGUMENT : TIDE_INPUT_ADOPTED;
    }
    return tide_plan_create(&topology, groups, CONTRACT_GROUPS, &options, &plan) == TIDE_OK ? plan : NULL;
}
