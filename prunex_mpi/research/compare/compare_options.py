"""The flags of a comparison."""

import argparse
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.config.cli import add_settings, convert_flag
from prunex_mpi.config.parser import Parser, program_parser
from prunex_mpi.config.resolve import BY_NAME, defaults
from prunex_mpi.research.compare.plan import (
    COMMON,
    DIGITS,
    GRID,
    OWN_LENGTH,
    VAL_SPLIT,
    Protocol,
    Row,
    check_method_name,
    check_plan_names,
    check_used,
    read_plan,
    refuse_repeated,
    rows_of,
    settings_of,
    to_seed,
    to_share,
)
from prunex_mpi.settings.fields import OF_THE_JOB, Settings, key_of
from prunex_mpi.settings.values import AUTO


@dataclass(frozen=True)
class Options:
    """What to compare; `common` holds converted values by field name.

    `rows` and `seeds` are those of this job; `plan` is a digest of all that the plan says, and of
    the flags that change it. With `reveal` the networks of a comparison that is done are tested.
    Times and bytes to each of `targets` are told. With `sources` nothing is trained: these files
    are shown as one.
    """

    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    common: Mapping[str, Any]
    protocol: Protocol
    plan: str
    length: Fraction
    reveal: bool
    targets: tuple[float, ...]
    folder: str
    resume: bool
    json_file: str
    sources: tuple[str, ...]

    @property
    def tunes(self) -> bool:
        """Whether trials choose settings of the rows."""
        return self.protocol.trials > 1

    @property
    def tuning_length(self) -> Fraction:
        """The share of a row's outer iterations that a trial has."""
        return self.length * self.protocol.length

    def first_settings(self, row: Row) -> Settings:
        """Return the settings of a row's first run at the first point of its grid."""
        return self.settings_at(row, row.points[0])

    def settings_at(self, row: Row, point: Mapping[str, Any]) -> Settings:
        """Return the settings of a row's first run at a point of its grid."""
        return settings_of(self.common, row, self.seeds[0], point, self.length)


def build_parser() -> Parser:
    """Return the parser of the comparison's flags, which converts nothing."""
    parser = program_parser(
        "bench compare",
        "Train with one method after the other, on the same ranks and the same samples in one job, "
        "and print what each of them reaches and costs.",
        "Start it with mpirun or srun. A setting goes to those methods that it means something to. "
        "H-SADMM's stopping test is off: all methods do the same work.",
        usage="%(prog)s --methods NAME ... | --plan FILE | --from FILE [--FLAG VALUE ...]",
        argument_default=argparse.SUPPRESS,
    )
    # Given twice, a flag adds to what it was given first.
    several = {"action": "extend", "nargs": "+"}
    group = parser.add_argument_group("comparison")
    add = group.add_argument
    add("--methods", **several, metavar="NAME", help=f"some of {', '.join(BY_NAME)}")
    add("--plan", metavar="FILE", help="TOML: [settings] and [rows.NAME], in place of --methods")
    add("--rows", **several, metavar="NAME", help="these rows of the plan alone, in its order")
    add(
        "--from",
        dest="sources",
        **several,
        metavar="FILE",
        help="print what --json wrote, joined where there are several; trains nothing",
    )
    add("--seeds", **several, metavar="N", help="one run of each row per seed [the plan's, or 0]")
    add("--length", metavar="SHARE", help="share of each row's outer iterations to do [1]")
    add(
        "--reveal",
        action="store_true",
        help="test all networks of the plan in --dir on the test images, once, when all are there",
    )
    add(
        "--target",
        **several,
        metavar="V",
        help="tell seconds and bytes to this accuracy (0.7), or to this loss (1.8), on images held "
        "out",
    )
    add("--dir", metavar="DIR", help="folder of the runs, named ROW-SEED [a new one in runs/]")
    add("--resume", action="store_true", help="go on with the runs that --dir has already")
    add("--json", metavar="FILE", help="write all there is to know there")
    add_settings(parser, COMMON, defaults("recipe", BY_NAME["prunex"]))
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` (without the program's name and `compare`) asks for.

    Every run's settings are checked. Raises UserError with one line that names the culprit;
    `--help` prints and exits.
    """
    given = vars(build_parser().parse_all(argv))
    folder, json_file = given.pop("dir", ""), given.pop("json", "")
    sources = tuple(given.pop("sources", ()))
    targets = tuple(_target(text) for text in given.pop("target", ()))
    _refuse_what_excludes(given, sources, folder)
    wanted, asked = given.pop("rows", []), given.pop("seeds", None)
    planned, every, protocol, table = {}, (), Protocol(), {}
    path = given.pop("plan", "")
    if path:
        if "lr" in given:
            raise UserError("--lr: the rows of a plan have an lr of their own; write it there")
        planned, every, protocol, table = read_plan(path)
        check_plan_names(planned, every, argv)
    elif "methods" in given:
        methods = given.pop("methods")
        for word in methods:
            check_method_name(word)
        refuse_repeated("--methods", methods)
        every, table = rows_of(methods), {"methods": methods}
    rows = _chosen(wanted, every, bool(path))
    length = to_share("--length", given.pop("length", "1"))
    reveal, resume = given.pop("reveal", False), given.pop("resume", False)
    common = planned | {name: convert_flag(name, text) for name, text in given.items()}
    common.setdefault("val_split", VAL_SPLIT)
    changing = {n: str(common[n]) for n in given if n not in OF_THE_JOB}
    options = Options(
        rows=rows,
        seeds=_seeds(asked, protocol, path),
        common=common,
        protocol=protocol,
        plan=_digest([table, changing, str(length)]),
        length=length,
        reveal=reveal,
        targets=targets,
        folder=folder,
        resume=resume or reveal,
        json_file=json_file,
        sources=sources,
    )
    if options.resume and not options.folder:
        raise UserError(f"--{'reveal' if reveal else 'resume'} is for the runs of --dir; give it")
    if reveal and (wanted or asked is not None or not (path and "protocol" in table)):
        raise UserError(
            "--reveal is for all rows and seeds of a --plan with [protocol]; leave --rows and "
            "--seeds away"
        )
    if rows:
        # What the plan gives may be for a row that is not wanted now.
        check_used([x for x in planned if x not in given], every)
        check_used(given, rows)
        _check_rows(options)
    return options


def _seeds(asked: Sequence[str] | None, protocol: Protocol, path: str) -> tuple[int, ...]:
    """Return the seeds of this job: all of the plan's, or some of them."""
    if asked is None:
        return protocol.seeds
    seeds = tuple(to_seed("--seeds", word) for word in asked)
    refuse_repeated("--seeds", seeds)
    if protocol.tune_seed in seeds:
        raise UserError(f"--seeds: {protocol.tune_seed} is the tune-seed of {path}; choose others")
    return seeds


def _target(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"--target {quote(text)}: give an accuracy such as 0.7, or a loss above 0")
    return value


def _digest(value: object) -> str:
    """Return what tells plans apart, whatever the order of their tables is."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _refuse_what_excludes(given: Mapping[str, Any], sources: Sequence[str], folder: str) -> None:
    """Raise UserError unless exactly one source of rows is given."""
    if sources:
        others = [*given, *(["dir"] if folder else [])]
        if others:
            flag = key_of(others[0])
            raise UserError(f"--{flag} means nothing with --from, which trains nothing")
        return
    if "methods" in given and "plan" in given:
        raise UserError("--methods and --plan both name rows; keep one of them")
    if "methods" not in given and "plan" not in given:
        raise UserError(f"--methods is missing: give some of {', '.join(BY_NAME)}, or --plan")


def _chosen(wanted: Sequence[str], rows: tuple[Row, ...], of_plan: bool) -> tuple[Row, ...]:
    """Return the wanted ones of a plan's rows, all of them if none is named."""
    if wanted and not of_plan:
        raise UserError("--rows chooses among the rows of --plan; give it, or fewer --methods")
    refuse_repeated("--rows", wanted)
    names = [row.name for row in rows]
    for name in wanted:
        if name not in names:
            guess = meant(name, names)
            raise UserError(f"--rows: there is no row {quote(name)}{guess} ({', '.join(names)})")
    return tuple(row for row in rows if row.name in wanted) if wanted else rows


def _check_rows(options: Options) -> None:
    """Raise UserError unless all runs can be made, and train on as many samples each."""
    samples: dict[str, list[int]] = {}
    for row in options.rows:
        points = [_checked(options, row, point) for point in row.points]
        several = len(options.rows) * len(options.seeds) * len(points) > 1
        if several and any(found.local_steps == AUTO for found in points):
            raise UserError(
                f"row {row.name}: local-steps auto takes as many as the link asks for, other rows, "
                "trials and seeds take others; give the rows local-steps"
            )
        if all(map(has_known_length, points)):
            steps = [found.outer_iterations * found.local_steps for found in points]
            samples[row.name] = [n * s.batch_size for n, s in zip(steps, points, strict=True)]
    check_equal_length(options.rows, samples)


def _checked(options: Options, row: Row, point: Mapping[str, Any]) -> Settings:
    """Return the settings of a row at a point; raise UserError where a run or trial can't be."""
    try:
        found = options.settings_at(row, point)
        if options.tunes:
            settings_of(options.common, row, 0, point, options.tuning_length)
    except UserError as error:
        if not options.tunes:
            raise
        where = ", ".join(f"{key_of(n)} {v}" for n, v in point.items())
        raise UserError(f"row {row.name}, trial {where}: {error}") from None
    if not found.val_split:
        raise UserError(
            f"val-split 0: a comparison chooses by images that are held out; give a share, "
            f"such as {VAL_SPLIT}"
        )
    return found


def has_known_length(settings: Settings) -> bool:
    """Return whether the steps of a run are known without its data."""
    return settings.local_steps > 0 and not settings.frozen_local_steps


def check_equal_length(rows: Sequence[Row], samples: Mapping[str, Sequence[int]]) -> None:
    """Raise UserError unless rows are trained on as many samples per rank at all their points.

    `samples` are those of each point, by row, as far as they are known.
    """
    for name, counts in samples.items():
        if len({*counts}) > 1:
            raise UserError(
                f"row {name}: trials must be trained on as many samples, and those of its {GRID} "
                f"have {min(counts):,} to {max(counts):,} per rank; give what changes that "
                f"(outer-iterations, steps, epochs, batch-size) beside the {GRID}"
            )
    trained = {r.name: samples[r.name][0] for r in rows if r.name in samples and not r.own_length}
    if len({*trained.values()}) > 1:
        least, most = min(trained, key=trained.get), max(trained, key=trained.get)
        raise UserError(
            f"rows must be trained on as many samples: {least} has {trained[least]:,} and {most} "
            f"{trained[most]:,} per rank; change outer-iterations, local-steps or local-epochs of "
            f"one, or give it {OWN_LENGTH} = true"
        )
