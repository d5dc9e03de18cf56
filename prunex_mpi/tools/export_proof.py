"""Prove that a smaller network computes the same, and measure what it saves.

Actions are timed fairly, in turns, on one rank or on all of them together.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from prunex_mpi.base.errors import FAILURE, UserError, one_line
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Cell, Table
from prunex_mpi.base.units import MIB
from prunex_mpi.data.text import rows_at_once
from prunex_mpi.models.inputs import Inputs
from prunex_mpi.models.slim import doubled

if TYPE_CHECKING:
    from mpi4py import MPI

# Of the largest output, in float64: what is left where two networks compute the same.
EXACT = 1e-9
# Times what float32 costs the masked network, which depends on the processor.
ROUNDINGS = 8
BATCH = 100
# Times the precision of the dtype: what it is taken to cost where nothing runs in float64.
ASSUMED = 8
EXACT_BATCHES = 2  # float64 is slow, and an error of the structure shows on any image
BATCHES = (1, 128)  # images per call when timed
SAMPLE_S = 0.02  # at least, or the clock and the first touch of memory count
MOST_S = 30.0  # of the turns of slow networks, which are few


@dataclass(frozen=True)
class Proof:
    """How two networks compare on `images` test images or tokens; counts are of right answers.

    `difference` is the largest between their outputs, `exact` the same in float64, None where the
    masked network does not run in it, `rounding` what its own dtype costs the masked network.
    """

    images: int
    difference: float
    exact: float | None
    rounding: float
    scale: float
    masked_right: int
    smaller_right: int
    answers_differ: int

    @property
    def allowed(self) -> float:
        """The difference that rounding explains."""
        return ROUNDINGS * max(self.rounding, torch.finfo(torch.float32).eps * max(1.0, self.scale))

    @property
    def holds(self) -> bool:
        """Whether the two networks are the same but for rounding."""
        exactly = self.exact is None or self.exact <= EXACT * max(1.0, self.scale)
        return exactly and self.difference <= self.allowed

    def line(self, counted: str = "image", names: tuple[str, str] = ("masked", "smaller")) -> str:
        """Return what the proof found of networks by `names`; `counted` is right or wrong."""
        shares = [f"{100 * n / self.images:.2f} %" for n in (self.masked_right, self.smaller_right)]
        exact = "no float64" if self.exact is None else f"{self.exact:.2g} in float64"
        ties = f", {self.answers_differ} answers differ by ties" if self.answers_differ else ""
        return (
            f"on {self.images} test {counted}s the outputs differ by at most {self.difference:.2g} "
            f"(of {self.scale:.2g}; {exact}); "
            f"accuracy {shares[0]} {names[0]}, {shares[1]} {names[1]} "
            f"({self.masked_right} and {self.smaller_right} right{ties})"
        )


@torch.no_grad()
def prove(
    masked: nn.Module,
    smaller: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    counted: str = "image",
) -> Proof:
    """Compare two networks on the CPU; raise UserError (FAILURE) unless they agree.

    In float64, on the first EXACT_BATCHES batches, outputs may differ by EXACT of the largest one,
    or of 1; in their own dtype, on all of them, by ROUNDINGS times what that dtype costs the masked
    network. Then answers can differ only where two classes are that close. A masked network that
    does not run in float64, as where torch has no such kernel, is compared in its own dtype alone.
    """
    doubles: list[nn.Module] = []
    images = masked_right = smaller_right = answers_differ = 0
    difference = rounding = scale = 0.0
    exact: float | None = 0.0
    for number, (inputs, labels) in enumerate(batches):
        wanted = masked(inputs)
        found = _tried(smaller, inputs, "the smaller network does not run")
        images += labels.numel()
        difference = max(difference, _apart(wanted, found))
        scale = max(scale, float(wanted.abs().max()))
        # Not before they have run without gradients: some keep a result, which can be copied then.
        doubles = doubles or [doubled(network) for network in (masked, smaller)]
        if number < EXACT_BATCHES and exact is not None:
            exactly = inputs.double() if inputs.is_floating_point() else inputs
            wanted_exactly = _in_float64(doubles[0], exactly)
            if wanted_exactly is None:
                exact, rounding = None, ASSUMED * torch.finfo(wanted.dtype).eps * max(1.0, scale)
            else:
                found_exactly = _tried(doubles[1], exactly, "the smaller network needs float32")
                exact = max(exact, _apart(wanted_exactly, found_exactly))
                rounding = max(rounding, _apart(wanted.double(), wanted_exactly))
        answers = [outputs.argmax(dim=-1) for outputs in (wanted, found)]
        masked_right += int((answers[0] == labels).sum())
        smaller_right += int((answers[1] == labels).sum())
        answers_differ += int((answers[0] != answers[1]).sum())
    proof = Proof(
        images, difference, exact, rounding, scale, masked_right, smaller_right, answers_differ
    )
    if not proof.holds:
        raise UserError(
            f"the smaller network is not the same ({proof.line(counted)}): nothing was written",
            FAILURE,
        )
    return proof


def _in_float64(double: nn.Module, inputs: Tensor) -> Tensor | None:
    """Return what a network in float64 makes of inputs, None where it does not run so."""
    try:
        return double(inputs)
    # What refuses another dtype may raise anything.
    except Exception:
        return None


def _tried(network: nn.Module, inputs: Tensor, problem: str) -> Tensor:
    """Return what a network makes of inputs; raise UserError (FAILURE) where it can't."""
    try:
        return network(inputs)
    # The model's own code can meet anything at other sizes, and in another dtype.
    except Exception as error:
        raise UserError(f"{problem} ({one_line(error)}): nothing was written", FAILURE) from error


def _apart(wanted: Tensor, found: Tensor) -> float:
    """Return the largest difference, infinite where there is something that is not a number."""
    apart = (wanted - found).abs()
    return float(apart.max()) if apart.isfinite().all() else math.inf


def count_parameters(model: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def count_multiply_adds(model: nn.Module, images: Tensor) -> int:
    """Return the multiply-adds of convolutions and matrix products for one image or window."""
    counter = FlopCounterMode(display=False)
    fast = torch.backends.mha.get_fastpath_enabled()
    # Fused attention would not be counted.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with counter, sdpa_kernel(SDPBackend.MATH):
            model(images[:1])
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops() // 2


def compare(
    networks: Mapping[str, nn.Module],
    inputs: Inputs,
    images: Tensor,
    sizes: tuple[int, int],
    devices: list[torch.device],
    repeat: int,
) -> tuple[Table, list[float]]:
    """Return what two networks take, by their names; leaves them on the last device.

    And the seconds of the last measurement for each of them, [] where there is none.

    Times are medians of `repeat` turns, the two in turns; 0 measures none. `images` are normalised
    and on the CPU, of any number; `sizes` are bytes of files.
    """
    larger, smaller = networks.values()
    counted = [count_multiply_adds(m, images) for m in (larger, smaller)]
    found: list[tuple[str, float, float]] = [
        ("parameters", *map(count_parameters, (larger, smaller))),
        (f"multiply-adds per {inputs.unit}", *counted),
        ("MiB of the file", *(size / MIB for size in sizes)),
    ]
    seconds: list[float] = []
    rows: list[tuple[Cell, ...]] = [(*row, row[1] / row[2]) for row in found]
    # Whole windows of text have as many outputs as they have tokens.
    most = rows_at_once(inputs.predictions, inputs.classes)
    for device in devices if repeat else ():
        for size in sorted({min(size, most) for size in BATCHES}):
            batch = images[torch.arange(size) % len(images)].to(device)
            there = {name: model.to(device) for name, model in networks.items()}
            seconds = list(seconds_per_call(there, batch, repeat, Heartbeat()).values())
            before, after = seconds
            name = f"{device.type}, batch {size}:"
            rows.append((f"{name} ms", 1e3 * before, 1e3 * after, before / after))
            many, what = size * inputs.predictions, f"{name} {inputs.counted}s/s"
            rows.append((what, many / before, many / after, before / after))
    return Table("Full size, and smaller", ("", *networks, "times"), tuple(rows)), seconds


# --------------------------------------------------------------------------------------------------
# Times
# --------------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """What is timed, and what prepares it without being timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def wall_times(
    actions: dict[str, Action],
    repeat: int,
    device: torch.device,
    heartbeat: Heartbeat,
    world: "MPI.Comm | None" = None,
    alternate: bool = False,
) -> dict[str, np.ndarray]:
    """Return `repeat` wall times of each action, in seconds, float64 [repeat].

    The actions take turns, so that whatever else the machine does hits all of them alike; the first
    turn is not counted. `alternate` reverses every other turn, since an action finds in the caches
    what the one before it has left there. With `world` its ranks start each action together, and
    the time is that of the slowest rank: then collective on `world`.
    """
    times = {name: np.empty(repeat + 1) for name in actions}
    for turn in range(repeat + 1):
        for name in list(actions)[:: 1 if turn % 2 or not alternate else -1]:
            heartbeat.go_on()
            actions[name].prepare()
            synchronize(device)
            if world is not None:
                world.Barrier()
            start = time.perf_counter()
            actions[name].run()
            synchronize(device)
            times[name][turn] = time.perf_counter() - start
    if world is not None:
        everyone = np.empty((world.size, repeat + 1))
        for taken in times.values():
            world.Allgather(taken, everyone)
            taken[:] = everyone.max(axis=0)
    return {name: taken[1:] for name, taken in times.items()}


def synchronize(device: torch.device) -> None:
    """Wait for the kernels queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def seconds_per_call(
    models: Mapping[str, nn.Module], batch: Tensor, repeat: int, heartbeat: Heartbeat
) -> dict[str, float]:
    """Return the median time of each network for a `batch`, over `repeat` turns of SAMPLE_S each.

    The networks, in evaluation mode and on the device of `batch`, take turns; fewer of them, one at
    least, where they would take longer than MOST_S.
    """

    def run(model: nn.Module, calls: int) -> float:
        synchronize(batch.device)
        start = time.perf_counter()
        for _ in range(calls):
            model(batch)
        synchronize(batch.device)
        return time.perf_counter() - start

    # The first call prepares more than those that follow.
    first = [(run(model, 1), run(model, 1))[1] for model in models.values()]
    calls = {name: math.ceil(SAMPLE_S / s) for name, s in zip(models, first, strict=True)}
    actions = {name: Action(partial(run, model, calls[name])) for name, model in models.items()}
    turns = max(1, min(repeat, int(MOST_S / sum(first))))
    times = wall_times(actions, turns, batch.device, heartbeat)
    return {name: float(np.median(taken)) / calls[name] for name, taken in times.items()}
