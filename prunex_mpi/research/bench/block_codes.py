"""Time the codes by blocks that phase 4 may send, against copying the vector itself."""

from collections.abc import Callable

import torch
from torch import Tensor

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.compress.block_codes import (
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
from prunex_mpi.tools.timing import Action, min_seconds

AIM = 4.0
VALUES = 8 * 2**20
WORKERS = 2


def block_codes(
    device: torch.device, repeat: int, heartbeat: Heartbeat, values: int = VALUES
) -> Table:
    """Return the table of encoding and decoding so many float32 `values`, a multiple of 128."""
    source = torch.randn(values, device=device)
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
        best = min_seconds(actions, repeat, device, heartbeat)
        first = best.pop("copy")
        for step, seconds in best.items():
            rows.append((name, step, size, 1e3 * first, 1e3 * seconds, seconds / first, AIM))
    return Table(
        f"Codes by blocks of {BLOCK}: {values:,} float32 values, {values * 4 / MIB:.2f} MiB",
        ("payload", "step", "bits per value", "copy ms", "step ms", "times copy", "aim"),
        tuple(rows),
        (
            f"minimum of {repeat} turns; the steps of a payload take turns with an out-of-place "
            "copy_ of the vector",
            "encode leaves what rounding left over in the vector; add: decode and add",
        ),
    )


Steps = tuple[str, float, dict[str, Callable[[], object]]]


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
