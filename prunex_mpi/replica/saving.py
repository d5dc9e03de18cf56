"""What a rank of one's own loop keeps to go on bit for bit, and how it is put back.

The tensors are those of `core/lasting.py`; the optimizer, which may be any, keeps its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from prunex_mpi.base.errors import UNREADABLE, UserError, listed
from prunex_mpi.base.files import FORMAT
from prunex_mpi.comm.agreement import run_collectively
from prunex_mpi.comm.topology import Topology
from prunex_mpi.config.resolve import to_toml
from prunex_mpi.core import lasting
from prunex_mpi.core.lasting import Numbers, Tensors, fit_network, left_of
from prunex_mpi.core.state import RunContext, State
from prunex_mpi.settings.fields import Settings

KINDS = {
    **{"format": int, "ranks": list, "settings": str, "model": list},
    **{"tensors": dict, "numbers": dict, "optimizer": dict},
}


def contents(topology: Topology, context: RunContext) -> dict[str, Any]:
    """Return what this rank has to keep, as copies on the CPU, numbers and text."""
    state, model = context.state, context.problem.model
    tensors, numbers = lasting.contents(topology, state, model)
    tensors = {n: t for n, t in tensors.items() if not n.startswith(lasting.OPTIMIZER)}
    if state.position.step:
        sums = zip(("loss_sum", "loss_count"), state.losses.tolist(), strict=True)
        numbers["position"] |= dict(sums)
    return {
        "format": FORMAT,
        "tensors": _copies(tensors),
        "numbers": numbers,
        "optimizer": _copies(state.optimizer.optimizer.state_dict()),
        "left": left_of(state),
        "model": _model_of(state),
    }


def _model_of(state: State) -> list[str]:
    """Return what the model has by name, as it was before anything was taken out of it."""
    tensors = [(s.name, s.shape) for s in state.whole.layout.segments]
    return [f"{name} {list(shape)}" for name, shape in (*tensors, *state.whole.buffers)]


def _copies(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.detach().to("cpu", copy=True)
    if isinstance(values, dict):
        return {key: _copies(value) for key, value in values.items()}
    return [_copies(value) for value in values] if isinstance(values, list) else values


def settings_text(settings: Settings) -> str:
    """Return the settings that a run keeps on other nodes as well."""
    return to_toml(replace(settings, ranks_per_node=1), {})


def check(
    saved: Sequence[dict[str, Any]], here: list[int] | None, settings: str, state: State
) -> None:
    """Raise UserError unless all that was `saved` is of such a run, with the same settings.

    That is the state of the rank that is `here`, of as many, or without it those of all ranks.
    """
    for number, one in enumerate(saved):
        if (
            not isinstance(one, dict)
            or any(not isinstance(one.get(key), kind) for key, kind in KINDS.items())
            or one["format"] != FORMAT
        ):
            raise UserError("this is no state_dict of a replica of this version", UNREADABLE)
        rank, *nodes = one["ranks"]
        if here and one["ranks"] != here:
            raise UserError(
                f"the state is of rank {rank} on nodes of {nodes} ranks, and this is rank "
                f"{here[0]} on {here[1:]}; on other nodes give each rank the list of all states",
                UNREADABLE,
            )
        if not here and (rank, sum(nodes)) != (number, len(saved)):
            raise UserError(
                f"state {number} of {len(saved)} is of rank {rank} of {sum(nodes)}; give those of "
                "all ranks in order",
                UNREADABLE,
            )
        _require_equal(
            one["settings"].splitlines(),
            settings.splitlines(),
            "the state is of a run with other settings of replicate",
        )
        _require_equal(one["model"], _model_of(state), "the state is of another model")


def _require_equal(theirs: list[str], ours: list[str], what: str) -> None:
    if theirs != ours:
        other = [line for line in ours if line not in theirs]
        other = other or [f"no {line}" for line in theirs if line not in ours]
        raise UserError(f"{what}: {listed(other) or 'in another order'} here", UNREADABLE)


def put_back(topology: Topology, saved: dict[str, Any], context: RunContext) -> None:
    """Restore this rank exactly. Collective on `world` and `node`."""
    run_collectively(topology.world, partial(_fit_, saved, context))
    lasting.put_exact(topology, saved["tensors"], saved["numbers"], context)
    context.state.grad.zero_()


def put_elsewhere(topology: Topology, saved: Sequence[dict[str, Any]], context: RunContext) -> None:
    """Restore what all ranks of other nodes, whose states are `saved`, had in common.

    Collective on `world` and `node`.
    """
    world, optimizer = topology.world, context.state.optimizer
    run_collectively(world, partial(_fit_, saved[0], context))

    def parts() -> Iterator[tuple[Tensors, Numbers]]:
        for one in saved[world.rank :: world.size]:
            moments = optimizer.flat_of(one["optimizer"])
            moments = {f"{lasting.OPTIMIZER}{name}": flat for name, flat in moments.items()}
            yield one["tensors"] | moments, one["numbers"]

    lasting.put_elsewhere(topology, parts, context)
    context.state.grad.zero_()


def _fit_(saved: dict[str, Any], context: RunContext) -> None:
    """Give the model the size and the optimizer the memory that they had."""
    if reason := fit_network(saved["left"], context):
        raise UserError(f"the state does not fit the model: {reason}", UNREADABLE)
    context.state.optimizer.load_(saved["optimizer"])
