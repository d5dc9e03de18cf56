"""Flat vectors: one per variable, and the place of each parameter tensor in it.

Every variable of the algorithm (theta, u, v, z_node, z, the gradient, the momentum) is a contiguous
1-D tensor with the same layout, so an update is one pass over memory and a message needs no
packing.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError

# The dtypes whose SUM is right under every MPI: that of bfloat16 is silently wrong under Open MPI,
# and that of float16 is an error in some builds.
PARAMETER_DTYPES = (torch.float32, torch.float64)
# An arbitrary odd number.
DIGEST_FACTOR = 0x9E3779B97F4A7C15
# Elements whose squares float32 sums accurately enough.
NORM_NUMEL = 2**20
# Elements of a tile: on a CPU tiles of six vectors fit into a core's second-level cache; on other
# devices a kernel launch must be worth it, and a tile stay small beside the model.
CPU_TILE, DEVICE_TILE = 2**16, 2**24
# The layers of which Muon takes the matrices.
LAYERS = (*(nn.Linear, nn.MultiheadAttention), *(nn.Conv1d, nn.Conv2d, nn.Conv3d))


@dataclass(frozen=True)
class Segment:
    """The place of one parameter tensor (a "layer" of the paper) in a flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def place(self) -> slice:
        """The elements of a flat vector that are this segment's."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Layout:
    """The segments of a flat vector in the order of `model.named_parameters()`.

    `embeddings` are those that nn.Embedding alone has, whose rows a batch looks up; none where
    another layer shares one of them. `hidden` are the matrices of hidden layers, which Muon takes.
    """

    segments: tuple[Segment, ...]
    numel: int
    embeddings: tuple[Segment, ...] = ()
    hidden: tuple[Segment, ...] = ()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return one view per segment, each of its parameter's shape, without copying."""
        return [flat[s.place].view(s.shape) for s in self.segments]


@dataclass(frozen=True)
class Tile:
    """A slice `place` of flat vectors, with the `sizes` of its parts of the segments `layers`."""

    place: slice
    layers: slice
    sizes: tuple[int, ...]

    def pieces(self, part: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a tile of a vector, one per segment."""
        return part.split(self.sizes)

    def scale_(self, part: Tensor, factors: np.ndarray) -> None:
        """Multiply the segments of a tile by their `factors` [segments] in place."""
        torch._foreach_mul_(self.pieces(part), factors[self.layers].tolist())

    def mix_(self, part: Tensor, other: Tensor, weights: float | np.ndarray) -> None:
        """Set a tile to part + weight (other - part); a weight, or [segments] of them."""
        if isinstance(weights, float):
            part.lerp_(other, weights)
            return
        pieces = zip(self.pieces(part), self.pieces(other), weights[self.layers], strict=True)
        for piece, end, weight in pieces:
            piece.lerp_(end, float(weight))


def one_or_all(values: np.ndarray) -> float | np.ndarray:
    """Return a single number where all are equal, so that one pass serves all segments."""
    return float(values[0]) if np.all(values == values[0]) else values


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that are trained; one without an element never is."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}


def tensors_text(model: nn.Module) -> str:
    """Return the names, shapes and dtypes of the model's parameters and buffers, one in a line."""
    found = [*model.named_parameters(), *model.named_buffers()]
    return "\n".join(f"{name} {list(t.shape)} {t.dtype}" for name, t in found)


def build_layout(model: nn.Module) -> Layout:
    """Return the layout of all trainable parameters of `model`.

    Raises UserError where there is none, where MPI can't add up their dtype, or several, and where
    one shares memory with another tensor of the model.
    """
    _refuse_shared_memory(model)
    parameters = trained_parameters(model)
    dtypes = {p.dtype for p in parameters.values()}
    if len(dtypes) != 1 or not dtypes <= set(PARAMETER_DTYPES):
        raise UserError(
            "the model's trainable parameters must all be float32 or all float64, found "
            + (", ".join(sorted(map(str, dtypes))) or "none")
        )
    # Tensors that are not trained are broadcast at the start.
    others = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    if odd := {t.dtype for t in others} - set(PARAMETER_DTYPES):
        raise UserError(
            f"the model holds {', '.join(sorted(map(str, odd)))}; make it float32 and use --amp"
        )
    *offsets, numel = accumulate((p.numel() for p in parameters.values()), initial=0)
    segments = tuple(
        Segment(name, tuple(p.shape), offset, p.numel())
        for offset, (name, p) in zip(offsets, parameters.items(), strict=True)
    )
    kinds = [_looked_up(model), _hidden(model)]
    chosen = [tuple(s for s in segments if parameters[s.name] in kind) for kind in kinds]
    return Layout(segments, numel, *chosen)


def _looked_up(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of all nn.Embedding; none where another module shares one of them."""
    inside: set[nn.Parameter] = set()
    elsewhere: set[nn.Parameter] = set()
    for module in model.modules():
        which = inside if isinstance(module, nn.Embedding) else elsewhere
        which.update(module.parameters(recurse=False))
    return set() if inside & elsewhere else inside


def _hidden(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices of all layers but the last; none that is an embedding as well."""
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    other = [m for m in model.modules() if not isinstance(m, LAYERS)]
    inner = {p for layer in layers[:-1] for p in layer.parameters(recurse=False) if p.dim() > 1}
    return inner - {p for m in (*other, *layers[-1:]) for p in m.parameters(recurse=False)}


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raise UserError if `flatten_` would part a parameter from what shares its memory."""
    trained = trained_parameters(model).keys()
    spans = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.numel() or tensor.is_meta:
            continue
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        spans.append((start, start + (reach + 1) * tensor.element_size(), name))
        repeats = any(n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        if repeats and name in trained:
            raise UserError(f"elements of {name} share memory: give the model a copy of it")
    spans.sort(key=lambda span: span[0])
    for number, (_, stop, name) in enumerate(spans):
        for start, _, other_name in spans[number + 1 :]:
            if start >= stop:
                break
            if {name, other_name} & trained:
                raise UserError(
                    f"{name} and {other_name} share memory: let both modules have one nn.Parameter "
                    "to tie them, or give one of them a copy"
                )


def flatten_(model: nn.Module, layout: Layout) -> tuple[Tensor, Tensor]:
    """Move parameters and gradients of `model` into two flat vectors, (theta, grad), as views."""
    parameters = list(trained_parameters(model).values())
    theta = torch.cat([p.detach().reshape(-1) for p in parameters])
    grad = torch.zeros_like(theta)
    views = zip(parameters, layout.views(theta), layout.views(grad), strict=True)
    for parameter, value, gradient in views:
        parameter.data = value
        parameter.grad = gradient
    return theta, grad


def scale_(flat: Tensor, layout: Layout, factors: np.ndarray) -> None:
    """Multiply each segment of `flat` by its factor in place; `factors` is float64 [segments]."""
    torch._foreach_mul_(layout.views(flat), factors.tolist())


def bits_digest(flat: Tensor) -> int:
    """Return 64 bits that differ when `flat` differs in any bit.

    Words and their squares are summed modulo 2^64.
    """
    words = flat[: flat.numel() // 2 * 2].view(torch.int64)
    if flat.device.type == "cpu":
        array = words.numpy()
        sums = int(array.sum()), int(np.dot(array, array))
    else:
        sums = int(words.sum()), int((words * words).sum())
    # An odd last element is in no word.
    last = int.from_bytes(bytes(flat[-1:].view(torch.uint8).tolist()), "little")
    return (sums[0] * DIGEST_FACTOR + sums[1] + last) % 2**64


def matrices(layout: Layout) -> tuple[Segment, ...]:
    """Return the segments of two or more dimensions: weights, not biases or BatchNorm."""
    return tuple(segment for segment in layout.segments if len(segment.shape) > 1)


def pieces_of(flat: Tensor, segments: Iterable[Segment]) -> list[Tensor]:
    """Return the segments' views of `flat`, 1-D."""
    return [flat[segment.place] for segment in segments]


def tile_length(device: torch.device) -> int:
    """Return the number of elements that the threads of `device` read once for several passes."""
    return CPU_TILE * torch.get_num_threads() if device.type == "cpu" else DEVICE_TILE


def tiles(layout: Layout, device: torch.device) -> tuple[Tile, ...]:
    """Return tiles of the flat vectors, so that several passes read memory once."""
    return _cut(layout, tile_length(device))


@functools.lru_cache(maxsize=8)
def _cut(layout: Layout, length: int) -> tuple[Tile, ...]:
    edges = np.array([0, *(s.offset + s.numel for s in layout.segments)])
    found = []
    for start in range(0, layout.numel, length):
        stop = min(start + length, layout.numel)
        first = int(np.searchsorted(edges, start, side="right")) - 1
        last = int(np.searchsorted(edges, stop, side="left"))
        sizes = np.diff(np.clip(edges[first : last + 1], start, stop))
        found.append(Tile(slice(start, stop), slice(first, last), tuple(sizes.tolist())))
    return tuple(found)


def spare_tile(flat: Tensor) -> Tensor:
    """Return uninitialised memory for one tile of `flat`."""
    return flat.new_empty(min(flat.numel(), tile_length(flat.device)))


def tile_norms(tile: Tile, *parts: Tensor) -> list[Tensor]:
    """Return the squared 2-norms of the segments of each of `parts`, tiles of flat vectors."""
    pieces = [piece for part in parts for piece in tile.pieces(part)]
    if pieces[0].device.type == "cpu":
        return [torch.dot(piece, piece) for piece in pieces]
    # On a GPU starting a kernel for each takes longer than the sums.
    norms = torch._foreach_norm(pieces)
    return list(torch._foreach_mul(norms, norms))


def sum_tile_norms(
    found: Sequence[list[Tensor]], layout: Layout, device: torch.device
) -> np.ndarray:
    """Return the sums over tiles of the results of `tile_norms`, float64 [vectors, segments]."""
    values = torch.stack([norm for norms in found for norm in norms]).double().cpu().numpy()
    of_tiles = list(tiles(layout, device))
    sums = np.zeros((len(found[0]) // len(of_tiles[0].sizes), len(layout.segments)))
    start = 0
    for tile in of_tiles:
        count = len(sums) * len(tile.sizes)
        sums[:, tile.layers] += values[start : start + count].reshape(len(sums), -1)
        start += count
    return sums


def norm(flat: Tensor) -> Tensor:
    """Return the 2-norm of `flat`, 0-D, on its device.

    On the CPU it is that of parts: there torch sums the squares of a long float32 vector naively,
    and is 1 % below the norm of 10^8 values, 19 % below that of 10^9.
    """
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat)
    parts = [torch.linalg.vector_norm(part) for part in flat.split(NORM_NUMEL)]
    return torch.linalg.vector_norm(torch.stack(parts))


def squared_distances(flat: Tensor, other: Tensor, layout: Layout) -> np.ndarray:
    """Return |flat - other|^2 of each segment as float64 [segments] on the host."""
    found, spare = [], spare_tile(flat)
    for tile in tiles(layout, flat.device):
        part = flat[tile.place]
        gap = torch.sub(part, other[tile.place], out=spare[: part.numel()])
        found.append(tile_norms(tile, gap))
    return sum_tile_norms(found, layout, flat.device)[0]
