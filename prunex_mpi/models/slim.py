"""Modules for sizes that pruning leaves and torch's own can't have, and numbers for users' code.

They replace the originals and have the same names of parameters. Code that counts channels runs
unchanged: its torch calls get other numbers.
"""

import copy
import functools
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# The keys under which channels of a norm of all channels and numbers of torch calls are stated.
NORM_FEATURES, CALLS = "norm_features", "calls"
# Sizes of inputs at which an epsilon of RMSNorm shows.
RMS_SCALES = (1.0, 1e-2, 1e-3, 1e-4, 1e-5)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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


class SlimNorm(nn.Module):
    """LayerNorm over `width` channels, of which only some are present and the others are zero.

    They are the last ones, or along dimension 1; with `dim` None they are along 1 and it is over
    all positions as well, as a GroupNorm of one group. It is RMSNorm where it is not `centred`.
    """

    def __init__(
        self, kept: int, width: int, eps: float | None, bias: bool, dim: int | None, centred: bool
    ) -> None:
        super().__init__()
        self.width, self.eps, self.dim, self.centred = width, eps, dim, centred
        self.weight = nn.Parameter(torch.ones(kept))
        self.bias = nn.Parameter(torch.zeros(kept)) if bias else None

    @classmethod
    def fitting(cls, module: nn.Module, kept: int) -> nn.Module:
        """Return `module`, or a smaller one with fresh weights unless it has `kept` channels."""
        if kept == module.weight.numel():
            return module
        norm = _as_slim(module)
        if norm is None or kept > norm.width:
            raise ValueError(f"a {type(module).__name__} can't be made {kept} wide")
        new = cls(kept, norm.width, norm.eps, norm.bias is not None, norm.dim, norm.centred)
        new.to(module.weight).train(module.training)
        return new

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., kept], or [n, kept, ...] with `dim` 1, to the same shape."""
        dim = 1 if self.dim is None else self.dim
        given, x = x.dtype, x.movedim(dim, -1)
        over = tuple(range(1, x.dim())) if self.dim is None else (-1,)
        # As torch's own, which computes 16-bit inputs in float32.
        x = x.float() if x.element_size() < 4 else x
        positions, absent = x[0, ..., 0].numel() if self.dim is None else 1, 0.0
        if self.centred:
            mean = x.sum(over, keepdim=True) / (self.width * positions)
            # Absent channels are zeros, each (0 - mean)^2 from the mean.
            x, absent = x - mean, (self.width - x.shape[-1]) * mean.square()
        squares = x.square().sum(over, keepdim=True) / positions + absent
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        out = x * torch.rsqrt(squares / self.width + eps) * self.weight
        out = out if self.bias is None else out + self.bias
        return out.to(given).movedim(-1, dim)


def _as_slim(module: nn.Module) -> SlimNorm | None:
    """Return a norm of all channels as a SlimNorm, of other values; None for other modules."""
    if isinstance(module, SlimNorm):
        return module
    dim = norm_dim(module) if isinstance(module, nn.LayerNorm) else None
    if dim is None and not (isinstance(module, nn.GroupNorm) and module.num_groups == 1):
        return as_rms_norm(module)
    width = len(module.weight)
    return SlimNorm(width, width, module.eps, module.bias is not None, dim, centred=True)


@torch.no_grad()
def as_rms_norm(module: nn.Module) -> SlimNorm | None:
    """Return `module` as a SlimNorm with its weight, None where it is no RMSNorm.

    It is recognised by trial: torch's own as well as one written by hand.
    """
    if isinstance(module, SlimNorm):
        return None if module.centred else module
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
        found = SlimNorm(width, width, eps, bias=False, dim=-1, centred=False)
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
    def fitting(
        cls,
        module: "nn.MultiheadAttention | SlimAttention",
        num_heads: int,
        embed_dim: int | None = None,
    ) -> "nn.MultiheadAttention | SlimAttention":
        """Return `module`, or one with fresh weights unless it has as many heads and channels.

        Raises ValueError for variants of attention that it does not implement.
        """
        if (num_heads, embed_dim or module.embed_dim) == (module.num_heads, module.embed_dim):
            return module
        if isinstance(module, nn.MultiheadAttention) and (
            module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn
        ):
            raise ValueError("only attention of one width can have heads or channels removed")
        whole = isinstance(module, nn.MultiheadAttention)
        if whole and (num_heads > module.num_heads or (embed_dim or 0) > module.embed_dim):
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


ATTENTIONS = (nn.MultiheadAttention, SlimAttention)

# --------------------------------------------------------------------------------------------------
# Numbers in a module's own code
# --------------------------------------------------------------------------------------------------

TORCH_FILES = str(Path(torch.__file__).parent / "_")[:-1]
# Functions of modes, which stand between a line of code and torch.
MODE_FUNCTIONS = ("__torch_function__", "call_corrected", "run_corrected")
# By line of code, for each torch call in it what it asks for and gets: [asked, given] or None for
# each argument, in their order; {"sizes": [...]} for pieces; {"whole": [argument, dimension, size,
# places of what is left], "back": dimension of the result, "numbers": [...]} where zeros are filled
# in.
Calls = dict[str, list[Any]]


def flatten(values: object) -> list[object]:
    """Return what nested arguments hold, slices included, in order."""
    if isinstance(values, list | tuple):
        return [leaf for value in values for leaf in flatten(value)]
    if isinstance(values, dict):
        return flatten(tuple(values.values()))
    if isinstance(values, slice):
        return [values.start, values.stop, values.step]
    return [values]


def rebuild(values: object, leaves: Iterator[object]) -> Any:
    """Return nested arguments like `values` that hold `leaves`."""
    if isinstance(values, list | tuple):
        # A tuple of any other kind is none of numbers.
        return (list if isinstance(values, list) else tuple)(rebuild(v, leaves) for v in values)
    if isinstance(values, dict):
        return {key: rebuild(value, leaves) for key, value in values.items()}
    if isinstance(values, slice):
        return slice(next(leaves), next(leaves), next(leaves))
    return next(leaves)


def call_site(frame: FrameType | None) -> str:
    """Return the function and the text of the line that `frame` is in; "" in torch's modules."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(TORCH_FILES):
            if code.co_name == "_call_impl":
                break
        elif code.co_name not in MODE_FUNCTIONS:
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f"{code.co_name}: {text or frame.f_lineno}"
        frame = frame.f_back
    return ""


def running(frame: FrameType | None) -> FrameType | None:
    """Return the innermost call of a module, its local `self`, that `frame` is a part of."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_impl" and code.co_filename.startswith(TORCH_FILES):
            return frame
        frame = frame.f_back
    return None


class Corrected(TorchFunctionMode):
    """Give the torch calls of one module's own code the numbers that fit its smaller tensors."""

    def __init__(self, module: nn.Module, calls: Calls) -> None:
        super().__init__()
        self.module, self.calls = module, calls
        # The number of torch calls so far, by line.
        self.seen: dict[str, int] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, frame = kwargs or {}, sys._getframe(1)
        line, run = call_site(frame), running(frame)
        if line in self.calls and run is not None and run.f_locals["self"] is self.module:
            known, number = self.calls[line], self.seen.get(line, 0)
            self.seen[line] = number + 1
            if number < len(known) and known[number] is not None:
                return call_corrected(known[number], func, args, kwargs)
        return func(*args, **kwargs)


def call_corrected(
    given: list[Any] | dict[str, Any], func: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call `func` with other numbers; those that grow with a batch or an image go on to."""
    if isinstance(given, dict) and "sizes" in given:
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        return torch.split(args[0], given["sizes"], dim)
    if isinstance(given, dict):
        filled = Filled(func, given)
        if has_torch_function(tensors := [t for t in flatten(args) if isinstance(t, Tensor)]):
            # Other modes see a single call, with what its code gives.
            return handle_torch_function(filled, tensors, *args, **kwargs)
        return filled(*args, **kwargs)
    leaves = flatten((args, kwargs))
    if len(leaves) != len(given):
        raise RuntimeError(f"{func.__name__} has {len(leaves)} arguments where it had {len(given)}")
    for place, pair in enumerate(given):
        if pair is None:
            continue
        asked, wanted = pair
        if not asked:
            leaves[place] = wanted
        elif isinstance(asked, int) and isinstance(wanted, int):
            leaves[place] = leaves[place] * wanted // asked
        else:
            leaves[place] = wanted if leaves[place] == asked else leaves[place] * wanted / asked
    args, kwargs = rebuild((args, kwargs), iter(leaves))
    return func(*args, **kwargs)


class Filled:
    """A torch function that gets zeros for channels that are gone, and returns none for them."""

    def __init__(self, func: Callable, given: dict[str, Any]) -> None:
        self.func, self.given, self.__name__ = func, given, func.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        leaves, (place, dim, size, kept) = flatten((args, kwargs)), self.given["whole"]
        for number, wanted in enumerate(self.given["numbers"]):
            leaves[number] = leaves[number] if wanted is None else wanted
        x = leaves[place]
        places = torch.tensor(kept, device=x.device)
        shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
        leaves[place] = x.new_zeros(shape).index_copy(dim, places, x)
        args, kwargs = rebuild((args, kwargs), iter(leaves))
        result, back = self.func(*args, **kwargs), self.given["back"]
        return result if back is None else result.index_select(back, places)


class CallsCorrected:
    """A module whose code counts channels of the whole network: its torch calls are corrected."""

    corrected_calls: Calls
    own_forward: Callable | None

    def run_corrected(self, *args: Any, **options: Any) -> Any:
        """Run the forward pass of the module's class with other numbers."""
        forward = self.own_forward or super().forward
        with Corrected(self, self.corrected_calls) as mode:
            result = forward(*args, **options)
        if not (self.training or self.found_calls):
            if lost := [line for line in self.corrected_calls if line not in mode.seen]:
                raise RuntimeError(f"{type(self).__name__} no longer has the code '{lost[0]}'")
            self.found_calls = True
        return result

    # Reading frames is nothing to compile.
    forward = torch.compiler.disable(run_corrected)

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        """Return how to make it again: its class has no name that pickle could find."""
        _, _, *state = super().__reduce_ex__(protocol)
        return _uncopied, (type(self).__mro__[2],), *state


@functools.cache
def _corrected(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (CallsCorrected, kind), {"__module__": kind.__module__})


def _uncopied(kind: type[nn.Module]) -> nn.Module:
    made = _corrected(kind)
    return made.__new__(made)


def correct_calls_(module: nn.Module, calls: Calls) -> None:
    """Let the code of `module` run with the numbers in `calls`, with its own where that is {}."""
    if isinstance(module, CallsCorrected):
        module.__class__ = type(module).__mro__[2]
        if module.own_forward is not None:
            module.forward = module.own_forward
        del module.corrected_calls, module.found_calls, module.own_forward
    if calls:
        # Some choose between several when they are made.
        module.own_forward = vars(module).pop("forward", None)
        module.__class__ = _corrected(type(module))
        module.corrected_calls, module.found_calls = calls, False
