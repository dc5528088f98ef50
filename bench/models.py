"""Blocks with the real dimensions of three models, in plain torch: what bench/train.py trains. No embeddings and no head:
a block is what FSDP2 communicates.

Weights are parameters of the blocks as their authors' modules have them; the arithmetic is what training does (RMS norms,
rotary embeddings, fused attention, SwiGLU, grouped expert GEMMs), the routing of the experts is balanced and fixed.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class Size:
    block: type
    width: int
    blocks: int
    tokens: int  # a GPU
    checkpointed: bool


class Linear(nn.Linear):
    def reset_parameters(self):
        pass  # fill() does it


class Rotary(nn.Module):
    def __init__(self, head_dim, base=500000.0):
        super().__init__()
        self.head_dim, self.base, self._tables = head_dim, base, None

    def forward(self, *tensors):
        length = tensors[0].size(-2)
        if self._tables is None or self._tables[0].size(-2) != length:
            half = torch.arange(0, self.head_dim, 2, device=tensors[0].device) / self.head_dim
            angles = torch.outer(torch.arange(length, device=tensors[0].device), self.base**-half)
            cos, sin = angles.cos(), angles.sin()
            self._tables = [torch.cat(pair, -1).to(tensors[0].dtype) for pair in ((cos, cos), (-sin, sin))]
        cos, sin = self._tables
        return [torch.addcmul(x * cos, x.roll(self.head_dim // 2, -1), sin) for x in tensors]


class Attention(nn.Module):
    """Grouped-query self-attention; norms of queries and keys where the model has them."""

    def __init__(self, width, heads, kv_heads, head_dim, bias=False, causal=True, normed=None):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.causal = heads, kv_heads, head_dim, causal
        self.q, self.k = Linear(width, heads * head_dim, bias), Linear(width, kv_heads * head_dim, bias)
        self.v, self.o = Linear(width, kv_heads * head_dim, bias), Linear(heads * head_dim, width, bias)
        self.q_norm = self.k_norm = nn.Identity()
        self.across = normed == "across heads"
        if normed:
            sizes = (heads * head_dim, kv_heads * head_dim) if self.across else (head_dim, head_dim)
            self.q_norm, self.k_norm = (nn.RMSNorm(n, eps=1e-6) for n in sizes)
        self.rotary = Rotary(head_dim)

    def _heads(self, x, n):
        return x.view(*x.shape[:-1], n, self.head_dim).transpose(1, 2)

    def forward(self, x, context=None):
        q, k, v = self.q(x), self.k(x if context is None else context), self.v(x if context is None else context)
        if self.across:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self._heads(q, self.heads), self._heads(k, self.kv_heads), self._heads(v, self.kv_heads)
        if not self.across:
            q, k = self.q_norm(q), self.k_norm(k)
        if context is None:
            q, k = self.rotary(q, k)
        causal, grouped = self.causal and context is None, self.kv_heads != self.heads
        a = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return self.o(a.transpose(1, 2).reshape(*x.shape[:-1], -1))


class SwiGLU(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = Linear(width, hidden, bias=False), Linear(width, hidden, bias=False)
        self.down = Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Dispatch(torch.autograd.Function):
    """Each token's row once for each of its experts, in the order of the experts. The gradient goes back by the inverse,
    without atomics."""

    @staticmethod
    def forward(ctx, x, token_of_row, row_of_choice):
        ctx.save_for_backward(row_of_choice)
        return x[token_of_row]

    @staticmethod
    def backward(ctx, grad):
        (row_of_choice,) = ctx.saved_tensors
        return grad[row_of_choice].sum(1), None, None


class _Collect(torch.autograd.Function):
    """[tokens, choices, width]: the rows that a token's experts have made."""

    @staticmethod
    def forward(ctx, rows, row_of_choice, choice_of_row):
        ctx.save_for_backward(choice_of_row)
        return rows[row_of_choice]

    @staticmethod
    def backward(ctx, grad):
        (choice_of_row,) = ctx.saved_tensors
        return grad.flatten(0, 1)[choice_of_row], None, None


def grouped_mm(x, weights, offsets):
    """x of [rows sorted by expert, in], weights of [experts, out, in] -> [rows, out]."""
    if x.is_cuda and hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm(x, weights.transpose(-2, -1), offs=offsets)
    rows = x.view(weights.size(0), -1, x.size(1))  # balanced
    return torch.bmm(rows, weights.transpose(-2, -1)).reshape(x.size(0), -1)


class Experts(nn.Module):
    def __init__(self, width, hidden, experts, top):
        super().__init__()
        self.experts, self.top = experts, top
        self.router = Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self._routes = None

    def _route(self, tokens, device):
        """(choice of each row, row of each choice, expert of each choice, ends of the experts' rows): random, balanced,
        the same in every step. A choice is one of a token's `top` experts; rows are sorted by expert."""
        if self._routes is None or self._routes[0].numel() != tokens * self.top:
            generator = torch.Generator(device=device).manual_seed(tokens)
            rows = tokens * self.top
            choice_of_row = torch.randperm(rows, generator=generator, device=device)
            row_of_choice = torch.empty_like(choice_of_row)
            row_of_choice[choice_of_row] = torch.arange(rows, device=device)
            row_of_choice = row_of_choice.view(tokens, self.top)
            each = rows // self.experts
            ends = torch.arange(each, rows + 1, each, device=device, dtype=torch.int32)
            self._routes = choice_of_row, row_of_choice, row_of_choice // each, ends
        return self._routes

    def forward(self, x):
        flat = x.view(-1, x.size(-1))
        choice_of_row, row_of_choice, expert, ends = self._route(flat.size(0), x.device)
        weight = torch.softmax(self.router(flat).float(), -1).gather(1, expert)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        rows = _Dispatch.apply(flat, choice_of_row // self.top, row_of_choice)
        hidden = F.silu(grouped_mm(rows, self.gate, ends)) * grouped_mm(rows, self.up, ends)
        out = _Collect.apply(grouped_mm(hidden, self.down, ends), row_of_choice, choice_of_row)
        return torch.bmm(weight.unsqueeze(1), out).view_as(x)


class LlamaBlock(nn.Module):
    def __init__(self, width=8192, heads=64, kv_heads=8, hidden=28672):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, kv_heads, width // heads)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class QwenBlock(nn.Module):
    def __init__(self, width=2048, heads=32, kv_heads=4, head_dim=128, hidden=768, experts=128, top=8):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, kv_heads, head_dim, normed="each head")
        self.mlp = Experts(width, hidden, experts, top)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class WanBlock(nn.Module):
    TEXT = 512

    def __init__(self, width=5120, heads=40, hidden=13824):
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 6, width))
        self.self_attn, self.cross_attn = (
            Attention(width, heads, heads, width // heads, bias=True, causal=False, normed="across heads") for _ in range(2)
        )
        self.norm3 = nn.LayerNorm(width, eps=1e-6)
        self.ffn = nn.Sequential(Linear(width, hidden), nn.GELU(approximate="tanh"), Linear(hidden, width))
        self._text = None

    def forward(self, x):
        width = x.size(-1)
        if self._text is None:
            generator = torch.Generator(device=x.device).manual_seed(7)
            self._text = torch.randn(1, self.TEXT, width, device=x.device, generator=generator).to(x.dtype)
        shift, scale, gate, shift2, scale2, gate2 = self.modulation.unbind(1)
        normed = torch.addcmul(shift, F.layer_norm(x, (width,), eps=1e-6), 1 + scale)
        x = torch.addcmul(x, gate, self.self_attn(normed))
        x = x + self.cross_attn(self.norm3(x), self._text)
        normed = torch.addcmul(shift2, F.layer_norm(x, (width,), eps=1e-6), 1 + scale2)
        return torch.addcmul(x, gate2, self.ffn(normed))


class Stack(nn.Module):
    def __init__(self, size, blocks=None):
        super().__init__()
        self.checkpointed = size.checkpointed
        self.blocks = nn.ModuleList(size.block() for _ in range(blocks or size.blocks))
        self.norm = nn.RMSNorm(size.width, eps=1e-5)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.norm(x)


SIZES = {
    "llama-3.1-70b": Size(LlamaBlock, 8192, 6, 8192, True),
    "qwen3-30b-a3b": Size(QwenBlock, 2048, 8, 16384, False),
    "wan2.2-t2v-a14b": Size(WanBlock, 5120, 8, 15600, False),
}


@torch.no_grad()
def fill(model, seed):
    """Weights as training finds them: matrices N(0, 1/in), norms around one. Shards of FSDP2 are filled in place, each
    rank its own values."""
    for k, (name, p) in enumerate(model.named_parameters()):
        local = p._local_tensor if hasattr(p, "_local_tensor") else p
        generator = torch.Generator(device=local.device).manual_seed(seed + 7919 * k)
        if "norm" in name and name.endswith("weight"):
            local.fill_(1.0)
        elif name.endswith("bias"):
            local.zero_()
        else:
            local.normal_(0.0, p.size(-1) ** -0.5, generator=generator)
