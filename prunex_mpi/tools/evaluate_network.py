"""Test a run's or an exported network on images, or on a text, that the ranks share.

Or continue a text with it, token by token.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, UserError, one_line, set_up_logging
from prunex_mpi.base.files import TOKENIZER, read_json, write_json
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.imports import check_named
from prunex_mpi.base.record_keys import check_network, reached
from prunex_mpi.base.tables import Table, format_lines, format_table
from prunex_mpi.comm.agreement import (
    raise_together,
    require_same,
    run_collectively,
    run_collectively_while,
    run_on_root,
    sum_alike_,
)
from prunex_mpi.core.task import by_position, next_token
from prunex_mpi.data.batches import ImageFormat, Shard, evaluation_batches, images_at_once
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.decoding import decoding_threads
from prunex_mpi.data.request import Classes, Part, Request
from prunex_mpi.data.text import Windows, take_windows, window_batches, windows_of
from prunex_mpi.data.text_files import Text, Tokenizer, decode, encode, read_tokenizer
from prunex_mpi.models import standalone
from prunex_mpi.models.inputs import Inputs, Tokens, inputs_from
from prunex_mpi.run.finished_run import known_tokenizer, load_alike, read_finished_run
from prunex_mpi.run.problem import share_contents, share_text
from prunex_mpi.run.start import Place, check_launched_together, take_places
from prunex_mpi.settings.fields import DATASET_DEFAULTS, SHARED, TEXT
from prunex_mpi.tools.evaluate_options import Options
from prunex_mpi.tools.export_proof import count_parameters, seconds_per_call

# Settings of a run that say on what it was tested.
DATA = ("dataset", "data_dir", "test_samples", "workers", "tokenizer")
# In which a token is timed.
TURNS = 5
# So many are shown, those of lowest accuracy.
CLASSES = 20


@dataclass(frozen=True)
class Network:
    """A network on the CPU, what it expects of images, and which it was tested on before.

    `classes` are the names of its classes, where they are known; `data` has the settings DATA, of
    an exported network at most the tokenizer; `digest` tells its data apart from others.
    `description` is what `standalone.build` makes it of, in full size.
    """

    model: nn.Module
    inputs: Inputs
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor
    data: dict[str, Any]
    digest: str
    description: dict[str, Any]


def evaluate(world: MPI.Comm, options: Options, heartbeat: Heartbeat) -> int:
    """Test, print, write; return the exit code. Collective on `world`."""
    heartbeat.enter("start")
    set_up_logging(world.rank, world.size)
    check_launched_together(world)
    require_same(world, "the flags", repr(options))
    network = run_collectively(world, lambda: read_network(options.network, (options.model,)))
    with take_places(world, 0, options.device) as place:
        if options.prompt is not None:
            found = run_collectively(world, lambda: answer(place, network, options, heartbeat))
            words = describe_answer(found, options)
            return _tell(world, options, found, words)
        data = run_collectively(world, lambda: data_of(network, options))
        if data["dataset"] == TEXT:
            text = read_text_for(place, network, data, heartbeat)
            # Of its own text the network has seen all but the test part; "" is not known.
            own = data["data_dir"] == network.data.get("data_dir")
            whole = not (own or text.told) and network.digest not in ("", text.digest)
            around = data["test_samples"], options.batch_size, heartbeat
            found = evaluate_text(place, network, text, *around, whole)
            words = describe_text(found, options)
        else:
            with closing(load_images(place, network, data, heartbeat)) as dataset:
                found = evaluate_images(place, network, dataset, options.batch_size, heartbeat)
            words = describe(found, options)
        return _tell(world, options, found, words)


def _tell(world: MPI.Comm, options: Options, found: dict[str, Any], words: str) -> int:
    def tell() -> None:
        if options.json_file:
            write_json(options.json_file, found)
        print(words, flush=True)

    run_on_root(world, tell)
    return 0


def load_images(
    place: Place,
    network: Network,
    data: Mapping[str, Any],
    heartbeat: Heartbeat,
    mode: str = "once",
) -> Dataset:
    """Load this rank's share of the test images that `data` names, for `network`.

    In `mode` "once" files are decoded when they are looked at. Raises UserError on every rank.
    Collective on `world`.
    """
    topology, world = place.topology, place.topology.world
    heartbeat.enter("data")
    ways = {"image_size": network.inputs.side, "data_mode": mode}
    request = Request(**data, **ways, train_samples=None)
    part = Part(
        rank=world.rank,
        size=world.size,
        here=topology.host_size,
        threads=decoding_threads(topology.core_sharers, request.workers, topology.host_size),
        known=share_contents(world, request, heartbeat),
        classes=Classes(network.inputs.classes, network.classes),
    )
    dataset = run_collectively_while(world, lambda: load_test(network, request, part), heartbeat)
    seen = repr((dataset.test_total, dataset.digest))
    require_same(world, "the numbers or labels of the test images", seen)
    return dataset


def evaluate_images(
    place: Place, network: Network, dataset: Dataset, batch: int, heartbeat: Heartbeat
) -> dict[str, Any]:
    """Return how good `network` is on the test images of all ranks. Collective on `world`.

    Raises UserError on every rank where one could not read an image.
    """
    world = place.topology.world
    heartbeat.enter("evaluate")
    dtype = next(network.model.parameters()).dtype
    look = ImageFormat(network.mean, network.std, place.device, dtype)
    model = network.model.to(place.device)
    model.eval()
    batch = min(batch, images_at_once(dataset.test))
    sums = count(model, dataset.test, look, network.inputs.classes, batch, heartbeat)
    # All ranks have a reader or none.
    if dataset.reader is not None:
        raise_together(world, dataset.reader.error)
    sum_alike_(world, sums)
    return outcome(sums, network.classes or dataset.class_names)


def read_network(path: Path, given: Collection[str] = ()) -> Network:
    """Return the network of a complete run, or one that was exported. Raises UserError.

    Modules are imported that the user has `given` alone, as package.module:function.
    """
    if (path / standalone.PLAN).exists():
        return _read_exported(path, given)
    run = read_finished_run(path, with_data=False, given=given)
    settings = run.settings
    return Network(
        model=run.model,
        inputs=inputs_from(run.description),
        classes=tuple(run.summary["delivered"].get("classes", ())),
        mean=run.mean,
        std=run.std,
        data={name: getattr(settings, name) for name in DATA},
        digest=str(run.summary["delivered"].get("data", "")),
        description=run.description,
    )


def _read_exported(path: Path, given: Collection[str]) -> Network:
    try:
        plan = read_json(path / standalone.PLAN)
        check_network(plan, plan["model"], plan["normalisation"])
        name = str(plan["model"]["name"])
        check_named("model", name, given, f"{path}/{standalone.PLAN}", path)
        model = standalone.load(path)
        look, tokenizer = plan["normalisation"], path / TOKENIZER
        return Network(
            model=model,
            inputs=inputs_from(plan["model"]),
            classes=tuple(map(str, plan.get("classes", ()))),
            mean=torch.tensor(look["mean"]),
            std=torch.tensor(look["std"]),
            data={"tokenizer": str(tokenizer)} if tokenizer.exists() else {},
            digest=str(plan.get("data", "")),
            description=plan["model"],
        )
    except UserError:
        raise
    # A damaged file and a factory that is not there show as whatever they lead to.
    except Exception as error:
        raise UserError(
            f"the exported network in {path} can't be loaded ({one_line(error)}): export its run "
            "again",
            UNREADABLE,
        ) from None


def data_of(network: Network, options: Options) -> dict[str, Any]:
    """Return what says which images to look at, by field name; raise UserError where nothing does.

    What is given counts, else what the network was trained on.
    """
    given = {"dataset": options.dataset, "data_dir": options.data_dir}
    if options.dataset == network.data.get("dataset"):
        del given["dataset"]
    given = {key: value for key, value in given.items() if value}
    usual = DATASET_DEFAULTS.get(options.dataset, {}).get("data_dir", SHARED["data_dir"].default)
    data = {"data_dir": usual, **network.data, **given}
    if "dataset" not in data:
        raise UserError("an exported network does not say what it is for: give --dataset")
    if (data["dataset"] == TEXT) != isinstance(network.inputs, Tokens):
        kind = "text" if isinstance(network.inputs, Tokens) else "images"
        raise UserError(f"the network reads {kind}: give --dataset another name")
    # The embedded text is the run's, if that was trained on it.
    if data["dataset"] == TEXT and not ("dataset" in network.data or options.data_dir):
        raise UserError(
            "an exported network does not say which text it is for: give --data-dir a file or a "
            "folder of text"
        )
    where = f"{options.network}/config.toml"
    check_named("dataset", data["dataset"], (options.dataset,), where, options.network)
    if options.test_samples is not None or given:
        data["test_samples"] = options.test_samples or 0
    return data


def load_test(network: Network, request: Request, part: Part) -> Dataset:
    """Return a rank's share of the test images; raise UserError where they don't fit."""
    dataset = load_alike(request, part)
    names = dataset.class_names
    odd = [pair for pair in zip(network.classes, names, strict=False) if pair[0] != pair[1]]
    if dataset.num_classes != network.inputs.classes or odd:
        first = f"; {odd[0][1]!r} stands where {odd[0][0]!r} was" if odd else ""
        raise UserError(
            f"the data have {dataset.num_classes} classes and the network {network.inputs.classes}"
            f"{first}: give those that it was trained for",
            UNREADABLE,
        )
    return dataset


@torch.no_grad()
def count(
    model: nn.Module,
    shard: Shard,
    look: ImageFormat,
    classes: int,
    batch: int,
    heartbeat: Heartbeat,
) -> np.ndarray:
    """Return what adds up over ranks, of each class: images, right answers, losses [3, classes]."""
    sums = torch.zeros(3, classes, dtype=torch.float64)
    for images, labels in evaluation_batches(shard, batch_size=batch, look=look):
        heartbeat.beat(0)
        outputs = model(images)
        losses = F.cross_entropy(outputs.double(), labels, reduction="none")
        right = (outputs.argmax(dim=1) == labels).double()
        columns = torch.stack([torch.ones_like(right), right, losses]).cpu()
        sums.index_add_(1, labels.cpu(), columns)
    return sums.numpy()


def outcome(sums: np.ndarray, names: tuple[str, ...]) -> dict[str, Any]:
    """Return loss and accuracy of all images and of each class (None where it has no image)."""
    classes = [
        {
            "class": names[label] if names else str(label),
            "images": int(count),
            "accuracy": right / count if count else None,
            "loss": loss / count if count else None,
        }
        for label, (count, right, loss) in enumerate(sums.T.tolist())
    ]
    images, right, loss = sums.sum(axis=1).tolist()
    total = {"images": int(images), "loss": loss / images, "accuracy": right / images}
    return {**total, "classes": classes}


def describe(found: dict[str, Any], options: Options) -> str:
    """Return what was found as text, with the classes of lowest accuracy."""
    lines = [
        ("network", str(options.network)),
        ("images", f"{found['images']:,}"),
        ("cross-entropy", f"{found['loss']:.4f}"),
        ("accuracy", f"{100 * found['accuracy']:.2f} %"),
    ]
    known = [one for one in found["classes"] if one["images"]]
    shown = sorted(known, key=lambda one: one["accuracy"])[:CLASSES]
    rows = tuple((c["class"], c["images"], 100 * c["accuracy"], c["loss"]) for c in shown)
    title = "Classes" if len(shown) == len(known) else f"Lowest {len(shown)} of {len(known)}"
    columns = ("class", "images", "accuracy %", "cross-entropy")
    table = Table(f"{title}, by accuracy", columns, rows)
    return f"{format_lines(lines)}\n\n{format_table(table)}"


# --------------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------------


def find_tokenizer(network: Network, data: Mapping[str, Any]) -> tuple[str, Tokenizer | None]:
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
    place: Place, network: Network, data: Mapping[str, Any], heartbeat: Heartbeat
) -> Text:
    """Read the text that `data` names for a `network` of evaluate_network.py.

    Raises UserError on every rank where the text is of another vocabulary. Collective on `world`.
    """
    world = place.topology.world
    name, known = find_tokenizer(network, data)
    request = Request(dataset=TEXT, data_dir=data["data_dir"], tokenizer=name)
    text = share_text(world, request, heartbeat, known)
    # It is the same on every rank.
    check_same_tokenizer(text.tokenizer, network)
    return text


def check_same_tokenizer(tokenizer: Tokenizer, network: Network) -> None:
    """Raise UserError unless the network was trained on tokens of this tokenizer."""
    if tokenizer.names != network.classes:
        raise UserError(
            f"--tokenizer {tokenizer.name} of the run is not the file any more that the network "
            "was trained with: put it back",
            UNREADABLE,
        )


def evaluate_text(
    place: Place,
    network: Network,
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
    test = Request(dataset=TEXT, context=context, train_samples=None, test_samples=samples)

    def take() -> Windows:
        if whole:
            return whole_windows(text, context, samples).part(slice(world.rank, None, world.size))
        return take_windows(text, test, (world.rank, world.size)).test

    windows = run_collectively(world, take)
    heartbeat.enter("evaluate")
    sums = count_tokens(network.model, windows, network.inputs, place.device, batch, heartbeat)
    sum_alike_(world, sums)
    bytes_per_token = text.length / len(text.tokens) if whole else text.bytes_per_token
    reached_there = next_token(context, bytes_per_token).outcome(float(sums[0] / sums[1]), 0.0)
    about = {"text": text.found.removeprefix("text: "), "tokens_of_text": len(text.tokens)}
    return {**about, "tokens": int(sums[1]), **reached_there}


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
def count_tokens(
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


# --------------------------------------------------------------------------------------------------
# Continuing a text
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How many tokens are drawn, from logits divided by `temperature`; 0 takes the likeliest."""

    tokens: int
    temperature: float
    seed: int


@torch.no_grad()
def generate(
    model: nn.Module,
    inputs: Tokens,
    start: Sequence[int],
    sampling: Sampling,
    heartbeat: Heartbeat,
) -> list[int]:
    """Return the tokens that `model`, in evaluation mode, has follow those of `start`.

    It reads as many of the last tokens as its context is long. They are drawn on the CPU, so that a
    seed gives the same ones wherever the logits are the same.
    """
    device = next(model.parameters()).device
    draws = torch.Generator().manual_seed(sampling.seed)
    tokens = list(start)
    for number in range(sampling.tokens):
        heartbeat.beat(number)
        window = torch.tensor(tokens[-inputs.context :], device=device)
        # Embeddings may be wider than the vocabulary.
        logits = model(window[None])[0, -1, : inputs.vocabulary].double().cpu()
        tokens.append(_drawn(logits, sampling.temperature, draws))
    return tokens[len(start) :]


def _drawn(logits: Tensor, temperature: float, draws: torch.Generator) -> int:
    if not temperature:
        return int(logits.argmax())
    shares = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(shares, 1, generator=draws))


def answer(
    place: Place, network: Network, options: Options, heartbeat: Heartbeat
) -> dict[str, Any]:
    """Return how the network continues a prompt, and seconds per token, of its full size as well.

    Raises UserError for a network of images, an empty prompt, and several ranks.
    """
    if not isinstance(network.inputs, Tokens):
        raise UserError("--prompt: the network reads images; leave it away")
    if place.topology.world.size > 1:
        raise UserError("--prompt: one process continues a text; start it without mpirun or srun")
    name, known = find_tokenizer(network, network.data)
    tokenizer = known or read_tokenizer(name)[0]
    check_same_tokenizer(tokenizer, network)
    start = encode(tokenizer, options.prompt)
    if not start:
        raise UserError("--prompt: the text has no token; give one to begin with")
    heartbeat.enter("evaluate")
    model = network.model.to(place.device)
    model.eval()
    sampling = Sampling(options.tokens, options.temperature, options.seed)
    tokens = generate(model, network.inputs, start, sampling, heartbeat)
    # Of some tokenizers a token's text depends on those before it.
    text = decode(tokenizer, start + tokens)[len(decode(tokenizer, start)) :]
    models = {"now": model}
    full = standalone.build(network.description).to(place.device)
    full.eval()
    if count_parameters(full) != count_parameters(model):
        models["full size"] = full
    window = torch.zeros(1, network.inputs.context, dtype=torch.int64, device=place.device)
    seconds = seconds_per_call(models, window, TURNS, heartbeat)
    return {"prompt": options.prompt, "continuation": text, "seconds_per_token": seconds}


def describe_answer(found: Mapping[str, Any], options: Options) -> str:
    """Return a prompt with what follows it, and the times."""
    milliseconds = {name: f"{1e3 * s:.2f}" for name, s in found["seconds_per_token"].items()}
    words = f"{milliseconds['now']} ms per token after a full context"
    if "full size" in milliseconds:
        words += f", {milliseconds['full size']} before it became smaller"
    return f"{found['prompt']}{found['continuation']}\n\n{words} ({options.network})"
