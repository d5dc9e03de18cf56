"""Where a comparison keeps its runs, so that an interrupted one goes on."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, UserError, listed, quote
from prunex_mpi.base.files import (
    STATE,
    SUMMARY,
    prepare_file,
    telling_disk_errors,
    tomllib,
    write_json_durably,
)
from prunex_mpi.comm.agreement import broadcast_json, run_on_first
from prunex_mpi.config.resolve import first_difference, from_table, to_toml
from prunex_mpi.models.trained import digest_of
from prunex_mpi.research.compare.compare_options import Options
from prunex_mpi.research.compare.outcomes import Outcome, outcome_from
from prunex_mpi.research.compare.plan import BY_SEED, Row, name_seed, settings_of
from prunex_mpi.run.pretrained import TORCHVISION
from prunex_mpi.settings.fields import Settings, key_of

OUTCOMES = "outcomes"


def run_name(row: Row, seed: int) -> str:
    """Return the name of a run's directory."""
    return f"{row.folder}-{seed}"


def trial_name(row: Row, number: int) -> str:
    """Return the name under which a trial is kept."""
    return f"{row.folder}-trial-{number}"


def require_all(options: Options) -> None:
    """Raise UserError unless all runs of the plan are kept."""
    folder, missing = Path(options.folder), []
    kept = {file.stem: file for file in _files(folder)}
    for row in options.whole:
        trials = [trial_name(row, n) for n in range(len(row.points))] if options.tunes else []
        missing += (mine := [name for name in trials if name not in kept])
        # Of a row that diverged in every trial there is no run.
        if mine or not trials or not all(_diverged(kept[name]) for name in trials):
            runs = [run_name(row, seed) for seed in options.protocol.seeds]
            missing += [name for name in runs if name not in kept]
    if missing:
        raise UserError(
            f"--reveal: {len(missing)} runs of the plan are missing in {quote(options.folder, 250)}"
            f" ({listed(missing)}); train them first, with --resume"
        )


def _diverged(file: Path) -> bool:
    try:
        return json.loads(file.read_text(encoding="utf-8"))["outcome"]["measured"] is None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{file} can't be read; remove it to do its run again", UNREADABLE
        ) from None


def prepare(options: Options) -> None:
    """Raise UserError unless all can be written that --json and --dir name.

    Hours later would be late. Runs that are there already are taken over or refused.
    """
    prepare_file(options.json_file)
    if not options.folder:
        return
    folder = Path(options.folder)
    try:
        (folder / OUTCOMES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--dir {quote(options.folder, 250)}: {error.strerror}") from None
    if options.resume:
        return
    names = [run_name(row, seed) for row in options.rows for seed in options.seeds]
    for place in (*(folder / name for name in names), *_files(folder)):
        if place.exists():
            raise UserError(
                f"--dir {quote(options.folder, 250)}: {place.name} is there already; --resume "
                "goes on with it, or choose another"
            )


def check_networks(options: Options) -> None:
    """Raise UserError where a network is not there that a run begins with or learns from.

    Hours later would be late. Runs that are kept need none, and what an earlier run leaves comes.
    """
    folder, rows = Path(options.folder), options.rows
    kept = {file.stem for file in _files(folder)} if options.folder else set()
    runs = [(run_name(row, seed), row, seed) for seed, row in product(options.seeds, rows)]
    if options.tunes:
        seed = options.protocol.tune_seed
        trials = ((trial_name(r, n), r, seed) for r in rows for n in range(len(r.points)))
        runs = [*trials, *runs]
    to_come: set[Path] = set()
    for name, row, seed in runs:
        settings = name_seed(settings_of(options.common, row, seed, row.points[0]))
        for key in BY_SEED if name not in kept else ():
            source = getattr(settings, key)
            path = Path(source)
            if source in ("", TORCHVISION) or path.resolve() in to_come:
                continue
            # What a run that ended well has.
            parts = [path / STATE, path / SUMMARY] if path.is_dir() else [path]
            if not all(part.exists() for part in parts):
                raise UserError(
                    f"row {row.name}, seed {seed}: --{key_of(key)} {quote(source, 250)} is neither "
                    "a file nor the folder of a complete run; train it first, or correct the path",
                    UNREADABLE,
                )
        if options.folder:
            to_come.add((folder / name).resolve())


def digests_of(settings: Settings, going: Callable[[], None]) -> dict[str, str]:
    """Return the SHA-256 of each network that a run begins with or learns from, if it is there.

    Of a run that is kept it may be gone. `going` is called as files are read. Raises UserError.
    """
    found = {}
    for key in BY_SEED:
        source = getattr(settings, key)
        path = Path(source) / STATE if Path(source).is_dir() else Path(source)
        if source not in ("", TORCHVISION) and path.exists():
            found[f"weights of {key_of(key)}"] = digest_of(path, going)
    return found


def _files(folder: Path) -> list[Path]:
    return sorted((folder / OUTCOMES).glob("*.json"))


def find_kept(
    world: MPI.Comm,
    folder: str,
    name: str,
    settings: Settings,
    place: Mapping[str, str],
    revealed: bool = False,
) -> Outcome | None:
    """Return the outcome that is kept under `name`; None where there is none, and room is made.

    `place` says in a few words of each what runs of one comparison have in common beside their
    settings. Raises UserError where it was another run, or one of another place, that has the name,
    and where there is none though the plan is `revealed`. Collective on `world`.
    """
    file = Path(folder) / OUTCOMES / f"{name}.json"

    def look() -> Outcome | None:
        found = _read(file, settings, place)
        if revealed and found is None:
            raise UserError(
                f"the run {name} is missing in {quote(folder, 250)}, whose plan was revealed: put "
                "it back, or begin anew with another --dir"
            )
        return found

    found = run_on_first(world, look)
    kept = broadcast_json(world, found and asdict(found))
    if kept:
        return outcome_from(kept)
    run_on_first(world, lambda: _forget(Path(folder) / name))
    return None


def keep(
    world: MPI.Comm,
    folder: str,
    name: str,
    settings: Settings,
    place: Mapping[str, str],
    outcome: Outcome,
) -> None:
    """Keep the outcome of a run under `name`; raise UserError. Collective on `world`."""
    file = Path(folder) / OUTCOMES / f"{name}.json"
    config = to_toml(settings, {})
    whole = {"config": config, "place": dict(place), "outcome": asdict(outcome)}
    what = f"the outcome of {name}"
    run_on_first(world, lambda: telling_disk_errors(what, lambda: write_json_durably(file, whole)))


def _read(file: Path, settings: Settings, place: Mapping[str, str]) -> Outcome | None:
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        outcome = outcome_from(found["outcome"])
        other = first_difference(from_table(tomllib.loads(found["config"]), str(file)), settings)
        before = {key: str(value) for key, value in found["place"].items()}
    except (AttributeError, OSError, ValueError, KeyError, TypeError, UserError):
        raise UserError(
            f"{file} can't be read; remove it to do its run again", UNREADABLE
        ) from None
    if other is not None:
        raise UserError(
            f"{file} is of a run with another {other}; remove it, or choose another --dir"
        )
    for key, value in before.items():
        if value != place.get(key, value):
            raise UserError(
                f"{file} is of a run with other {key} ({quote(value, 250)}; here "
                f"{quote(place[key], 250)}); remove it, or choose another --dir"
            )
    return outcome


def _forget(run: Path) -> None:
    """Remove what an interrupted run has left: it begins anew; raise UserError for another."""
    if (run / SUMMARY).exists() or any(run.glob("checkpoints/*")):
        raise UserError(
            f"{quote(str(run), 250)} holds a run that this comparison does not know; move it, or "
            "choose another --dir"
        )
    if not (run / "config.toml").exists():
        return
    try:
        with FileLock(run / "lock", timeout=0):
            shutil.rmtree(run)
    except Timeout:
        raise UserError(
            f"{quote(str(run), 250)} is being trained by another job; wait for its end, or choose "
            "another --dir"
        ) from None
