"""Where a comparison keeps its runs, so that an interrupted one goes on."""

import json
import shutil
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.base.files import (
    STATE,
    SUMMARY,
    prepare_file,
    telling_disk_errors,
    write_json_durably,
)
from prunex_mpi.comm.agreement import broadcast_text, together
from prunex_mpi.research.compare.compare_options import Options
from prunex_mpi.research.compare.figure import refuse_impossible
from prunex_mpi.research.compare.outcomes import (
    Outcome,
    comparison_from,
    outcome_from,
    read_comparison,
    to_dict,
    without_hosts,
)
from prunex_mpi.research.compare.rows import BY_SEED, Row, name_seed, settings_of
from prunex_mpi.research.compare.run_rows import digest_of
from prunex_mpi.run.beginning import TORCHVISION
from prunex_mpi.settings.fields import Settings, key_of
from prunex_mpi.settings.resolve import first_difference, from_table, to_toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OUTCOMES = "outcomes"


def run_name(row: Row, seed: int, equal: str = "") -> str:
    """Return the name of a run's directory; `equal` is what it may spend no more of."""
    return f"{row.folder}-{seed}" + (f"-equal-{equal}" if equal else "")


def tuning_name(row: Row, lr: float, equal: str = "") -> str:
    """Return the name under which a run that tunes is kept, for runs as far as `equal` goes."""
    return f"{row.folder}-tune-{lr:g}" + (f"-equal-{equal}" if equal else "")


def prepare(options: Options) -> None:
    """Raise UserError unless all can be written that --json, --text, --figure and --dir name.

    Hours later would be late. Runs that are there already are taken over or refused.
    """
    _refuse_one_file_for_two(options)
    prepare_file("json", options.json_file)
    prepare_file("text", options.text_file)
    refuse_impossible(options.figure)
    prepare_file("figure", options.figure)
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


def refuse_missing(options: Options, rows: Sequence[Row]) -> None:
    """Raise UserError where a network is not there that a run of `rows` begins with or learns from.

    Hours later would be late. Runs that are kept need none, and what an earlier run leaves comes.
    """
    folder, seeds = Path(options.folder), options.seeds
    kept = {file.stem for file in _files(folder)} if options.folder else set()
    for row in options.tuned:
        tunes = tuning_name(row, 0).removesuffix("0")
        if row in rows and not any(name.startswith(tunes) for name in kept):
            _refuse_missing(options, row, options.tune_seed, set())
    to_come: set[Path] = set()
    for seed, row in product(seeds, rows):
        name = run_name(row, seed)
        if name not in kept:
            _refuse_missing(options, row, seed, to_come)
        if options.folder:
            to_come.add((folder / name).resolve())


def _refuse_missing(options: Options, row: Row, seed: int, to_come: Container[Path]) -> None:
    settings = name_seed(settings_of(options.common, row, seed))
    for name in BY_SEED:
        source = getattr(settings, name)
        path = Path(source)
        if source in ("", TORCHVISION) or path.resolve() in to_come:
            continue
        # What a run that ended well has.
        parts = [path / STATE, path / SUMMARY] if path.is_dir() else [path]
        if not all(part.exists() for part in parts):
            raise UserError(
                f"row {row.name}, seed {seed}: --{key_of(name)} {quote(source, 250)} is neither a "
                "file nor the folder of a complete run; train it first, or correct the path",
                UNREADABLE,
            )


def _refuse_one_file_for_two(options: Options) -> None:
    """Raise UserError where one of two flags would overwrite what the other has written."""
    named = {"json": options.json_file, "text": options.text_file, "figure": options.figure}
    seen: dict[Path, str] = {}
    for flag, path in named.items():
        # Devices and pipes take all that comes.
        if not path or (Path(path).exists() and not Path(path).is_file()):
            continue
        first = seen.setdefault(Path(path).resolve(), flag)
        if first != flag:
            raise UserError(f"--{first} and --{flag} name one file; choose another for one of them")


def _files(folder: Path) -> list[Path]:
    return sorted((folder / OUTCOMES).glob("*.json"))


def take_over(
    world: MPI.Comm, options: Options, title: str, machine: Mapping[str, str], data: str
) -> dict[str, Outcome]:
    """Return the runs that the file of --known has, by the names under which they are kept.

    Raises UserError where its title or its machine is another one (`machine` is that of world rank
    0), or its images are, which `data` tells apart; files of before do not say. Rows at equal bytes
    or time count if their reference is that of `options`. Collective on `world`.
    """

    def read() -> str:
        if world.rank:
            return ""
        found = read_comparison("--known", options.known)
        mine = {"title": title, "machine": without_hosts(machine)}
        its = {"title": found.title, "machine": without_hosts(found.machine)}
        for what in mine:
            if mine[what] != its[what]:
                raise UserError(f"--known: another {what}: {its[what]}, not {mine[what]}")
        if found.data not in ("", data):
            advice = "give their --data-dir, or leave --known away"
            raise UserError(f"--known: the runs are of other images; {advice}")
        return json.dumps(to_dict(found))

    known = comparison_from(json.loads(broadcast_text(world, together(world, read))))
    rows = {row.name: row for row in options.rows}
    runs = {run_name(rows[r.row], r.seed): r for r in known.outcomes if r.row in rows}
    for name, run in runs.items():
        row = rows[run.row]
        lr = run.lr if row in options.tuned else None
        # A row without any rate that trains has no run, whose settings it could tell.
        if run.settings or run.measured:
            whole = settings_of(options.common, row, run.seed, lr, options.length)
            _refuse_other(name, run, whole)
    for tuning in known.tunings:
        if tuning.row in rows:
            runs |= {tuning_name(rows[tuning.row], r.lr): r for r in tuning.runs}
    for what, reference in {"bytes": options.equal_bytes, "time": options.equal_time}.items():
        if known.reference.get(what) != reference:
            continue
        tuned = {tuning.row: tuning for tuning in known.equal_tunings.get(what, ())}
        for run in known.equal.get(what, ()):
            # Files of before have none that was tuned for its length.
            if run.row in rows and (run.row in tuned or rows[run.row] not in options.tuned):
                runs[run_name(rows[run.row], run.seed, what)] = run
        for tuning in tuned.values():
            if tuning.row in rows:
                runs |= {tuning_name(rows[tuning.row], r.lr, what): r for r in tuning.runs}
    return runs


def kept(
    world: MPI.Comm,
    folder: str,
    name: str,
    settings: Settings,
    place: Mapping[str, str],
    run: Callable[[], Outcome],
    known: Outcome | None,
) -> Outcome:
    """Return the outcome that is kept under `name`; else that of `run()`, which is then kept.

    With `known`, what --known has under that name, there is nothing to run.

    Without `folder` nothing is kept. `place` says in a few words of each what runs of one
    comparison have in common beside their settings. Raises UserError where it was another run, or
    one of another place, that has the name. Collective on `world`.
    """
    if not folder:
        return run()
    file = Path(folder) / OUTCOMES / f"{name}.json"
    found = together(world, lambda: _read(file, settings, place) if world.rank == 0 else None)
    text = broadcast_text(world, json.dumps(found and to_dict(found)))
    if json.loads(text):
        return outcome_from(json.loads(text))
    if known is not None:
        _refuse_other(name, known, settings)
    together(world, lambda: _forget(Path(folder) / name) if world.rank == 0 else None)
    outcome = known or run()
    whole = {
        "config": to_toml(settings, {}),
        "place": dict(place),
        "outcome": to_dict(outcome),
    }

    def write() -> None:
        if world.rank == 0:
            telling_disk_errors(f"the outcome of {name}", lambda: write_json_durably(file, whole))

    together(world, write)
    return outcome


def _read(file: Path, settings: Settings, place: Mapping[str, str]) -> Outcome | None:
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        outcome = outcome_from(found["outcome"])
        other = first_difference(from_table(tomllib.loads(found["config"]), str(file)), settings)
        # Files of before do not say where they come from.
        before = {key: str(value) for key, value in found.get("place", {}).items()}
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


def _refuse_other(name: str, known: Outcome, settings: Settings) -> None:
    """Raise UserError unless what --known has under a name is what would be trained."""
    given = (settings.seed, settings.lr, digest_of(settings))
    if (known.seed, known.lr, known.settings) != given:
        raise UserError(
            f"--known: {name} was trained with another seed, learning rate or other settings than "
            "it would be here; give the flags of its comparison, or leave --known away"
        )


def _forget(run: Path) -> None:
    """Remove what an interrupted run has left: it begins anew; raise UserError for another."""
    if (run / SUMMARY).exists():
        raise UserError(
            f"{quote(str(run), 250)} holds a run that this comparison does not know; move it, or "
            "choose another --dir"
        )
    if not (run / "config.toml").exists():
        return
    if any(run.glob("checkpoints/*")):
        raise UserError(
            f"{quote(str(run), 250)} holds a run with checkpoints, which no comparison writes; "
            "move it, or choose another --dir"
        )
    try:
        with FileLock(run / "lock", timeout=0):
            shutil.rmtree(run)
    except Timeout:
        raise UserError(
            f"{quote(str(run), 250)} is being trained by another job; wait for its end, or choose "
            "another --dir"
        ) from None
