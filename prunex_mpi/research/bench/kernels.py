"""Time what phases 2 to 5 do to memory on one rank, and the codes that phase 4 may send.

Each step is timed against copying the same bytes.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.compress.quantise import (
    BLOCK,
    PAYLOADS,
    add_decoded_,
    block_maxima_,
    decode_,
    decode_shared_,
    encode_,
    encode_shared_,
    record_bytes,
)
from prunex_mpi.core.admm import find_residuals
from prunex_mpi.core.mask_agreement import project_locally
from prunex_mpi.core.state import State, adopt_mask, wires_of
from prunex_mpi.methods import hsadmm
from prunex_mpi.pruning.compaction import pack_, unpack_
from prunex_mpi.pruning.masks import make_mask
from prunex_mpi.research.bench.workbench import Bench, make_state
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools.timing import Action

# On the CPU several passes go over a tile in the cache, and are few more than a copy.
AIM, CODE_AIM = 3.0, 4.0
GPU_AIM = 1.5
WITH_AIM = ("projection", "pack", "unpack", "dual update")
# Of codes: float32 values of a vector, and workers that share the levels of int8sum.
VALUES, WORKERS = 8 * 2**20, 2

# A payload, its bits per value and the steps of its code.
Steps = tuple[str, float, dict[str, Callable[[], object]]]


def kernels(bench: Bench, values: int = VALUES) -> list[Table]:
    """Return the tables of steps and of codes, which work on so many `values`.

    In a job of one rank, where no step waits for a network.
    """
    state = make_state(bench.settings, bench.device)
    adopt_mask(state, project_alone(state, bench.settings))
    return [_steps(bench, state), block_codes(bench, values)]


def project_alone(state: State, settings: Settings) -> np.ndarray:
    """Project `scratch` as a leader does in phase 3, without MPI, and return the mask."""
    mask = project_locally(state.scratch, state, 1.0)
    make_mask(state.layout, state.groups, mask, state.theta).apply_(state.scratch)
    return mask


def _steps(bench: Bench, state: State) -> Table:
    settings = bench.settings
    theta, whole = state.theta, state.message.fragment()
    payload, _ = state.message.values(whole)
    target = torch.empty_like(theta)

    def candidate() -> None:
        torch.add(state.theta, state.u, out=state.scratch)

    def fill_payload() -> None:
        pack_(state.theta, whole.plan, payload)

    node = wires_of(bench.topology, state, bench.transport).node

    def duals() -> object:
        moved = np.zeros(len(state.layout.segments))
        norms = hsadmm.update_duals(state, moved, moved)
        return find_residuals(bench.topology.world, state, settings, norms, 0.0)

    def intra() -> object:
        return hsadmm.intra_node_consensus(node, state, settings)

    def unpack() -> None:
        unpack_(payload, whole.plan, state.scratch)

    model, both = ("the model", (theta,)), ("both duals", (state.u, state.v))
    projection = Action(lambda: project_alone(state, settings), candidate)
    updating = Action(lambda: hsadmm.update_duals(state, None, None))
    steps: list[tuple[str, str, tuple[Tensor, ...], Action]] = [
        ("intra candidate", *model, Action(intra)),
        ("projection", *model, projection),
        ("pack", "the payload", (payload,), Action(fill_payload)),
        ("unpack", *model, Action(unpack, fill_payload)),
        ("dual update", *both, updating),
        ("dual update + norms", *both, Action(duals)),
    ]
    actions = {}
    for name, _, sources, action in steps:
        actions[f"copy for {name}"] = Action(lambda sources=sources: _copy(sources, target))
        actions[name] = action
    best = bench.best(actions)
    rows = []
    for name, what, sources, _ in steps:
        copy = best[f"copy for {name}"]
        size = sum(s.numel() * s.element_size() for s in sources) / MIB
        aim = _aim_on(bench, AIM) if name in WITH_AIM else None
        rows.append((name, what, size, 1e3 * copy, 1e3 * best[name], best[name] / copy, aim))
    kept = whole.plan.numel / state.layout.numel
    return Table(
        f"Kernels on one rank: {settings.model}, {state.layout.numel:,} parameters, "
        f"{'+'.join(settings.groups)} groups, payload {100 * kept:.1f} % of the model",
        ("step", "bytes copied", "MiB", "copy ms", "step ms", "times copy", "aim"),
        tuple(rows),
        (
            f"minimum of {bench.repeat} turns; each step takes turns with an out-of-place copy_ "
            "of the bytes named",
            "projection: group energies, selection, factors and masking, as on a leader",
            "dual update + norms: all of phase 5 on one rank, with seven norms per layer",
        ),
    )


def _aim_on(bench: Bench, on_cpu: float) -> float:
    return on_cpu if bench.device.type == "cpu" else GPU_AIM


def _copy(sources: tuple[Tensor, ...], target: Tensor) -> None:
    for source in sources:
        target[: source.numel()].copy_(source)


def block_codes(bench: Bench, values: int) -> Table:
    """Return the table of encoding and decoding so many float32 `values`, a multiple of 128."""
    source = torch.randn(values, device=bench.device)
    vector, target = torch.empty_like(source), torch.empty_like(source)
    copy = Action(lambda: target.copy_(source))
    rows = []
    for name, size, steps in (
        *(coding_steps(payload, vector, target) for payload in PAYLOADS),
        shared_steps(vector, target, 127 // WORKERS),
    ):
        # What encoding leaves in the vector is smaller each time: it starts from the source.
        actions = {"copy": copy}
        for step, run in steps.items():
            actions[step] = Action(run, lambda: vector.copy_(source))
        best = bench.best(actions)
        first = best.pop("copy")
        for step, seconds in best.items():
            times = 1e3 * first, 1e3 * seconds, seconds / first
            rows.append((name, step, size, *times, _aim_on(bench, CODE_AIM)))
    return Table(
        f"Codes by blocks of {BLOCK}: {values:,} float32 values, {values * 4 / MIB:.2f} MiB",
        ("payload", "step", "bits per value", "copy ms", "step ms", "times copy", "aim"),
        tuple(rows),
        (
            f"minimum of {bench.repeat} turns; the steps of a payload take turns with an "
            "out-of-place copy_ of the vector",
            "encode leaves the quantisation error in the vector; add: decode and add",
        ),
    )


def coding_steps(payload: str, vector: Tensor, target: Tensor) -> Steps:
    """Return payload, bits per value, and what codes `vector` and decodes that to `target`."""
    blocks = vector.numel() // BLOCK
    records = vector.new_empty(blocks, record_bytes(payload), dtype=torch.uint8)
    steps = {
        "encode": lambda: encode_(vector, records, payload),
        "decode": lambda: decode_(records, target, payload),
        "add": lambda: add_decoded_(records, target, payload),
    }
    return payload, 8 * record_bytes(payload) / BLOCK, steps


def shared_steps(vector: Tensor, target: Tensor, levels: int) -> Steps:
    """Return the same of int8sum, whose workers have so many `levels` each."""
    maxima = vector.new_empty(vector.numel() // BLOCK)
    integers = torch.empty_like(vector, dtype=torch.int8)
    steps = {
        "maxima": lambda: block_maxima_(vector, maxima),
        "encode": lambda: encode_shared_(vector, maxima, levels, integers),
        "decode": lambda: decode_shared_(integers, maxima, levels, target),
    }
    return "int8sum", 8 + 8 * vector.element_size() / BLOCK, steps
