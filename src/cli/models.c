/*
 * models.c - the parameters of one transformer block of three public models, as their configuration files give them.
 *
 * A block is what FSDP2 users wrap, so a block is a group. All are Shard(0).
 */
#include "cli/cli.h"

#define ADD(name, ...)                                                                                              \
    do {                                                                                                            \
        const int64_t dims_[] = {__VA_ARGS__};                                                                      \
        *ok = *ok && cli_shapes_add(s, name, (int)(sizeof dims_ / sizeof dims_[0]), dims_, 0);                      \
    } while (0)

/* hidden_size 8192, 64 heads and 8 key-value heads of 128, intermediate_size 28672 */
static void add_llama(cli_shapes *s, bool *ok)
{
    ADD("self_attn.q_proj.weight", 64 * 128, 8192);
    ADD("self_attn.k_proj.weight", 8 * 128, 8192);
    ADD("self_attn.v_proj.weight", 8 * 128, 8192);
    ADD("self_attn.o_proj.weight", 8192, 64 * 128);
    ADD("mlp.gate_proj.weight", 28672, 8192);
    ADD("mlp.up_proj.weight", 28672, 8192);
    ADD("mlp.down_proj.weight", 8192, 28672);
    ADD("input_layernorm.weight", 8192);
    ADD("post_attention_layernorm.weight", 8192);
}

/* hidden_size 2048, 32 heads and 4 key-value heads of 128, 128 experts of moe_intermediate_size 768. The experts'
 * matrices are stacked, one parameter a projection, as grouped matrix products take them. */
static void add_qwen3(cli_shapes *s, bool *ok)
{
    ADD("self_attn.q_proj.weight", 32 * 128, 2048);
    ADD("self_attn.k_proj.weight", 4 * 128, 2048);
    ADD("self_attn.v_proj.weight", 4 * 128, 2048);
    ADD("self_attn.o_proj.weight", 2048, 32 * 128);
    ADD("self_attn.q_norm.weight", 128);
    ADD("self_attn.k_norm.weight", 128);
    ADD("mlp.gate.weight", 128, 2048);
    ADD("mlp.experts.gate_proj", 128, 768, 2048);
    ADD("mlp.experts.up_proj", 128, 768, 2048);
    ADD("mlp.experts.down_proj", 128, 2048, 768);
    ADD("input_layernorm.weight", 2048);
    ADD("post_attention_layernorm.weight", 2048);
}

#define ADD_LINEAR(name, out, in)                                                                                   \
    do {                                                                                                            \
        ADD(name ".weight", out, in);                                                                               \
        ADD(name ".bias", out);                                                                                     \
    } while (0)
#define ADD_WAN_ATTENTION(name)                                                                                     \
    do {                                                                                                            \
        ADD_LINEAR(name ".q", 5120, 5120);                                                                          \
        ADD_LINEAR(name ".k", 5120, 5120);                                                                          \
        ADD_LINEAR(name ".v", 5120, 5120);                                                                          \
        ADD_LINEAR(name ".o", 5120, 5120);                                                                          \
        ADD(name ".norm_q.weight", 5120);                                                                           \
        ADD(name ".norm_k.weight", 5120);                                                                           \
    } while (0)

/* dim 5120, 40 heads, ffn_dim 13824, cross_attn_norm and qk_norm on: one of the two noise experts */
static void add_wan(cli_shapes *s, bool *ok)
{
    ADD("modulation", 1, 6, 5120);
    ADD_WAN_ATTENTION("self_attn");
    ADD("norm3.weight", 5120);
    ADD("norm3.bias", 5120);
    ADD_WAN_ATTENTION("cross_attn");
    ADD_LINEAR("ffn.0", 13824, 5120);
    ADD_LINEAR("ffn.2", 5120, 13824);
}

/* Of Qwen3's 128 experts a token meets 8. Its grouped matrix products fill every SM, so that a resident kernel makes them take a
 * second wave: 1.7 times as long under any ring kernel (paper 2.2). */
const cli_model cli_models[] = {
    {"llama-3.1-70b", "one of 80 decoder layers of Llama 3.1 70B", add_llama, 80, 0, 0},
    {"qwen3-30b-a3b", "one of 48 decoder layers of Qwen3-30B-A3B, experts included", add_qwen3, 48,
     120.0 / 128 * 3 * 128 * 768 * 2048, 1.7},
    {"wan2.2-t2v-a14b", "one of 40 blocks of a noise expert of Wan2.2-T2V-A14B", add_wan, 40, 0, 0},
};
const size_t cli_n_models = sizeof cli_models / sizeof cli_models[0];
