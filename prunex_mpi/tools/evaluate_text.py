"""Test a network that predicts the next token on the end of a text that the ranks share."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.record_keys import reached
from prunex_mpi.base.tables import format_lines
from prunex_mpi.comm.agreement import run_collectively, sum_alike_
from prunex_mpi.core.loading import READ, share_text
from prunex_mpi.core.task import by_position, next_token
from prunex_mpi.data.text import TextSet, take_windows, window_batches
from prunex_mpi.models.inputs import Tokens
from prunex_mpi.run.finished_run import known_tokenizer
from prunex_mpi.run.start import Place
from prunex_mpi.tools.evaluate_options import Options


def judge_text(
    place: Place, network: Any, data: Mapping[str, Any], batch: int, heartbeat: Heartbeat
) -> dict[str, Any]:
    """Return how good a `network` of evaluate_network.py is on the test part of a text.

    The same on every rank. Raises UserError on every rank where the text is of another vocabulary.
    Collective on `world`.
    """
    world = place.topology.world
    network.model.to(place.device).eval()
    known = known_tokenizer(network.classes)
    name = known.name if known else data.get("tokenizer", "")
    if not name:
        raise UserError(
            "the exported network was trained on the tokens of a tokenizer file, which it does not "
            "hold: give the folder of its run"
        )
    read = share_text(world, data["data_dir"], name, heartbeat, known)[READ]
    where = (world.rank, world.size)

    def take() -> TextSet:
        windows = (None, data.get("test_samples", 0))
        text = take_windows(read, network.inputs.context, samples=windows, val_split=0, part=where)
        if text.class_names != network.classes:
            raise UserError(
                f"--tokenizer {name} of the run is not the file any more that the network was "
                "trained with: put it back",
                UNREADABLE,
            )
        return text

    text = run_collectively(world, take)
    heartbeat.enter("evaluate")
    sums = count(network.model, text, network.inputs, place.device, batch, heartbeat)
    sum_alike_(world, sums)
    task = next_token(text.context, read.bytes_per_token)
    return {"tokens": int(sums[1]), **task.outcome(float(sums[0] / sums[1]), 0.0)}


@torch.no_grad()
def count(
    model: torch.nn.Module,
    text: TextSet,
    inputs: Tokens,
    device: torch.device,
    batch: int,
    heartbeat: Heartbeat,
) -> np.ndarray:
    """Return the sum of the losses in nats and the number of tokens of this rank's share."""
    sums = np.zeros(2)
    batches = window_batches(
        text.test, batch_size=batch, device=device, vocabulary=inputs.vocabulary
    )
    for tokens, targets in batches:
        heartbeat.beat(0)
        outputs = model(tokens).double()
        mean = float(by_position(F.cross_entropy, outputs, targets))
        sums += np.array([mean, 1.0]) * targets.numel()
    return sums


def describe_text(found: Mapping[str, Any], options: Options) -> str:
    """Return what was found as text."""
    record = {f"test_{name}": value for name, value in found.items()}
    rows = [("network", str(options.network)), ("tokens", f"{found['tokens']:,}")]
    return format_lines([*rows, ("cross-entropy", reached(record, "test"))])
