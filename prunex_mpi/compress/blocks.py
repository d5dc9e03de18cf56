"""A flat vector as blocks of which only those in a set travel (OmniReduce, Fei et al. 2021).

The last block is what is left over and may be shorter; it travels as short as it is. Sets of blocks
are bools, and travel as bits (`bits.py`).
"""

import torch
from torch import Tensor


def block_count(numel: int, size: int) -> int:
    """Return how many blocks of `size` elements, the last perhaps shorter, hold `numel`."""
    return -(-numel // size)


def new_bits(numel: int, size: int, device: torch.device) -> Tensor:
    """Return an empty set of a vector's blocks: bool, filled up to whole bytes with False."""
    return torch.zeros(8 * -(-block_count(numel, size) // 8), dtype=torch.bool, device=device)


def find_nonzero_(flat: Tensor, size: int, bits: Tensor) -> None:
    """Set the bits of the blocks that hold anything but zeros; NaN is something."""
    full, tail = _divide(flat, size)
    torch.any(full, 1, out=bits[: len(full)])
    if tail.numel():
        torch.any(tail, 0, out=bits[len(full)])


def take_blocks_(flat: Tensor, size: int, chosen: Tensor, message: Tensor) -> Tensor:
    """Copy the `chosen` blocks (ascending int64) to the front of `message`; return that part."""
    full, tail = _divide(flat, size)
    chosen, compact, rest = _places(full, tail, chosen, message)
    torch.index_select(full, 0, chosen, out=compact)
    rest.copy_(tail[: rest.numel()])
    return message[: compact.numel() + rest.numel()]


def put_blocks_(flat: Tensor, size: int, chosen: Tensor, message: Tensor) -> None:
    """Copy what `take_blocks_` put into `message` back to its places in `flat`."""
    full, tail = _divide(flat, size)
    chosen, compact, rest = _places(full, tail, chosen, message)
    full.index_copy_(0, chosen, compact)
    tail[: rest.numel()].copy_(rest)


def move_top_blocks_(blocks: Tensor, message: Tensor, chosen: Tensor) -> None:
    """Move the rows of largest 2-norm out of `blocks` [blocks, size] into `message` [k, size].

    `chosen`, int32 [k], receives their numbers, ascending; zeros remain (Block Top-k).
    """
    norms = torch.linalg.vector_norm(blocks, dim=1)
    places = torch.topk(norms, chosen.numel(), sorted=False).indices.sort().values
    torch.index_select(blocks, 0, places, out=message)
    blocks.index_fill_(0, places, 0.0)
    chosen.copy_(places)


def _divide(flat: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the full blocks [blocks, size] and what is left over."""
    full = flat.numel() // size
    return flat[: full * size].view(full, size), flat[full * size :]


def _places(
    full: Tensor, tail: Tensor, chosen: Tensor, message: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chosen full blocks, their part of `message` and that of the shorter block."""
    ends = bool(tail.numel()) and bool(chosen.numel()) and int(chosen[-1]) == len(full)
    chosen = chosen[: chosen.numel() - ends]
    start = chosen.numel() * full.shape[1]
    compact = message[:start].view(chosen.numel(), full.shape[1])
    return chosen, compact, message[start : start + ends * tail.numel()]
