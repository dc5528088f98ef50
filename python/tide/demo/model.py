"""A byte-level transformer, and the text it learns from."""

import sysconfig
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

TOKENS, WIDTH, HEADS, BLOCKS, CONTEXT = 256, 192, 4, 4, 64  # 1.9 M parameters
TEXT_LIMIT = 8 << 20


# Weights and gradients are bf16, activations fp32: a CPU without bf16 matrix units gains nothing from rounding them, and a
# single weight that rounds the other way would otherwise show in every activation behind it.


class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.float())


class Norm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.float(), self.eps)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_attention, self.norm_mlp = Norm(WIDTH), Norm(WIDTH)
        self.qkv, self.out = Linear(WIDTH, 3 * WIDTH, bias=False), Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = Linear(WIDTH, 4 * WIDTH, bias=False), Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = Norm(WIDTH), Linear(WIDTH, TOKENS, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, Linear):  # embeddings keep torch's N(0, 1)
                into_residual = 0.2 if name.endswith((".out", ".down")) else 1.0
                nn.init.normal_(module.weight, std=into_residual * module.in_features**-0.5)

    def forward(self, x):
        h = self.tokens(x).float() + self.positions(torch.arange(x.size(1), device=x.device)).float()
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def read_text(where=None):
    """(bytes, what they are): a file, the files of a folder, or the standard library's sources."""
    root = Path(where or sysconfig.get_path("stdlib"))
    if root.is_file():
        files = [root]
    elif where:
        files = sorted(p for p in root.rglob("*") if p.is_file())
    else:
        files = sorted(root.glob("*.py")) + sorted(
            p for d in ("asyncio", "email", "json") for p in (root / d).glob("*.py")
        )
    data = bytearray()
    for file in files:
        if len(data) >= TEXT_LIMIT:
            break
        data += file.read_bytes()
    if len(data) <= CONTEXT:
        raise SystemExit(f"demo: TEXT: {root} has {len(data)} bytes, expected more than {CONTEXT}")
    return bytes(data[:TEXT_LIMIT]), f"{len(files)} files, {min(len(data), TEXT_LIMIT) / 1e6:.1f} MB, {root}"


def batch_of(text, step, rank, size):
    """(inputs, targets): `size` windows of CONTEXT bytes, other ones for each step and rank."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(0, len(text) - CONTEXT, (size,), generator=generator)
    windows = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long()
    return windows[:, :-1], windows[:, 1:]
