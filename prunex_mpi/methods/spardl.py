"""A step of SparDL (Zhao et al. 2024): sums of the largest elements by shares, sparse all the way.

The gradient is cut into as many blocks as there are workers (W), of one size but for the last. In
ceil(log2 W) rounds worker r sends away all blocks but block r: with distance d, a falling power of
two, blocks r + d to r + 2d - 1, counted around, go to worker r + d. Before a block is sent its k
largest elements are taken, k being the ratio of a block rounded up; whoever receives them adds them
to its own block, and takes the largest of the sum when its turn comes. So what travels never grows,
for any W. The k largest of the sums of block r, which worker r holds in the end, go to all.

The residual is the authors' global one (ZJU-DAILY/SparDL, allreducer.py, with one team). Where
nothing was chosen in the end, every worker keeps what it had, residual + gradient, as if nothing
had been sent; elsewhere it keeps what it has left out, others' values among it. At each place the
workers' sum of what has arrived and what is kept is what was there before.
"""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import Wire
from prunex_mpi.compress import sparse
from prunex_mpi.core.state import OWN, RunContext, State
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("largest of blocks, in each round", "workers", "Sendrecv", "values, then int32 positions"),
    ("largest of each block's sum", "workers", "Allgather", "values, then int32 positions"),
)
RESIDUAL = f"{OWN}residual"


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate what has not been sent yet."""
    sparse.check_positions(layout)
    return {RESIDUAL: torch.zeros_like(theta)}


def allocate(wire: Wire, context: RunContext) -> dict[str, Any]:
    """Return memory for the blocks, filled up with zeros, and for the messages of all."""
    theta, workers = context.state.theta, wire.comm.size
    size, count = sizes_of(context.settings, theta.numel(), workers)
    blocks = theta.new_zeros(workers, size)
    most = max(map(len, rounds(workers, 0)), default=1)
    sent = theta.new_empty(most, count)
    everyone = theta.new_empty(workers, count)
    starts = size * torch.arange(workers, device=theta.device).view(-1, 1)
    return {
        "blocks": blocks,
        "values": sent,
        "positions": torch.empty_like(sent, dtype=torch.int32),
        "came_values": torch.empty_like(sent),
        "came_positions": torch.empty_like(sent, dtype=torch.int32),
        "all_values": everyone,
        "all_positions": torch.empty_like(everyone, dtype=torch.int32),
        "starts": starts,
        "places": torch.empty_like(everyone, dtype=torch.int64),
    }


def sizes_of(settings: Settings, numel: int, workers: int) -> tuple[int, int]:
    """Return the elements of a block, and how many of them travel."""
    size = -(-numel // workers)
    return size, sparse.share_of(size, settings.options.ratio)


def rounds(workers: int, rank: int) -> list[range]:
    """Return the blocks, counted around, that go to the worker of the first in each round."""
    distances = [1 << bit for bit in reversed(range((workers - 1).bit_length()))]
    return [range(rank + d, rank + min(2 * d, workers)) for d in distances]


def exchange_(wire: Wire, space: dict[str, Any], context: RunContext) -> None:
    """Set `grad` to the largest of the sums of residual + gradient. Collective on `wire.comm`."""
    grad = context.state.grad
    residual = context.state.memory[RESIDUAL].add_(grad)
    space["blocks"].view(-1)[: grad.numel()].copy_(residual)
    reduce_blocks_(wire, space)
    gather_blocks_(wire, space)
    # What fills up the last blocks may be among the largest of a block of zeros.
    chosen = space["places"] < grad.numel()
    places, values = space["places"][chosen], space["all_values"][chosen]
    residual.index_copy_(0, places, space["blocks"].view(-1)[places])
    grad.zero_().index_copy_(0, places, values)


def reduce_blocks_(wire: Wire, space: dict[str, Any]) -> None:
    """Add up every block at its owner; `blocks` become what is left out. Collective on `comm`."""
    comm, blocks = wire.comm, space["blocks"]
    for leaving in rounds(comm.size, comm.rank):
        distance, many = leaving.start - comm.rank, len(leaving)
        for number, values, positions in zip(
            leaving, space["values"], space["positions"], strict=False
        ):
            sparse.move_top_(blocks[number % comm.size], values, positions)
        to, source = leaving.start % comm.size, (comm.rank - distance) % comm.size
        for kind in ("values", "positions"):
            mine, came = space[kind][:many], space[f"came_{kind}"][:many]
            wire.shift_(mine.view(-1), to, came.view(-1), source)
        for number in range(many):
            block = blocks[(comm.rank + number) % comm.size]
            block.index_add_(0, space["came_positions"][number], space["came_values"][number])


def gather_blocks_(wire: Wire, space: dict[str, Any]) -> None:
    """Hand the largest of this block to all; `places` are those of all. Collective on `comm`."""
    values, positions = space["values"][0], space["positions"][0]
    sparse.move_top_(space["blocks"][wire.comm.rank], values, positions)
    wire.gather_(values, space["all_values"])
    wire.gather_(positions, space["all_positions"])
    torch.add(space["all_positions"], space["starts"], out=space["places"])


def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
    """Return how many of a run's `payload` bytes are positions."""
    return sparse.position_bytes(payload, state.theta.element_size())


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    _, count = sizes_of(settings, layout.numel, workers)
    how = f"{count:,} values and positions of each of {workers} blocks, {settings.aggregation}"
    return workers * count * (size + sparse.POSITION_BYTES), how
