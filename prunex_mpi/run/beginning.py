"""Where a run's weights come from: fresh ones from the seed, or those of `--init-from`."""

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, DamagedCheckpoint, UserError, quote
from prunex_mpi.base.files import STATE, SUMMARY, telling_disk_errors, write_json_durably
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import broadcast_text, together, together_while
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.evaluation import evaluate
from prunex_mpi.core.metrics import quality
from prunex_mpi.core.state import Work, begin_iteration
from prunex_mpi.models.standalone import PLAN
from prunex_mpi.models.trained import (
    Moments,
    digest_of,
    find_torchvision_file,
    fit_,
    read_tensors,
)
from prunex_mpi.run.checkpoint_files import read_manifest, valid_names
from prunex_mpi.run.directory import RunDirectory, read_summary
from prunex_mpi.settings.fields import Settings

TORCHVISION = "torchvision"
# What the weights that a run began with are, and what they reached.
INITIAL = "initial.json"
# So much of a digest is shown.
SHOWN_DIGITS = 12


def begin_from_(
    world: MPI.Comm,
    settings: Settings,
    model: nn.Module,
    side: int,
    classes: Sequence[str] = (),
    beat: Callable[[], None] = lambda: None,
) -> Settings:
    """Give `model` the weights of `--init-from`; return the settings with what came to light.

    World rank 0 alone reads: its weights become everyone's when the problem is built. The settings
    then name the digest of the file and the normalisation that goes with its weights. `side` is
    that of an image, `classes` are those of the data by name, where they have names; `beat` is
    called as reading goes on. Raises UserError on every rank. Collective on `world`.
    """

    def read(going: Callable[[], None]) -> str:
        if world.rank:
            return ""
        path, look = locate(settings, going)
        # It reads the whole file, which the system then has in its memory.
        digest = digest_of(path, going)
        refuse_other_file(path, digest, settings.init_digest, "--init-digest")
        log.info("weights of %s, SHA-256 %s...", path, digest[:SHOWN_DIGITS])
        try:
            others = _knows_others(settings, classes)
            replaced = fit_(model, read_tensors(path), side, str(path), others)
        except UserError:
            _refuse_smaller(settings)
            raise
        if replaced:
            log.info("%s", replaced)
        found = {"init_digest": digest}
        if not settings.image_mean and look is not None:
            found |= {"image_mean": look[0], "image_std": look[1]}
        return json.dumps(found)

    found = json.loads(broadcast_text(world, together_while(world, read, beat)))
    return replace(settings, **{k: tuple(v) if type(v) is list else v for k, v in found.items()})


def _knows_others(settings: Settings, classes: Sequence[str]) -> bool:
    """Say whether the run of `--init-from`, if it is one, has named other classes than these."""
    path = Path(settings.init_from)
    known = read_summary(path)["delivered"].get("classes", []) if path.is_dir() else []
    return bool(known and classes) and known != list(classes)


def refuse_other_file(path: Path, digest: str, wanted: str, flag: str) -> None:
    """Raise UserError where a file is not the one whose digest is `wanted`, "" for any."""
    if wanted not in ("", digest):
        raise UserError(
            f"{path} is not the file of before: its SHA-256 is {digest}, {flag} {wanted}; put it "
            f"back, or leave {flag} away",
            UNREADABLE,
        )


def refuse_exported(path: Path, flag: str) -> None:
    """Raise UserError where a folder holds an exported network, not a run."""
    if os.path.exists(path / PLAN):
        raise UserError(
            f"{flag} {quote(str(path), 250)} is an exported network, which is smaller than the "
            "model: give the folder of its run",
            UNREADABLE,
        )


def _refuse_smaller(settings: Settings) -> None:
    """Raise UserError where the weights of `--init-from` are of a run that changed its network."""
    path = Path(settings.init_from)
    if path.is_dir() and read_summary(path)["delivered"].get("layers"):
        raise UserError(
            f"--init-from {quote(str(path), 250)}: its network became smaller while it was "
            "trained; give one of these widths as --model, or a run without remove-dropped",
            UNREADABLE,
        )


def look_at_checkpoints(world: MPI.Comm, settings: Settings) -> tuple[Settings, bool]:
    """Say whether the run goes on from a checkpoint, which has all weights.

    The settings that are returned have the normalisation of its images: other ranks would measure
    another, on other images. Collective on `world`.
    """
    found = ""
    if world.rank == 0 and settings.resume:
        # What can't be read is told where the run is restored.
        with contextlib.suppress(OSError):
            names = valid_names(Path(settings.run_dir))
            found = json.dumps(_first_colours(Path(settings.run_dir), names)) if names else ""
    found = broadcast_text(world, found)
    if found and (colours := json.loads(found)) and not settings.image_mean:
        mean, std = map(tuple, colours)
        settings = replace(settings, image_mean=mean, image_std=std)
    return settings, bool(found)


def _first_colours(run: Path, names: Sequence[str]) -> list[list[float]]:
    """Return mean and deviation of the colours by the first of the checkpoints that is whole."""
    for name in names:
        with contextlib.suppress(DamagedCheckpoint):
            # Earlier versions did not note them.
            return read_manifest(run, name).get("colours", [])
    return []


def judge_beginning(topology: Topology, files: RunDirectory | None, work: Work) -> None:
    """Say what the weights of `--init-from` reach before they are trained on; write initial.json.

    Nothing is judged where the run has begun already. Collective on `world`.
    """
    settings, position = work.settings, work.state.position
    begins = (position.iteration, position.step) == (1, 0)
    if not settings.init_from or not begins or work.problem.test is None:
        return
    work.heartbeat.enter("evaluate")
    loss, accuracy = evaluate(topology, work)
    # It is no part of the first outer iteration, and no network that the run has made.
    position.best = []
    begin_iteration(position)
    log.info("before training: loss %.4f, accuracy %.2f %%", loss, 100 * accuracy)
    record = {
        "from": settings.init_from,
        "sha256": settings.init_digest,
        **quality(work, loss, accuracy),
    }

    def write() -> None:
        if files is not None:
            write_json_durably(files.path / INITIAL, record)

    together(topology.world, lambda: telling_disk_errors(INITIAL, write))


def read_initial(run: Path) -> dict[str, Any]:
    """Return what `judge_beginning` has written, {} where a run began with fresh weights."""
    try:
        return json.loads((run / INITIAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def locate(
    settings: Settings, going: Callable[[], None] = lambda: None
) -> tuple[Path, Moments | None]:
    """Return the file of `--init-from`, and (mean, std) of the images of its weights if known.

    `going` is called as it is downloaded. Raises UserError where there is none.
    """
    source = settings.init_from
    if source == TORCHVISION:
        return find_torchvision_file(settings.model, going)
    path = Path(source)
    if not os.path.isdir(path):
        return path, None
    refuse_exported(path, "--init-from")
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
