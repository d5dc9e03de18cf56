"""Test a network that predicts the next token on a text that the ranks share."""

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
from prunex_mpi.core.task import by_position, next_token
from prunex_mpi.data.text import Text, Windows, take_windows, window_batches, windows_of
from prunex_mpi.data.text_files import Tokenizer
from prunex_mpi.models.inputs import Tokens
from prunex_mpi.run.finished_run import known_tokenizer
from prunex_mpi.run.loading import READ, share_text
from prunex_mpi.run.start import Place
from prunex_mpi.tools.evaluate_options import Options


def find_tokenizer(network: Any, data: Mapping[str, Any]) -> tuple[str, Tokenizer | None]:
    """Return the tokenizer of a network by name, and itself where its tokens tell it.

    Raises UserError where it is a file that is not known.
    """
    known = known_tokenizer(network.classes)
    name = known.name if known else data.get("tokenizer", "")
    if not name:
        raise UserError(
            "the exported network was trained on the tokens of a tokenizer file, which it does not "
            "hold: give the folder of its run"
        )
    return name, known


def read_text_for(
    place: Place, network: Any, data: Mapping[str, Any], heartbeat: Heartbeat
) -> Text:
    """Read the text that `data` names for a `network` of evaluate_network.py.

    Raises UserError on every rank where the text is of another vocabulary. Collective on `world`.
    """
    world = place.topology.world
    name, known = find_tokenizer(network, data)
    text: Text = share_text(world, data["data_dir"], name, heartbeat, known)[READ]
    # It is the same on every rank.
    if text.tokenizer.names != network.classes:
        raise UserError(
            f"--tokenizer {name} of the run is not the file any more that the network was trained "
            "with: put it back",
            UNREADABLE,
        )
    return text


def judge_text(
    place: Place,
    network: Any,
    text: Text,
    samples: int,
    batch: int,
    heartbeat: Heartbeat,
    whole: bool = False,
) -> dict[str, Any]:
    """Return how good a `network` is on the test part of a text, or on the `whole` of it.

    So many `samples` are tested, 0 for all. The same on every rank. Raises UserError on every rank
    where the text is too short. Collective on `world`.
    """
    world, context = place.topology.world, network.inputs.context
    network.model.to(place.device).eval()
    part = (world.rank, world.size)

    def take() -> Windows:
        if whole:
            return whole_windows(text, context, samples).part(slice(world.rank, None, world.size))
        return take_windows(text, context, samples=(None, samples), val_split=0, part=part).test

    windows = run_collectively(world, take)
    heartbeat.enter("evaluate")
    sums = count(network.model, windows, network.inputs, place.device, batch, heartbeat)
    sum_alike_(world, sums)
    bytes_per_token = text.length / len(text.tokens) if whole else text.bytes_per_token
    outcome = next_token(context, bytes_per_token).outcome(float(sums[0] / sums[1]), 0.0)
    told = {"text": text.found.removeprefix("text: "), "tokens_of_text": len(text.tokens)}
    return {**told, "tokens": int(sums[1]), **outcome}


def whole_windows(text: Text, context: int, most: int) -> Windows:
    """Return the windows of all of a text, the first `most` of them unless 0. Raises UserError."""
    windows = windows_of(text.tokens, 0, len(text.tokens), context)
    if not len(windows):
        raise UserError(
            f"the text has {len(text.tokens):,} tokens, and a test of the network takes at least "
            f"{context + 1:,}: give more text",
            UNREADABLE,
        )
    if most > len(windows):
        raise UserError(
            f"--test-samples {most}: there are only {len(windows)} windows of {context} tokens; 0 "
            "takes all"
        )
    return windows.part(slice(most or None))


@torch.no_grad()
def count(
    model: torch.nn.Module,
    windows: Windows,
    inputs: Tokens,
    device: torch.device,
    batch: int,
    heartbeat: Heartbeat,
) -> np.ndarray:
    """Return the sum of the losses in nats and the number of tokens of this rank's share."""
    sums = np.zeros(2)
    batches = window_batches(windows, batch_size=batch, device=device, vocabulary=inputs.vocabulary)
    for tokens, targets in batches:
        heartbeat.beat(0)
        outputs = model(tokens).double()
        mean = float(by_position(F.cross_entropy, outputs, targets))
        sums += np.array([mean, 1.0]) * targets.numel()
    return sums


def describe_text(found: Mapping[str, Any], options: Options) -> str:
    """Return what was found as text."""
    record = {f"test_{name}": value for name, value in found.items()}
    rows = [
        ("network", str(options.network)),
        ("text", found["text"]),
        ("tokens", f"{found['tokens']:,} of the text's {found['tokens_of_text']:,}"),
        ("cross-entropy", reached(record, "test")),
    ]
    return format_lines(rows)
