"""Modules for sizes that pruning leaves and torch's and torchvision's modules can't have.

They replace the originals and have the same names of parameters.
"""

import copy
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import swin_transformer as swin

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# The keys under which heads of a SlimSelfAttention and channels of a SlimRMSNorm are stated.
ATTENTION_HEADS, RMS_FEATURES = "self_attention_heads", "rms_norm_features"
# Sizes of inputs at which an epsilon of RMSNorm shows.
RMS_SCALES = (1.0, 1e-2, 1e-3, 1e-4, 1e-5)
BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


@torch.no_grad()
def norm_dim(module: nn.LayerNorm) -> int | None:
    """Return the dimension that a LayerNorm normalises, -1 or 1; None for any other kind."""
    if len(module.normalized_shape) != 1 or module.weight is None:
        return None
    if type(module).forward is nn.LayerNorm.forward:
        return -1
    # A subclass may normalise the second dimension: it is tried.
    x = torch.linspace(-1, 1, 12 * module.weight.numel()).to(module.weight)
    x = x.view(2, 2, 3, -1).square()
    wanted = F.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
    for dim in (-1, 1):
        try:
            found = module(x.movedim(-1, dim)).movedim(dim, -1)
        # Its own code may raise anything.
        except Exception:
            continue
        if found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=1e-4):
            return dim
    return None


class SlimLayerNorm(nn.Module):
    """LayerNorm over `width` channels, of which only some are present and the others are zero."""

    def __init__(self, kept: int, width: int, eps: float, bias: bool, dim: int) -> None:
        super().__init__()
        self.width, self.eps, self.dim = width, eps, dim
        self.weight = nn.Parameter(torch.ones(kept))
        self.bias = nn.Parameter(torch.zeros(kept)) if bias else None

    @classmethod
    def fitting(
        cls, module: "nn.LayerNorm | SlimLayerNorm", num_features: int
    ) -> "nn.LayerNorm | SlimLayerNorm":
        """Return `module`, or a smaller one with fresh weights unless it has `num_features`."""
        if num_features == module.weight.numel():
            return module
        slim = isinstance(module, SlimLayerNorm)
        dim = module.dim if slim else norm_dim(module)
        if dim is None or num_features > module.weight.numel():
            raise ValueError(f"a {type(module).__name__} can't be made {num_features} wide")
        width = module.width if slim else module.normalized_shape[0]
        new = cls(num_features, width, module.eps, module.bias is not None, dim)
        new.to(module.weight).train(module.training)
        return new

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., kept], or [n, kept, ...] with `dim` 1, to the same shape."""
        given, x = x.dtype, x.movedim(self.dim, -1)
        # As torch's own, which computes 16-bit inputs in float32.
        x = x.float() if x.element_size() < 4 else x
        mean = x.sum(-1, keepdim=True) / self.width
        centred = x - mean
        # Absent channels are zeros, each (0 - mean)^2 from the mean.
        squares = centred.square().sum(-1, keepdim=True)
        squares = squares + (self.width - x.shape[-1]) * mean.square()
        out = centred * torch.rsqrt(squares / self.width + self.eps) * self.weight
        out = out if self.bias is None else out + self.bias
        return out.to(given).movedim(-1, self.dim)


class SlimRMSNorm(nn.Module):
    """RMSNorm over `width` channels, of which only some are present and the others are zero."""

    def __init__(self, kept: int, width: int, eps: float | None) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(kept))

    @classmethod
    def fitting(cls, module: nn.Module, num_features: int) -> nn.Module:
        """Return `module`, or a smaller one with fresh weights unless it has `num_features`."""
        if num_features == module.weight.numel():
            return module
        whole = as_rms_norm(module)
        if whole is None:
            raise ValueError(f"a {type(module).__name__} can't be made smaller")
        new = cls(num_features, whole.width, whole.eps)
        new.to(module.weight).train(module.training)
        return new

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., kept] to the same shape."""
        given, x = x.dtype, x.float() if x.element_size() < 4 else x
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        squares = x.square().sum(-1, keepdim=True) / self.width
        return (x * torch.rsqrt(squares + eps) * self.weight).to(given)


@torch.no_grad()
def as_rms_norm(module: nn.Module) -> SlimRMSNorm | None:
    """Return a SlimRMSNorm of full width with the weight of `module`, None where it does otherwise.

    It is recognised by trial: torch's own as well as one written by hand, which has one vector
    named weight and keeps epsilon as an attribute.
    """
    if isinstance(module, SlimRMSNorm):
        return module
    tensors = [*module.named_parameters(), *module.named_buffers(), *module.named_children()]
    if [name for name, _ in tensors] != ["weight"] or module.weight.dim() != 1:
        return None
    width = module.weight.numel()
    double = copy.deepcopy(module).double().cpu()
    double.weight.copy_(torch.linspace(0.5, 1.5, width))
    x = (torch.linspace(1, 9, 2 * width, dtype=torch.float64) * 7).sin().view(2, 1, width)
    x = x * torch.tensor(RMS_SCALES, dtype=torch.float64).view(-1, 1)
    try:
        wanted = double(x)
    # Its code may raise anything.
    except Exception:
        return None
    for eps in (None, *(value for value in vars(module).values() if type(value) is float)):
        found = SlimRMSNorm(width, width, eps)
        found.weight = double.weight
        alike = isinstance(wanted, Tensor) and wanted.shape == x.shape
        # Many compute in float32.
        if alike and torch.allclose(found(x), wanted.double(), rtol=1e-5, atol=0):
            found.weight = module.weight
            found.train(module.training)
            return found
    return None


def doubled(model: nn.Module) -> nn.Module:
    """Return a copy in float64, in which norms written by hand do not round to float32."""
    double = copy.deepcopy(model).double()
    for name, module in list(double.named_modules()):
        norm = None if isinstance(module, nn.RMSNorm) else as_rms_norm(module)
        if name and norm is not None:
            parent, _, attribute = name.rpartition(".")
            setattr(double.get_submodule(parent), attribute, norm)
    return double


class SlimAttention(nn.Module):
    """nn.MultiheadAttention for any number of heads and any width of the embedding.

    It has the same names of parameters. q, k and v are [n, s, num_heads * head_dim], in_proj_weight
    is [3 * num_heads * head_dim, embed_dim]. It returns no attention weights.
    """

    # Makes nn.TransformerEncoderLayer call it instead of its own fast path.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        bias: bool = True,
        dropout: float = 0.0,
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, head_dim
        self.dropout, self.batch_first = dropout, batch_first
        inner = num_heads * head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(3 * inner, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * inner)) if bias else None
        self.out_proj = nn.Linear(inner, embed_dim, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight)

    @classmethod
    def of(
        cls,
        module: "nn.MultiheadAttention | SlimAttention",
        num_heads: int,
        embed_dim: int | None = None,
    ) -> "SlimAttention":
        """Return one with fresh weights and `num_heads` heads of the size of those of `module`.

        Raises ValueError for variants of attention that it does not implement.
        """
        if isinstance(module, nn.MultiheadAttention) and (
            module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn
        ):
            raise ValueError("only attention of one width can have heads or channels removed")
        if num_heads > module.num_heads or (embed_dim or 0) > module.embed_dim:
            raise ValueError(f"attention of {module.num_heads} heads can't have {num_heads}")
        bias = module.in_proj_bias is not None
        options = (module.head_dim, bias, module.dropout, module.batch_first)
        slim = cls(embed_dim or module.embed_dim, num_heads, *options)
        slim.to(module.in_proj_weight).train(module.training)
        return slim

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Map query [n, s, embed_dim], key and value [n, t, embed_dim] to [n, s, embed_dim].

        As in nn.MultiheadAttention the batch may be second or missing, and masks are true where
        there is nothing to see, or are added. `attn_mask` is [s, t].
        """
        together = query is key and key is value
        inputs = [query] if together else [query, key, value]
        if query.dim() == 2:
            inputs = [x.unsqueeze(0) for x in inputs]
        elif not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        if together:
            projected = F.linear(*inputs, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            parts = zip(inputs, self.in_proj_weight.chunk(3), biases, strict=True)
            projected = [F.linear(x, weight, bias) for x, weight, bias in parts]
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
        if key_padding_mask is not None:
            key_padding_mask = _added(key_padding_mask, q).view(-1, 1, 1, k.shape[2])
        masks = [key_padding_mask, None if attn_mask is None else _added(attn_mask, q)]
        masks = [mask for mask in masks if mask is not None]
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(
            q, k, v, attn_mask=sum(masks) if masks else None, dropout_p=dropout
        )
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        if query.dim() == 2:
            return out.squeeze(0), None
        return (out if self.batch_first else out.transpose(0, 1)), None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return an additive mask from one that is true for what must not be attended to."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return like.new_zeros(mask.shape).masked_fill(mask, float("-inf"))


class SlimWindows:
    """The forward pass of torchvision's window attention for any number of heads and any width.

    torchvision's function assumes that a head is width / heads wide: where it is not, inputs and
    weights are padded with zeros, and the padding is cut from the result.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, h, w, c] to the same shape."""
        inner, width = self.proj.in_features, x.shape[-1]
        heads = max(self.num_heads, -(-width // self.head_dim))
        full = heads * self.head_dim
        wider, taller, more = full - width, full - inner, heads - self.num_heads
        qkv_bias = self.qkv.bias
        if qkv_bias is not None:
            qkv_bias = F.pad(qkv_bias.view(3, inner), (0, taller)).flatten()
        scale = getattr(self, "logit_scale", None)
        out = swin.shifted_window_attention(
            F.pad(x, (0, wider)),
            F.pad(self.qkv.weight.view(3, inner, width), (0, wider, 0, taller)).flatten(0, 1),
            F.pad(self.proj.weight, (0, taller, 0, wider)),
            F.pad(self.get_relative_position_bias(), (0, 0, 0, 0, 0, more)),
            self.window_size,
            heads,
            shift_size=self.shift_size,
            attention_dropout=self.attention_dropout,
            dropout=self.dropout,
            qkv_bias=qkv_bias,
            proj_bias=None if self.proj.bias is None else F.pad(self.proj.bias, (0, wider)),
            logit_scale=None if scale is None else F.pad(scale, (0, 0, 0, 0, 0, more)),
            training=self.training,
        )
        return out[..., :width]


class SlimWindowAttention(SlimWindows, swin.ShiftedWindowAttention):
    """Window attention of Swin Transformers."""


class SlimWindowAttentionV2(SlimWindows, swin.ShiftedWindowAttentionV2):
    """Window attention of the second Swin Transformers."""


SLIM_WINDOWS = {
    swin.ShiftedWindowAttention: SlimWindowAttention,
    swin.ShiftedWindowAttentionV2: SlimWindowAttentionV2,
}
# Exact types: a user's subclass may compute something else.
WINDOWS = (*SLIM_WINDOWS, *SLIM_WINDOWS.values())


def slim_attention(
    module: nn.MultiheadAttention | SlimAttention, num_heads: int, embed_dim: int | None = None
) -> nn.MultiheadAttention | SlimAttention:
    """Return the attention `module`, or one with the given heads and width if they differ."""
    if (num_heads, embed_dim or module.embed_dim) == (module.num_heads, module.embed_dim):
        return module
    return SlimAttention.of(module, num_heads, embed_dim)


def slim_windows(module: nn.Module, num_heads: int, embed_dim: int) -> nn.Module:
    """Return the window attention `module`, changed to the given heads and width."""
    if (num_heads, embed_dim) != (module.num_heads, module.qkv.in_features):
        if type(module) in SLIM_WINDOWS:
            module.head_dim = module.proj.in_features // module.num_heads
            module.__class__ = SLIM_WINDOWS[type(module)]
        module.num_heads = num_heads
    return module


@dataclass(frozen=True)
class SelfAttention:
    """The names of the linear layers of plain self-attention, its heads and its dropout.

    `firsts` is the layer that makes queries, keys and values, or the three that do. `dropouts` are
    the names of the nn.Dropout after softmax and of the one of the output, "" for none; they are
    None where training does something else, so that only evaluation is known.
    """

    firsts: tuple[str, ...]
    last: str
    heads: int
    head_dim: int
    dropouts: tuple[str, str] | None = None


def self_attend(module: nn.Module, parts: SelfAttention, x: Tensor) -> Tensor:
    """Map [n, s, c] to the same shape by plain self-attention with the layers of `module`."""
    made = [module.get_submodule(name)(x) for name in parts.firsts]
    made = made if len(made) == 3 else made[0].chunk(3, dim=-1)
    q, k, v = (y.unflatten(-1, (-1, parts.head_dim)).transpose(1, 2) for y in made)
    inside, outside = parts.dropouts or ("", "")
    dropout = module.get_submodule(inside) if inside else None
    rate = dropout.p if dropout is not None and dropout.training else 0.0
    heads = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
    out = module.get_submodule(parts.last)(heads.transpose(1, 2).flatten(2))
    return module.get_submodule(outside)(out) if outside else out


class SlimSelfAttention(nn.Module):
    """Plain self-attention for any number of heads and any width, in place of a user's module.

    It takes over the child modules, dropout included, under their names.
    """

    def __init__(self, module: nn.Module, num_heads: int) -> None:
        super().__init__()
        parts = self_attention_parts(module)
        if parts is None:
            raise ValueError(f"a {type(module).__name__} is not plain self-attention")
        self.parts, self.training = replace(parts, heads=num_heads), module.training
        for name, child in module.named_children():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, s, c] to the same shape; raise RuntimeError in training if that is not known."""
        if self.training and self.parts.dropouts is None:
            raise RuntimeError("this attention became smaller for evaluation alone: call eval()")
        return self_attend(self, self.parts, x)


@torch.no_grad()
def self_attention_parts(module: nn.Module) -> SelfAttention | None:
    """Return the parts of plain self-attention, None for any other module.

    It is recognised by trial: `module` must compute the same as `self_attend` in float64, on random
    inputs and with random weights, since its own may be zero or not finite.
    """
    if isinstance(module, SlimSelfAttention):
        return module.parts
    layers = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    roles = [(order[:-1], order[-1]) for order in _orders(layers)]
    if not roles:
        return None
    firsts, last = roles[0]
    inner, width = layers[last].in_features, layers[firsts[0]].in_features
    x = (torch.linspace(-3, 3, 10 * width, dtype=torch.float64) * 7).sin().view(2, 5, -1)
    double = copy.deepcopy(module).double().cpu()
    double.eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in double.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.copy_(drawn / math.sqrt(math.prod(parameter.shape[1:])))
    for heads in {v for v in vars(module).values() if type(v) is int and v > 0}:
        for firsts, last in roles if inner % heads == 0 else ():
            parts = SelfAttention(firsts, last, heads, inner // heads)
            if _computes(double, parts, x):
                return replace(parts, dropouts=_find_dropouts(double, parts, x))
    return None


def _orders(layers: dict[str, nn.Linear]) -> list[tuple[str, ...]]:
    """Return the possible roles of layers: those of queries, keys and values, then the output."""
    if len(layers) not in (2, 4):
        return []
    # Of two, the first makes queries, keys and values.
    every = [tuple(layers)] if len(layers) == 2 else itertools.permutations(layers)
    found = []
    for *firsts, last in every:
        shapes = {(layers[name].in_features, layers[name].out_features) for name in firsts}
        width = layers[firsts[0]].in_features, 3 * layers[last].in_features // len(firsts)
        if shapes == {width}:
            found.append((*firsts, last))
    return found


def _find_dropouts(module: nn.Module, parts: SelfAttention, x: Tensor) -> tuple[str, str] | None:
    """Return the `dropouts` with which `self_attend` does what `module` does in training."""
    module.train()
    found = {name: m for name, m in module.named_modules() if type(m) is nn.Dropout and m.p > 0}
    # Different rates tell them apart.
    for number, dropout in enumerate(found.values(), 1):
        dropout.p = number / (len(found) + 1)
    for pair in itertools.product(("", *found), repeat=2):
        if _computes(module, replace(parts, dropouts=pair), x):
            return pair
    return None


def _computes(module: nn.Module, parts: SelfAttention, x: Tensor) -> bool:
    """Return whether `self_attend` and `module` compute the same with the same random numbers."""
    # The generators of other devices stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            wanted = module(x)
            torch.default_generator.manual_seed(0)
            found = self_attend(module, parts, x)
        # Its code may raise anything.
        except Exception:
            return False
    alike = getattr(wanted, "shape", None) == found.shape and wanted.dtype == found.dtype
    return alike and torch.allclose(found, wanted)


def evaluates_alone(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return which of these self-attention modules can't be trained when smaller."""
    parts = {name: self_attention_parts(model.get_submodule(name)) for name in names}
    return [name for name, found in parts.items() if found and found.dropouts is None]


ATTENTIONS = (nn.MultiheadAttention, SlimAttention)
