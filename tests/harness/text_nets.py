"""Networks that read tokens: ours in all variants, transformers' own, and some written by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from prunex_mpi.models.gpt import Gpt, GptShape
from prunex_mpi.models.inputs import Tokens

TOKENS = Tokens(vocabulary=19, context=8)
WIDTH, HEADS = 32, 4


class Logits(nn.Module):
    """What a user's factory makes of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits


def _decoder(kind: str, vocab_size: int, context: int, **options: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=context,
        **options,
    )
    return Logits(getattr(transformers, f"{kind}ForCausalLM")(config))


def llama(vocab_size: int, context: int) -> nn.Module:
    return _decoder("Llama", vocab_size, context)


def llama_tied(vocab_size: int, context: int) -> nn.Module:
    return _decoder("Llama", vocab_size, context, tie_word_embeddings=True, attention_bias=True)


def qwen2(vocab_size: int, context: int) -> nn.Module:
    return _decoder("Qwen2", vocab_size, context)


def gpt2(vocab_size: int, context: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=vocab_size, n_positions=context, n_embd=WIDTH, n_layer=2, n_head=HEADS
    )
    return Logits(transformers.GPT2LMHeadModel(config))


def ours(vocab_size: int, context: int, *variants: str) -> nn.Module:
    return Gpt(GptShape(2, HEADS, WIDTH, frozenset(variants)), vocab_size, context)


def our_llama(vocab_size: int, context: int) -> nn.Module:
    return ours(vocab_size, context, "rms", "rotary", "swiglu", "gqa", "untied")


class HandNorm(nn.Module):
    """RMSNorm as in the code of Llama's authors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class HandAttention(nn.Module):
    """Attention as in nanoGPT without fused kernels, with a norm of queries and keys."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        mask = torch.tril(torch.ones(context, context)).view(1, 1, context, context)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (p.view(b, t, self.n_head, -1).transpose(1, 2) for p in parts)
        q, k = (F.rms_norm(p, (p.shape[-1],)) for p in (q, k))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, self.n_embd))


class ByHand(nn.Module):
    """A transformer whose positions are a parameter, and whose GELU is spelt out."""

    def __init__(self, vocab_size: int, context: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(1, context, WIDTH))
        self.norms = nn.ModuleList(HandNorm(WIDTH) for _ in range(3))
        self.attention = HandAttention(context)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.place[:, : tokens.shape[1]]
        x = x + self.attention(self.norms[0](x))
        y = self.up(self.norms[1](x))
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        return self.head(self.norms[2](x + self.down(y)))


by_hand = ByHand
FACTORIES = [f"text_nets:{name}" for name in ("llama", "llama_tied", "gpt2", "by_hand")]
OURS = [
    "gpt_nano",
    *(f"gpt_nano-{v}" for v in ("rms", "rotary", "swiglu", "gqa", "untied")),
    "gpt_nano-rms-rotary-swiglu-gqa-untied",
    "gpt_nano-rotary-gqa",
]
