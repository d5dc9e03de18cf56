"""Where the network of `--teacher` comes from, and how a run comes to learn from it."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError, one_line, quote
from prunex_mpi.base.files import STATE
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import broadcast_text, together, together_while
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.losses import Teacher
from prunex_mpi.core.problem import broadcast_weights_
from prunex_mpi.core.state import Problem
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.models import standalone
from prunex_mpi.models.build import try_forward
from prunex_mpi.models.trained import Moments, digest_of, fit_, read_tensors
from prunex_mpi.run.beginning import SHOWN_DIGITS, refuse_exported, refuse_other_file
from prunex_mpi.run.finished_run import read_run
from prunex_mpi.settings.fields import Settings


def find_teacher(
    world: MPI.Comm,
    settings: Settings,
    model: nn.Module,
    dataset: Dataset,
    beat: Callable[[], None] = lambda: None,
) -> tuple[Settings, nn.Module, Moments | None]:
    """Return the settings with the digest of `--teacher`, its network, and its normalisation.

    World rank 0 alone reads; on the others the network, on the CPU, has no trained weights yet. A
    file holds those of a network like `model`; a run says itself which one it has trained, and how
    images are normalised for it (else None). `beat` is called as reading goes on. Raises UserError
    on every rank. Collective on `world`.
    """

    def read(going: Callable[[], None]) -> tuple[nn.Module | None, str]:
        if world.rank:
            return None, ""
        return _read(settings, model, dataset.image_size, going)

    network, text = together_while(world, read, beat)
    found = json.loads(broadcast_text(world, text))

    def build() -> nn.Module:
        built = network or _build(found, model)
        _refuse_other_classes(found["classes"], dataset, settings.teacher)
        _try_outputs(built, dataset, settings.teacher)
        return built

    network = together(world, build)
    look = found["look"] and tuple(map(tuple, found["look"]))
    return replace(settings, teacher_digest=found["digest"]), network, look


def taught(
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
    network.to(parameter.device, parameter.dtype).eval().requires_grad_(False)
    broadcast_weights_(topology.world, network, transport)
    share, temperature = settings.teacher_share, settings.teacher_temperature
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


def _read(
    settings: Settings, model: nn.Module, side: int, going: Callable[[], None]
) -> tuple[nn.Module, str]:
    """Return the network of `--teacher` with its weights, and as JSON what others need of it."""
    path = Path(settings.teacher)
    found: dict[str, Any] = {"description": None, "layers": {}, "look": None, "classes": []}
    if path.is_dir():
        refuse_exported(path, "--teacher")
        run = read_run(path, with_data=False, going=going)
        network, name = run.model, run.settings.model
        found |= {"description": run.description, "look": (run.mean.tolist(), run.std.tolist())}
        found["layers"] = run.summary["delivered"].get("layers", {})
        found["classes"] = run.summary["delivered"].get("classes", [])
        path = path / STATE
        digest = digest_of(path, going)
    else:
        # It reads the whole file, which the system then has in its memory.
        digest = digest_of(path, going)
        network, name = deepcopy(model), settings.model
        replaced = fit_(network, read_tensors(path), side, str(path))
        if replaced:
            reason = replaced.partition(":")[0]
            raise UserError(f"--teacher: {reason}; it must know those of the data", UNREADABLE)
    refuse_other_file(path, digest, settings.teacher_digest, "--teacher-digest")
    log.info("teacher: %s of %s, SHA-256 %s...", name, path, digest[:SHOWN_DIGITS])
    return network, json.dumps({**found, "digest": digest})


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
            f"{quote(mine)}; give one that was trained on these",
            USAGE,
        )


def _try_outputs(network: nn.Module, dataset: Dataset, source: str) -> None:
    """Raise UserError unless the teacher has an output per class of the data."""
    side, classes = dataset.image_size, dataset.num_classes
    try:
        try_forward(network, classes, side)
    # A size that does not fit shows as whatever the model's own code raises.
    except Exception as error:
        raise UserError(
            f"--teacher {source} does not fit {classes} classes of {side}x{side} images "
            f"({one_line(error)}): give one that was trained on such",
            USAGE,
        ) from error
