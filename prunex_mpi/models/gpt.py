"""Decoder-only transformers for text, of standard parts.

A name is a size and what differs from GPT-2, as nanoGPT has it: `gpt_nano`, `gpt_small-rms-rotary`.

    suffix    instead of
    -rms      LayerNorm: RMSNorm
    -rotary   learned positions: rotary ones
    -swiglu   GELU: SwiGLU, of as many weights
    -gqa      keys and values of each head: each two heads share them
    -untied   the weights of the embedding: an output layer with weights of its own
    -w64      the size's width: 64, in fewer heads that are as wide

There are no biases and no dropout. Export writes this file as a part of load_model.py.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Layers, heads and width: nanoGPT's two models of Shakespeare's characters, and GPT-2.
GPT_SIZES = {"gpt_nano": (4, 4, 128), "gpt_micro": (6, 6, 384), "gpt_small": (12, 12, 768)}
GPT_VARIANTS = ("rms", "rotary", "swiglu", "gqa", "untied")
ROTARY_BASE = 10_000.0
INITIAL_STD = 0.02


@dataclass(frozen=True)
class GptShape:
    """The size of a transformer and its variants."""

    layers: int
    heads: int
    width: int
    variants: frozenset[str] = frozenset()


def gpt_shape(name: str) -> GptShape | None:
    """Return what a name of a model stands for, None where it is none of these."""
    size, *variants = name.split("-")
    if size not in GPT_SIZES:
        return None
    layers, heads, width = GPT_SIZES[size]
    head_dim = width // heads
    # An even number of heads where two share keys and values.
    least = 2 * head_dim if "gqa" in variants else head_dim
    narrower = {f"w{narrow}" for narrow in range(least, width, least)}
    narrow = [variant for variant in variants if variant in narrower]
    if len(narrow) == 1:
        variants.remove(narrow[0])
        width = int(narrow[0][1:])
    if not set(variants) <= set(GPT_VARIANTS) or len(set(variants)) < len(variants):
        return None
    return GptShape(layers, width // head_dim, width, frozenset(variants))


class Gpt(nn.Module):
    """A decoder-only transformer with norms before attention and MLP (Radford et al. 2019)."""

    def __init__(self, shape: GptShape, vocab_size: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, shape.width)
        rotary = "rotary" in shape.variants
        self.positions = None if rotary else nn.Embedding(context, shape.width)
        self.rotation = Rotation(shape.width // shape.heads, context) if rotary else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)
        for block in self.blocks:
            # The residual stream is a sum of so many outputs.
            for layer in (block.attention.out, block.mlp.down):
                nn.init.normal_(layer.weight, std=INITIAL_STD / math.sqrt(2 * shape.layers))
        if "untied" not in shape.variants:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens int64 [n, length] to logits [n, length, vocab_size] of those that follow."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.head(self.norm(x))


class Rotation(nn.Module):
    """Rotary positions: pairs of channels turned by angles that grow with position.

    Channel i is paired with i + head_dim / 2 (Su et al. 2021, equation 34).
    """

    def __init__(self, head_dim: int, context: int) -> None:
        super().__init__()
        speeds = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(context, dtype=torch.float64)[:, None] * speeds.repeat(2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn queries or keys [n, heads, length, head_dim]."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        length = x.shape[-2]
        return x * self.cos[:length] + turned * self.sin[:length]


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(shape), CausalAttention(shape)
        self.mlp_norm, self.mlp = _norm(shape), Mlp(shape)

    def forward(self, x: Tensor, rotation: nn.Module | None) -> Tensor:
        """Map [n, length, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class CausalAttention(nn.Module):
    """Attention of each position to itself and those before it."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        shared = shape.width // 2 if "gqa" in shape.variants else shape.width
        self.queries = nn.Linear(shape.width, shape.width, bias=False)
        self.keys = nn.Linear(shape.width, shared, bias=False)
        self.values = nn.Linear(shape.width, shared, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: nn.Module | None) -> Tensor:
        """Map [n, length, width] to the same shape."""
        layers = self.queries, self.keys, self.values
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in layers)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        grouped = q.shape[1] != k.shape[1]
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """GELU between two layers, or SwiGLU: a third layer is the gate (Shazeer 2020)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        gated = "swiglu" in shape.variants
        units = 8 * math.ceil(shape.width / 3) if gated else 4 * shape.width
        self.gate = nn.Linear(shape.width, units, bias=False) if gated else None
        self.up = nn.Linear(shape.width, units, bias=False)
        self.down = nn.Linear(units, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, length, width] to the same shape."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _norm(shape: GptShape) -> nn.Module:
    if "rms" in shape.variants:
        return nn.RMSNorm(shape.width, eps=1e-5)
    return nn.LayerNorm(shape.width, bias=False)
