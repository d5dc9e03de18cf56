"""A step of deep gradient compression: as many elements as reach a threshold, from each worker."""

from typing import Any

import torch
from torch import Tensor

from prunex_mpi.comm.wire import COUNT_BYTES, Wire
from prunex_mpi.compress.sparse import POSITION_BYTES, check_positions, kept_per_layer
from prunex_mpi.compress.threshold import accumulate_, forget_sent_, ratio_at, select_above_
from prunex_mpi.core.state import OWN, Work
from prunex_mpi.core.steps import steps_taken, weight_pairs
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OPERATIONS = (
    ("how many there are", "workers", "Allgather", "one int64"),
    ("elements, in buckets", "workers", "Allgatherv", "values, then int32 positions"),
)
MOMENTUM, RESIDUAL = f"{OWN}momentum", f"{OWN}residual"


def memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate the accumulated momentum and what has not been sent yet.

    Both are linear in what the workers contribute, so their sums over ranks count.
    """
    check_positions(layout)
    return {MOMENTUM: torch.zeros_like(theta), RESIDUAL: torch.zeros_like(theta)}


def allocate(wire: Wire, work: Work) -> dict[str, Any]:
    """Return memory for the most that this worker sends, and for one bucket of what all do."""
    if not wire.speaks:
        return {}
    theta, settings = work.state.theta, work.settings
    largest = ratio_at(0, int(settings.dgc_warmup_epochs > 0), settings.compress_ratio)
    count = sum(kept_per_layer(work.state.layout, largest))
    # So many elements of each worker are gathered at once: one bucket of all of them.
    room = max(1, wire.transport.bucket_bytes // (theta.element_size() * wire.comm.size))
    values, all_values = theta.new_empty(count), theta.new_empty(wire.comm.size * min(count, room))
    return {
        "room": room,
        "values": values,
        "positions": torch.empty_like(values, dtype=torch.int32),
        "all_values": all_values,
        "all_positions": torch.empty_like(all_values, dtype=torch.int32),
        "chosen": torch.empty_like(theta, dtype=torch.bool),
        "decayed": weight_pairs(work.state),
    }


def exchange_(wire: Wire, space: dict[str, Any], work: Work) -> None:
    """Send what is largest of the accumulated momentum, and set `grad` to everyone's sum.

    Weight decay counts as a part of the gradient here. The sum is taken piece by piece and in them
    worker by worker, so that all workers get the same bits. Collective on `wire.comm`.
    """
    state, settings, grad = work.state, work.settings, work.state.grad
    momentum, residual = state.memory[MOMENTUM], state.memory[RESIDUAL]
    values, positions = space["values"], space["positions"]
    step = steps_taken(work)
    warmup_steps = round(settings.dgc_warmup_epochs * work.problem.train.steps_per_epoch)
    ratio = ratio_at(step, warmup_steps, settings.compress_ratio)
    if settings.weight_decay_on == "all":
        grad.add_(state.theta, alpha=settings.weight_decay * wire.weight)
    elif space["decayed"][0]:
        torch._foreach_add_(*space["decayed"], alpha=settings.weight_decay * wire.weight)
    accumulate_(momentum, residual, grad, settings.momentum)
    spare, sent = (state.scratch, space["chosen"]), (values, positions)
    count = select_above_(residual, state.layout, ratio, settings.dgc_sample, step, spare, sent)
    forget_sent_(momentum, residual, positions[:count])
    grad.zero_()
    counts, room = wire.gather_counts(count), space["room"]
    for start in range(0, max(counts), room):
        pieces = [min(max(c - start, 0), room) for c in counts]
        mine = slice(start, start + pieces[wire.comm.rank])
        wire.gather_parts_(values[mine], pieces, space["all_values"])
        wire.gather_parts_(positions[mine], pieces, space["all_positions"])
        everyone = space["all_positions"], space["all_values"]
        places, addends = (t[: sum(pieces)].split(pieces) for t in everyone)
        for place, addend in zip(places, addends, strict=True):
            grad.index_add_(0, place, addend)


def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
    """Return the bytes that a worker hands over in a step, and what they are."""
    count = sum(kept_per_layer(layout, settings.compress_ratio))
    how = f"at most {count:,} values and positions, {settings.aggregation}"
    if settings.dgc_warmup_epochs:
        how += "; more in the warm-up"
    return count * (size + POSITION_BYTES) + COUNT_BYTES, how
