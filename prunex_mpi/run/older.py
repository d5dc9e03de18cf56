"""Checkpoints of earlier versions, in the form that is written now."""

from dataclasses import asdict
from typing import Any

from torch import Tensor

from prunex_mpi.core.scores import SENSITIVITY
from prunex_mpi.core.state import Position

# The steps that a run has done, in a checkpoint that does not tell.
UNKNOWN = -1
# Names of tensors before, and now.
FORMER = {"own.sensitivity": SENSITIVITY}


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by the names that are written now."""
    return {FORMER.get(name, name): tensor for name, tensor in tensors.items()}


def upgraded(numbers: Any) -> Any:
    """Return the numbers of a checkpoint in the form that is written now.

    In older ones nothing is under way, and in still older ones a position holds the bytes and
    seconds of an interrupted phase 1 one by one.
    """
    position = numbers.get("position") if isinstance(numbers, dict) else None
    if not isinstance(position, dict):
        return numbers
    new = asdict(Position(steps_done=UNKNOWN))
    clock, traffic = position.get("clock"), position.get("traffic")
    if isinstance(clock, dict) and isinstance(traffic, dict):
        unknown = {"under_way": "", "steps_done": UNKNOWN, "best": [], "converged_of": 0}
        parts = {
            "clock": {**new["clock"], **clock},
            "traffic": {**new["traffic"], **traffic},
        }
        return {**numbers, "position": {**unknown, **position, **parts}}
    if "local_seconds" not in position:
        return numbers
    old = {**position}
    for kind in ("payload", "sent", "mask", "intra"):
        new["traffic"][kind] = old.pop(f"{kind}_bytes", 0)
    for part, name in (("earlier", "local"), ("method", "method"), ("exchange", "exchange")):
        new["clock"][part] = old.pop(f"{name}_seconds", 0.0)
    return {**numbers, "position": {**new, **old}}
