"""Networks that are read from files: the first weights of `--init-from`, and `--teacher`."""

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, UserError, log, one_line, quote
from prunex_mpi.base.files import STATE, SUMMARY, read_json, telling_disk_errors, write_json_durably
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import (
    broadcast_json,
    run_collectively,
    run_collectively_while,
    run_on_root,
)
from prunex_mpi.comm.collectives import Transport, broadcast_weights_
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.evaluation import evaluate
from prunex_mpi.core.loop import quality
from prunex_mpi.core.state import Problem, RunContext, begin_iteration
from prunex_mpi.core.task import Teacher
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.models import standalone
from prunex_mpi.models.dummy_input import try_forward
from prunex_mpi.models.inputs import Inputs, Tokens, inputs_from
from prunex_mpi.models.standalone import PLAN
from prunex_mpi.models.trained import (
    Moments,
    digest_of,
    find_torchvision_file,
    fit_,
    read_tensors,
    saved_in,
)
from prunex_mpi.run.directory import RunDirectory, read_summary
from prunex_mpi.run.finished_run import read_finished_run
from prunex_mpi.run.summary import judged
from prunex_mpi.settings.fields import Settings

TORCHVISION = "torchvision"
# What the weights that a run began with are, and what they reached.
INITIAL = "initial.json"
# How the weights of a network that has become smaller are taken.
BY_EXPORT = "model.safetensors with a --model by fresh of prunex_mpi/models/build.py"
# So much of a digest is shown.
SHOWN_DIGITS = 12


def load_initial_(
    world: MPI.Comm,
    settings: Settings,
    model: nn.Module,
    inputs: Inputs,
    classes: Sequence[str],
    heartbeat: Heartbeat,
) -> Settings:
    """Give `model` the weights of `--init-from`; return the settings with what came to light.

    World rank 0 alone reads: its weights become everyone's when the problem is built. The settings
    then name the digest of the file and the normalisation that goes with its weights. `inputs` is
    that of an image, `classes` are those of the data by name, where they have names. Raises
    UserError on every rank. Collective on `world`.
    """

    def read() -> dict[str, Any] | None:
        if world.rank:
            return None
        path, look = locate(settings)
        # It reads the whole file, which the system then has in its memory.
        digest = digest_of(path)
        check_same_file(path, digest, settings.init_digest, "--init-digest")
        log.info("weights of %s, SHA-256 %s...", path, digest[:SHOWN_DIGITS])
        known = _delivered(settings).get("classes", [])
        others = bool(known and classes) and known != list(classes)
        if others and isinstance(inputs, Tokens):
            raise UserError(
                f"--init-from {settings.init_from} knows other tokens than the text has: give the "
                "--tokenizer, and for chars a text of the same characters, that it was trained with"
            )
        if replaced := _fit_file_(settings, model, path, inputs, others):
            log.info("%s", replaced)
        found = {"init_digest": digest}
        if not settings.image_mean and look is not None:
            found |= {"image_mean": look[0], "image_std": look[1]}
        return found

    found = broadcast_json(world, run_collectively_while(world, read, heartbeat))
    return replace(settings, **{k: tuple(v) if type(v) is list else v for k, v in found.items()})


def check_initial(settings: Settings, model: nn.Module, inputs: Inputs) -> None:
    """Raise UserError where `model` does not take the weights of `--init-from`.

    It gets them. Those of torchvision are not looked at, since they may have to be downloaded.
    """
    if settings.init_from != TORCHVISION:
        path, _ = locate(settings)
        check_same_file(path, digest_of(path), settings.init_digest, "--init-digest")
        _fit_file_(settings, model, path, inputs, others=False)


def _fit_file_(
    settings: Settings, model: nn.Module, path: Path, inputs: Inputs, others: bool
) -> str:
    """Put the weights in the file of `--init-from` into `model`, as `fit_` does."""
    try:
        return fit_(model, read_tensors(path), inputs, str(path), others)
    except UserError:
        if _delivered(settings).get("layers"):
            run = quote(str(Path(settings.init_from)), 250)
            raise UserError(
                f"--init-from {run}: its network became smaller while it was trained; export it "
                f"and give its model/{BY_EXPORT}, or a run without remove-dropped",
                UNREADABLE,
            ) from None
        raise


def _delivered(settings: Settings) -> dict[str, Any]:
    """Return what the run of `--init-from` says that it has delivered, {} for a file."""
    path = Path(settings.init_from)
    is_run = settings.init_from != TORCHVISION and path.is_dir()
    return read_summary(path).get("delivered", {}) if is_run else {}


def check_same_file(path: Path, digest: str, wanted: str, flag: str) -> None:
    """Raise UserError where a file is not the one whose digest is `wanted`, "" for any."""
    if wanted not in ("", digest):
        raise UserError(
            f"{path} is not the file of before: its SHA-256 is {digest}, {flag} {wanted}; put it "
            f"back, or leave {flag} away",
            UNREADABLE,
        )


def check_not_exported(path: Path, flag: str, otherwise: str = "") -> None:
    """Raise UserError where a folder holds an exported network, not a run, `otherwise` to do."""
    if os.path.exists(path / PLAN):
        raise UserError(
            f"{flag} {quote(str(path), 250)} is an exported network, which is smaller than the "
            f"model: give the folder of its run{otherwise}",
            UNREADABLE,
        )


def evaluate_initial(topology: Topology, files: RunDirectory | None, context: RunContext) -> None:
    """Evaluate the weights of `--init-from` before training; log it and write initial.json.

    Nothing is judged where the run has begun already. Collective on `world`.
    """
    settings, position = context.settings, context.state.position
    begins = (position.iteration, position.step) == (1, 0)
    if not settings.init_from or not begins or context.problem.test is None:
        return
    context.heartbeat.enter("evaluate")
    found = evaluate(topology, context)
    # It is no part of the first outer iteration, and no network that the run has made.
    position.best = []
    begin_iteration(position)
    record = {"from": settings.init_from, "sha256": settings.init_digest, **quality(context, found)}
    log.info("before training: loss %.4f, %s", found["loss"], judged(record))

    @telling_disk_errors(INITIAL)
    def write() -> None:
        write_json_durably(files.path / INITIAL, record)

    run_on_root(topology.world, write)


def read_initial(run: Path) -> dict[str, Any]:
    """Return what `evaluate_initial` has written, {} where a run began with fresh weights."""
    try:
        return read_json(run / INITIAL)
    except (OSError, ValueError):
        return {}


def locate(settings: Settings) -> tuple[Path, Moments | None]:
    """Return the file of `--init-from`, and (mean, std) of the images of its weights if known.

    Raises UserError where there is none.
    """
    source = settings.init_from
    if source == TORCHVISION:
        return find_torchvision_file(settings.model)
    path = Path(source)
    if not os.path.isdir(path):
        return path, None
    if saved := saved_in(path):
        return saved, None
    check_not_exported(path, "--init-from", f", or its {BY_EXPORT}")
    try:
        delivered = read_summary(path)["delivered"]
        mean, std = (tuple(map(float, delivered[key])) for key in ("mean", "std"))
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"--init-from {quote(source, 250)} is no run that ended well, {SUMMARY} does not say "
            "what was delivered: give a file of weights, or the folder of a run",
            UNREADABLE,
        ) from None
    return path / STATE, (mean, std)


def find_teacher(
    world: MPI.Comm, settings: Settings, model: nn.Module, dataset: Dataset, heartbeat: Heartbeat
) -> tuple[Settings, nn.Module, Moments | None]:
    """Return the settings with the digest of `--teacher`, its network, and its normalisation.

    World rank 0 alone reads; on the others the network, on the CPU, has no trained weights yet. A
    file holds those of a network like `model`; a run says itself which one it has trained, and how
    images are normalised for it (else None). Raises UserError on every rank. Collective on `world`.
    """

    def read() -> tuple[nn.Module | None, dict[str, Any]]:
        if world.rank:
            return None, {}
        return _read(settings, model, inputs)

    inputs = inputs_from(dataset.sizes())
    network, found = run_collectively_while(world, read, heartbeat)
    found = broadcast_json(world, found)

    def build() -> nn.Module:
        built = network or _build(found, model)
        _refuse_other_classes(found["classes"], dataset, settings.teacher)
        try:
            try_forward(built, inputs)
        # A size that does not fit shows as whatever the model's own code raises.
        except Exception as error:
            raise UserError(
                f"--teacher {settings.teacher} does not fit {inputs.text()} ({one_line(error)}): "
                "give one that was trained on such"
            ) from error
        return built

    network = run_collectively(world, build)
    look = found["look"] and tuple(map(tuple, found["look"]))
    return replace(settings, teacher_digest=found["digest"]), network, look


def with_teacher(
    topology: Topology,
    settings: Settings,
    problem: Problem,
    teacher: tuple[nn.Module, Moments | None],
    transport: Transport,
) -> Problem:
    """Return the problem of a run that learns from `teacher` too, which `find_teacher` has found.

    Rank 0's weights become everyone's. Collective on `world`.
    """
    network, look = teacher
    parameter = next(problem.model.parameters())
    network.to(parameter.device, parameter.dtype).requires_grad_(False)
    network.eval()
    broadcast_weights_(topology.world, network, transport)
    share, temperature = settings.distillation_alpha, settings.distillation_tau
    found = Teacher(network, share, temperature)
    if look is not None:
        mean, std = (torch.tensor(values) for values in look)
        if not (torch.equal(mean, problem.mean) and torch.equal(std, problem.std)):
            # From images normalised for the run to what they were before, and on from there.
            scale, shift = problem.std / std, (problem.mean - mean) / std
            on = {"device": parameter.device, "dtype": parameter.dtype}
            affine = [values.view(1, 3, 1, 1).to(**on) for values in (scale, shift)]
            found = replace(found, scale=affine[0], shift=affine[1])
    # Of an untrained network the soft labels cost at most T^2 times what the hard ones do.
    guess = problem.guess_loss * (1 - share + share * temperature**2)
    return replace(problem, teacher=found, guess_loss=guess)


def _read(settings: Settings, model: nn.Module, inputs: Inputs) -> tuple[nn.Module, dict[str, Any]]:
    """Return the network of `--teacher` with its weights, and what others need of it."""
    path = Path(settings.teacher)
    path = saved_in(path) or path
    found: dict[str, Any] = {"description": None, "layers": {}, "look": None, "classes": []}
    if path.is_dir():
        check_not_exported(path, "--teacher")
        # --model names the learner: of the user's own, its module may have the teacher as well.
        given = settings.model, settings.loss
        run = read_finished_run(path, with_data=False, given=given, whole=False)
        network, name = run.model, run.settings.model
        found |= {"description": run.description, "look": (run.mean.tolist(), run.std.tolist())}
        found["layers"] = run.summary["delivered"].get("layers", {})
        found["classes"] = run.summary["delivered"].get("classes", [])
        path = path / STATE
        digest = digest_of(path)
    else:
        # It reads the whole file, which the system then has in its memory.
        digest = digest_of(path)
        network, name = deepcopy(model), settings.model
        replaced = fit_(network, read_tensors(path), inputs, str(path))
        if replaced:
            reason = replaced.partition(":")[0]
            raise UserError(f"--teacher: {reason}; it must know those of the data", UNREADABLE)
    check_same_file(path, digest, settings.teacher_digest, "--teacher-digest")
    log.info("teacher: %s of %s, SHA-256 %s...", name, path, digest[:SHOWN_DIGITS])
    return network, {**found, "digest": digest}


def _build(found: dict[str, Any], model: nn.Module) -> nn.Module:
    """Return a network of the shapes that rank 0 has told of."""
    if found["description"] is None:
        return deepcopy(model)
    network = standalone.build(found["description"])
    standalone.resize_(network, found["layers"])
    return network


def _refuse_other_classes(known: list[str], dataset: Dataset, source: str) -> None:
    """Raise UserError where both have names of classes, and others or in another order."""
    names = list(dataset.class_names)
    if known and names and known != names:
        mine, theirs = next(pair for pair in zip_longest(names, known) if pair[0] != pair[1])
        raise UserError(
            f"--teacher {source} knows other classes: {quote(theirs)} where the data have "
            f"{quote(mine)}; give one that was trained on these"
        )
