"""What each method does, found by its declaration.

A method's own code is a module with one face. One that communicates at each step has

- `exchange_(wire, space, context)`: replaces a worker's weighted gradient in `grad` by the sum over
  all workers, the same bits on each; what it leaves out of the sum stays in the memory; a method
  with the trait `plain_mean` has none, the driver adds up its gradients, and one that `drifts`
  replaces a node's mean gradient by what the node takes its step along;
- `payload(settings, layout, size, workers)`: bytes that a worker hands over in a step, or the most
  of them, and what they are in words, for the dry run;
- `OPERATIONS`: its messages, as rows (what, communicator, MPI operation, operand);

and, where it needs them,

- `memory(settings, layout, theta)`: what one step hands to the next; checkpoints hold it;
- `allocate(wire, context)`: what each step writes anew (`space`), so that no step allocates; called
  on the workers, and on all ranks where the method looks at gradients there: then a wire may have
  no communicator;
- `check_workers(settings, workers)`: raises UserError for a number of workers that it can't have;
- `metadata_bytes(settings, state, payload, rounds)`: how many of a run's payload bytes, without
  those of BatchNorm statistics, say where values belong;
- `add_penalty_(wires, space, context, loss)`: adds the gradient of a penalty to a worker's;
- `follow_(wires, space, context)`: looks at the gradient that all ranks have received;
- `prune_(wires, context, done)`: prunes after `done` outer iterations, if that is when; returns the
  drift of the mask of weights;
- `reshape_(wires, space, context, done)`: takes out of the network what is of no use; returns
  whether any was, and `space` is allocated anew.

One that exchanges once per outer iteration in a format of its own (`own_format`) has `memory`,
`payload`, `OPERATIONS`, `allocate(nodes, context)` and `exchange_(wires, space, context)`, which
moves z.
"""

import importlib
from types import ModuleType
from typing import Any

from torch import Tensor

from prunex_mpi.comm.topology import Topology
from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.exchange import outer_memory
from prunex_mpi.core.state import RunContext, State
from prunex_mpi.core.sums import SUMMED
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.method import Method

# What the drivers that exchange once per outer iteration send between nodes then.
COMPACT = "compact, and BatchNorm statistics"
AVERAGE = ("parameters", "leader", "Allreduce SUM", COMPACT)
SHARED_AVERAGE = ("parameters", "leader", "Allreduce MAX and SUM", f"{COMPACT}, 8 bits")
CODED_AVERAGE = ("parameters", "leader", "Alltoallv, Allgather", f"{COMPACT}, fewer bits")
DECISION = ("mask", "world", "Bcast", "a bit per group")
CHOICE = (
    ("group energies", "leader", "Reduce SUM", "one float per group (vote)"),
    ("mask", "leader", "Bcast, or Allreduce BOR", "a bit per group"),
)


def code_of(method: Method) -> ModuleType:
    """Return the module with a method's own code, named by its declaration."""
    return importlib.import_module(f"prunex_mpi.methods.{method.code}")


def operations_of(settings: Settings) -> tuple[tuple[str, str, str, str], ...]:
    """Return the messages of any method: rows (what, communicator, MPI operation, operand)."""
    method, average = settings.method, CODED_AVERAGE
    if settings.payload in ("fp32", SUMMED):
        average = AVERAGE if settings.payload == "fp32" else SHARED_AVERAGE
    if method.code:
        return code_of(method).OPERATIONS
    if method.flat:
        return (average, DECISION)
    return (*CHOICE, average) if method.prunes_groups else (average,)


def metadata_bytes(settings: Settings, state: State, counted: dict[str, int], rounds: int) -> int:
    """Return how many of a run's inter-node bytes, as `counted`, say where values belong."""
    code = code_of(settings.method) if settings.method.code else None
    if not hasattr(code, "metadata_bytes"):
        return counted["mask"]
    statistics = rounds * state.stats.numel() * state.theta.element_size()
    pairs = counted["payload"] - statistics
    return counted["mask"] + code.metadata_bytes(settings, state, pairs, rounds)


def memory_of(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate what the method remembers, as it is before the first step.

    Names begin with OWN, EACH or SHARED (`core/state.py`). `own.` tensors have theta's dtype and
    device, `shared.` tensors any; all are contiguous. Raises UserError for unsuited layouts.
    """
    if settings.method.outer_step:
        return outer_memory(theta)
    code = code_of(settings.method) if settings.method.code else None
    return code.memory(settings, layout, theta) if hasattr(code, "memory") else {}


def check_workers(settings: Settings, topology: Topology) -> None:
    """Raise UserError on every rank where the method can't have as many workers."""
    code = code_of(settings.method) if settings.method.code else None
    if hasattr(code, "check_workers"):
        flat = settings.aggregation == "flat"
        code.check_workers(settings, topology.world_size if flat else topology.num_nodes)


def allocate(code: ModuleType, wire: Wire, context: RunContext) -> dict[str, Any]:
    """Allocate what each step of a method writes anew; {} on ranks that have nothing to write."""
    everywhere = hasattr(code, "add_penalty_") or hasattr(code, "follow_")
    if not hasattr(code, "allocate") or not (everywhere or wire.is_member):
        return {}
    return code.allocate(wire, context)
