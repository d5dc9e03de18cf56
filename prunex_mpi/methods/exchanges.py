"""What each method does: the only place that finds a method's code by its name.

Beside it `settings/` says, by lists of methods, what each setting means to whom, and which values
are refused. A method that communicates at each step is a module with one face:

- `memory(settings, layout, theta)`: what one step hands to the next; checkpoints hold it;
- `allocate(wire, work)`: what each step writes anew (`space`), so that no step allocates; called
  on every rank, also on those that do not speak: their wire has no communicator;
- `exchange_(wire, space, work)`: replaces a worker's weighted gradient in `grad` by the sum over
  all workers, the same bits on each; what it leaves out of the sum stays in the memory; a method
  of PLAIN_MEAN has none, the driver adds up its gradients;
- `payload(settings, layout, size, workers)`: bytes that a worker hands over in a step, or the most
  of them, and what they are in words, for the dry run;
- `OPERATIONS`: its messages, as rows (what, communicator, MPI operation, operand).

A new one is such a file, a line in `module_of`, and its settings: README.md goes through it. The
others exchange once per outer iteration, and are what their driver does.
"""

from types import ModuleType
from typing import Any

from torch import Tensor

from prunex_mpi.comm.wire import COUNT_BYTES, Wires
from prunex_mpi.compress.chunks import position_bytes
from prunex_mpi.compress.sparse import POSITION_BYTES
from prunex_mpi.compress.threshold import divide
from prunex_mpi.core.message import outer_memory
from prunex_mpi.core.state import State, Work
from prunex_mpi.core.sums import SUMMED
from prunex_mpi.methods import (
    adacgd,
    dense,
    dgc,
    half,
    lion,
    omnireduce,
    pactrain,
    pactrain_mask,
    powersgd,
    prunetrain,
    sparseloco,
    terngrad,
    topk,
)
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.methods import BY_GROUPS, PER_STEP

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


def module_of(method: str) -> ModuleType:
    """Return the module with the face of a method that communicates at each step."""
    match method:
        case "dense":
            return dense
        case "topk":
            return topk
        case "dgc":
            return dgc
        case "powersgd":
            return powersgd
        case "omnireduce":
            return omnireduce
        case "fp16" | "bf16":
            return half
        case "terngrad":
            return terngrad
        case "lion":
            return lion
        case "adacgd":
            return adacgd
        case "pactrain":
            return pactrain
        case "prunetrain":
            return prunetrain
        case other:
            raise ValueError(f"no module for {other} here: give it a line, as PER_STEP names it")


def operations_of(settings: Settings) -> tuple[tuple[str, str, str, str], ...]:
    """Return the messages of any method: rows (what, communicator, MPI operation, operand)."""
    average = CODED_AVERAGE
    if settings.payload in ("fp32", SUMMED):
        average = AVERAGE if settings.payload == "fp32" else SHARED_AVERAGE
    match settings.method:
        case "prunex-flat" if settings.flat_consensus == "direct":
            return (average, DECISION)
        case "sparseloco":
            return sparseloco.OPERATIONS
        case method if method in PER_STEP:
            return module_of(method).OPERATIONS
        case method if method in BY_GROUPS:
            return (*CHOICE, average)
        case _:
            return (average,)


def metadata_bytes(settings: Settings, state: State, counted: dict[str, int], rounds: int) -> int:
    """Return how many of a run's inter-node bytes, as `counted`, say where values belong.

    Beside masks and bits: a position for each value, or block of values, that does not travel
    whole; of SparseLoCo one of 12 bits.
    """
    size, steps = state.theta.element_size(), state.position.steps_done
    # The statistics of each outer iteration have no positions.
    pairs, values = counted["payload"] - rounds * state.stats.numel() * size, 1
    match settings.method:
        case "sparseloco":
            return rounds * position_bytes(state.layout, settings.compress_ratio)
        case "topk":
            pass
        case "omnireduce" if settings.block_top < 1:
            values = settings.block_size
        case "dgc":
            parts, whole = divide(state.layout, settings.compress_ratio)
            counts = COUNT_BYTES if parts else 0
            pairs -= steps * (sum(segment.numel for segment in whole) * size + counts)
        case "adacgd":
            # The first step is dense.
            pairs -= state.layout.numel * size + (steps - 1) * COUNT_BYTES
        case _:
            return counted["mask"]
    return counted["mask"] + pairs * POSITION_BYTES // (POSITION_BYTES + values * size)


def memory_of(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate what the method remembers, as it is before the first step.

    Names begin with OWN, EACH or SHARED, which says what other nodes go on from (`core/state.py`).
    `own.` tensors have theta's dtype and device, `shared.` tensors any (small ones that decide stay
    on the host); all are contiguous. Raises UserError where the method can't work on such a layout.
    """
    match settings.method:
        case "diloco":
            return outer_memory(theta)
        case "sparseloco":
            return sparseloco.memory(theta)
        case method if method in PER_STEP:
            return module_of(method).memory(settings, layout, theta)
        case _:
            return {}


def start_gradient_(wires: Wires, space: dict[str, Any], work: Work, loss: Tensor) -> None:
    """Let `grad` start from what the method adds to the gradient of `loss`: mostly nothing."""
    match work.settings.method:
        case "prunetrain":
            prunetrain.start_gradient_(wires, space, work, loss)
        case _:
            work.state.grad.zero_()


def follow_(wires: Wires, space: dict[str, Any], work: Work) -> None:
    """Look at the gradient that all ranks have received. Collective on `world`."""
    match work.settings.method:
        case "pactrain":
            pactrain.follow_(wires, space, work)


def prune_(wires: Wires, work: Work, done: int) -> float | None:
    """Prune after `done` outer iterations, if that is when; return the drift of a mask of weights.

    None where the drift is that of the groups. Collective on `world`, or on `node` and `leader`.
    """
    match work.settings.method:
        case "pactrain":
            return pactrain_mask.prune_when_due_(wires, work, done)
        case _:
            return None


def reshape_(wires: Wires, space: dict[str, Any], work: Work, done: int) -> bool:
    """Take out of the network what is of no use after `done` outer iterations; say if any was.

    Then `space` has to be allocated anew. Collective on `world`.
    """
    match work.settings.method:
        case "prunetrain" if done % work.settings.reconfigure_every == 0:
            return prunetrain.reconfigure_(wires, space, work)
        case _:
            return False
