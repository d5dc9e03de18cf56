"""What a comparison trains: its flags, its plan and the settings of every run. No torch, no MPI.

A row comes from `--methods`, which names as many rows as methods, or from a plan, a TOML file:

    [protocol]                  # how every row is tuned, and with which seeds it is trained
    trials = 3
    length = "1/2"              # of each row's outer iterations, in a trial
    tune-seed = 3
    seeds = [0, 1, 2]

    [settings]                  # common; a setting goes to the rows that it means something to
    model = "resnet8"
    val-split = 0.1

    [rows."local-sgd int4"]     # a row: its method, its settings, and what its trials try:
    method = "local-sgd"        # all combinations of these lists, as many as there are trials
    payload = "int4"
    grid = {lr = [0.05, 0.1, 0.2]}

    [rows.pretrained]
    method = "prunex"
    init-from = "runs/dense-{seed}"     # here and in `teacher`, {seed} is that of the run
    grid = {lr = [0.1], keep-ratio = [0.25, 0.5, 0.75]}

Without [protocol] nothing is tuned. A row with `own-length = true` is trained on another number of
samples than the others.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import Any

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.base.imports import check_named, named_in
from prunex_mpi.config.cli import Parser, add_settings, convert_flag, load_toml, program_parser
from prunex_mpi.config.resolve import (
    BY_NAME,
    FIELDS,
    build,
    concerns,
    defaults,
    flat_values,
    from_table,
    methods_of,
)
from prunex_mpi.settings.fields import OF_SECTION, OF_THE_JOB, Settings, key_of
from prunex_mpi.settings.values import AUTO, to_fraction

# What the comparison itself decides, or what only a run of its own can do.
OWN = ("seed", "eps_abs", "eps_rel", "epochs", "run_dir", "dry_run", "test_data")
ALONE = (
    *("rack_of", "resume", "checkpoint_every", "time_limit", "trace"),
    *("on_node_loss", "min_nodes"),
)
COMMON = tuple(name for name in FIELDS if name not in ("method", *OWN, *ALONE))
# What a shorter run has fewer of, or more often.
COUNTING_ITERATIONS = ("outer_iterations", "evaluate_every", "prunetrain_reconfigure_every")
# Stages of a run, each a count or a share of its outer iterations.
STAGES = tuple(name for name, field in FIELDS.items() if field.metadata.get("share"))
# Keys of a row that are no settings: what its trials try, and that its length is its own.
GRID, OWN_LENGTH = "grid", "own-length"
# Of [protocol].
KEYS = ("trials", "length", "tune-seed", "seeds")
# The share of the training data that is held out where nothing says it.
VAL_SPLIT = 0.1
# Each seed of a row may begin with a network of its own, or learn from one.
BY_SEED = ("init_from", "teacher")
SEED = "{seed}"
# What is alike in all rows: the same images on the same ranks, and one transport.
SHARED = (
    *OF_SECTION["data"],
    *("device", "piece_kib", "mpi_buffers", "ranks_per_node"),
    *("timeout", "progress"),
)
MAX_SEED = 2**31 - 1
# Of a digest: enough to tell plans apart.
DIGITS = 12


@dataclass(frozen=True)
class Row:
    """A method with settings of its own, converted and by field name.

    `grid` has the values that trials try of some settings; `own_length` says that the row is not
    to be trained on as many samples as others.
    """

    name: str
    method: str
    own: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    own_length: bool = False

    @property
    def folder(self) -> str:
        """The name of the row as that of a folder."""
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.name)

    @property
    def points(self) -> list[dict[str, Any]]:
        """What each trial tries: the combinations of the grid's values, by field name."""
        return [
            dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())
        ]


@dataclass(frozen=True)
class Protocol:
    """How often, how long and with which seed every row is tuned; the seeds of the results.

    With one trial there is nothing to choose, and none is made.
    """

    trials: int = 1
    length: Fraction = Fraction(1)
    tune_seed: int | None = None
    seeds: tuple[int, ...] = (0,)

    @property
    def tunes(self) -> bool:
        """Whether trials choose settings of the rows."""
        return self.trials > 1


@dataclass(frozen=True)
class Run:
    """A run of the plan, in the folder `name`, at a `point` of its row's grid."""

    name: str
    row: Row
    point: Mapping[str, Any]
    settings: Settings


@dataclass(frozen=True)
class Options:
    """What to compare; `common` holds converted values by field name.

    `rows` and `seeds` are those of this job; `plan` is a digest of all that the plan says, and of
    the flags that change it. With `reveal` the networks of a comparison that is done are tested.
    """

    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    common: Mapping[str, Any]
    protocol: Protocol
    plan: str
    reveal: bool
    folder: str
    resume: bool
    json_file: str

    def trials_of(self, row: Row) -> list[Run]:
        """Return all trials of a row, none where nothing is tuned."""
        numbered = enumerate(row.points if self.protocol.tunes else ())
        seed, length = self.protocol.tune_seed, self.protocol.length
        return [
            Run(f"{row.folder}-trial-{i}", row, p, settings_of(self.common, row, seed, p, length))
            for i, p in numbered
        ]

    def run_of(self, row: Row, seed: int, number: int = 0) -> Run:
        """Return the run of a row with one seed at point `number` of its grid."""
        point = row.points[number]
        settings = settings_of(self.common, row, seed, point)
        return Run(f"{row.folder}-{seed}", row, point, settings)

    def all_runs(self) -> list[Run]:
        """Return all trials and runs, in the order in which they are done."""
        trials = [run for row in self.rows for run in self.trials_of(row)]
        return trials + [self.run_of(row, seed) for seed in self.seeds for row in self.rows]

    def named(self, what: str) -> list[str]:
        """Return all values that flags, plan, rows and grids have of the setting `what`."""
        values = [of[what] for of in (self.common, *(row.own for row in self.rows)) if what in of]
        return list(map(str, [*values, *(v for row in self.rows for v in row.grid.get(what, ()))]))


# --------------------------------------------------------------------------------------------------
# Flags
# --------------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    """Return the parser of the comparison's flags, which converts nothing."""
    parser = program_parser(
        "bench compare",
        "Train with one method after the other, on the same ranks and the same samples in one job, "
        "and print what each of them reaches and costs.",
        "Start it with mpirun or srun. A setting goes to those methods that it means something to. "
        "H-SADMM's stopping test is off: all methods do the same work.",
        usage="%(prog)s --methods NAME ... | --plan FILE [--FLAG VALUE ...]",
        argument_default=argparse.SUPPRESS,
    )
    several = {"action": "extend", "nargs": "+"}
    group = parser.add_argument_group("comparison")
    add = group.add_argument
    add("--methods", **several, metavar="NAME", help=f"some of {', '.join(BY_NAME)}")
    add("--plan", metavar="FILE", help="TOML: [settings] and [rows.NAME], in place of --methods")
    add("--seeds", **several, metavar="N", help="one run of each row per seed [the plan's, or 0]")
    about = "train these rows of the plan alone, so that jobs may share it; not with --reveal"
    add("--rows", **several, metavar="NAME", help=about)
    add(
        "--reveal",
        action="store_true",
        help="test all networks of the plan in --dir on the test data, once, when all are there",
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
    reveal, resume = given.pop("reveal", False), given.pop("resume", False)
    taken = (given.pop(name, None) for name in ("methods", "plan", "seeds", "rows"))
    methods, path, seeds, some = taken
    if (methods is None) == (path is None):
        raise UserError(f"give either --methods, some of {', '.join(BY_NAME)}, or --plan")
    planned, protocol = {}, Protocol()
    if path is not None:
        if "lr" in given:
            raise UserError("--lr: the rows of a plan have an lr of their own; write it there")
        planned, rows, protocol, table = read_plan(path)
    else:
        for method in methods:
            if method not in BY_NAME:
                guess = meant(method, BY_NAME, f"; there are {', '.join(BY_NAME)}")
                raise UserError(f"--methods: unknown method {quote(method)}{guess}")
        refuse_repeated("--methods", methods)
        rows, table = tuple(Row(method, method) for method in methods), {"methods": methods}
    flags = {name: convert_flag(name, text) for name, text in given.items()}
    changing = {name: str(value) for name, value in flags.items() if name not in OF_THE_JOB}
    # Whatever the order of the plan's tables is.
    text = json.dumps([table, changing, "1"], sort_keys=True, default=str)
    options = Options(
        rows=rows,
        seeds=_seeds(seeds, protocol),
        common={"val_split": VAL_SPLIT, **planned, **flags},
        protocol=protocol,
        plan=hashlib.sha256(text.encode()).hexdigest()[:DIGITS],
        reveal=reveal,
        folder=folder,
        resume=resume or reveal,
        json_file=json_file,
    )
    if options.resume and not folder:
        raise UserError(f"--{'reveal' if reveal else 'resume'} is for the runs of --dir; give it")
    if reveal and (seeds is not None or some is not None or "protocol" not in table):
        what = "all rows and seeds of a --plan with [protocol]; leave --rows and --seeds away"
        raise UserError(f"--reveal is for {what}")
    _check_imports(replace(options, common=planned), argv)
    _check_used([*planned, *flags], rows)
    _check_rows(options)
    return options if some is None else replace(options, rows=_named_rows(some, rows))


def _named_rows(names: Sequence[str], rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows of these names."""
    refuse_repeated("--rows", names)
    known = {row.name: row for row in rows}
    for name in names:
        if name not in known:
            guess = meant(name, known, f"; there are {', '.join(known)}")
            raise UserError(f"--rows: the plan has no row {quote(name)}{guess}")
    return tuple(known[name] for name in names)


def _seeds(words: Sequence[str] | None, protocol: Protocol) -> tuple[int, ...]:
    """Return the seeds of this job: all of the plan's, or some of them."""
    if words is None:
        return protocol.seeds
    seeds = tuple(_seed("--seeds", word) for word in words)
    refuse_repeated("--seeds", seeds)
    if protocol.tune_seed in seeds:
        raise UserError(f"--seeds: {protocol.tune_seed} is the plan's tune-seed; choose others")
    return seeds


def _check_imports(planned: Options, argv: Sequence[str]) -> None:
    """Raise UserError for modules to import that the plan alone names, and no flag in `argv`."""
    given = named_in(argv)
    for what in ("model", "dataset", "loss"):
        for name in planned.named(what):
            # Rows may have several models, of which a flag names one.
            check_named(what, name, given, "the file of --plan", whole=False)


def _check_used(names: Iterable[str], rows: Sequence[Row]) -> None:
    """Raise UserError for one of `names`, common settings, that means nothing to any row."""
    methods = list(dict.fromkeys(row.method for row in rows))
    for name in names:
        if not any(meant_for(name, row) for row in rows):
            others = [method for method in methods_of(name) if method not in methods]
            raise UserError(
                f"--{key_of(name)} means nothing to {', '.join(methods)}; leave it away "
                f"(it is for {', '.join(others)})"
            )


def _check_rows(options: Options) -> None:
    """Raise UserError unless all runs and trials can be made."""
    count = len(options.rows) * len(options.seeds) * options.protocol.trials
    for row in options.rows:
        for number, point in enumerate(row.points):
            try:
                found = options.run_of(row, options.seeds[0], number).settings
                if options.protocol.tunes:
                    settings_of(options.common, row, 0, point, options.protocol.length)
            except UserError as error:
                if not point:
                    raise
                where = ", ".join(f"{key_of(n)} {v}" for n, v in point.items())
                raise UserError(f"row {row.name}, trial {where}: {error}") from None
            if count > 1 and found.local_steps == AUTO:
                raise UserError(
                    f"row {row.name}: local-steps auto takes as many as the link asks for, other "
                    "rows, trials and seeds take others; give the rows local-steps"
                )
            if not found.val_split:
                raise UserError(
                    "val-split 0: a comparison chooses by data that are held out; give a share, "
                    f"such as {VAL_SPLIT}"
                )


# --------------------------------------------------------------------------------------------------
# The file of --plan
# --------------------------------------------------------------------------------------------------


def read_plan(path: str) -> tuple[dict[str, Any], tuple[Row, ...], Protocol, dict[str, Any]]:
    """Return the common settings, the rows and the protocol of a plan, and all that it says.

    Raises UserError.
    """
    where = f"--plan {quote(path, 250)}"
    table = load_toml(path, where)
    for key in table:
        if key not in ("protocol", "settings", "rows"):
            there = "there are [protocol], [settings] and [rows.NAME]"
            raise UserError(f"{where}: unknown {quote(key)}; {there}")
    given, named = table.get("settings", {}), table.get("rows", {})
    parts = (given, named, *(named.values() if isinstance(named, dict) else ()))
    if not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{where}: settings and rows.NAME are tables; write [rows.NAME]")
    if not named:
        raise UserError(f"{where} has no rows; write [rows.NAME]")
    common = from_table(given, f"[settings] of {where}")
    if "lr" in common:
        raise UserError(
            f"lr can't stand in [settings] of {where}, since what suits one method suits no other: "
            "write it in the rows, or a grid of it"
        )
    _refuse(common, COMMON, f"[settings] of {where}")
    protocol = _protocol(table["protocol"], where) if "protocol" in table else Protocol()
    rows = tuple(_row(name, values, where) for name, values in named.items())
    folders = [row.folder for row in rows]
    for row in rows:
        if folders.count(row.folder) > 1:
            raise UserError(f"{where}: two rows have the folder {row.folder}; rename one")
        if len(row.points) != protocol.trials:
            raise UserError(
                f"row {row.name} of {where} has a grid of {len(row.points)}, and every row has "
                f"{protocol.trials} trials; give it as many combinations"
            )
    return common, rows, protocol, table


def _protocol(table: object, where: str) -> Protocol:
    here = f"[protocol] of {where}"
    if not isinstance(table, dict) or sorted(table) != sorted(KEYS):
        raise UserError(f"{here} has to give {', '.join(KEYS)}, and nothing else")
    trials, seeds = table["trials"], table["seeds"]
    if type(trials) is not int or trials < 1:
        raise UserError(f"trials of {here}: give a number above 0")
    if not isinstance(seeds, list) or not seeds:
        raise UserError(f"seeds of {here}: give a list of some")
    found = tuple(_seed(f"seeds of {here}", seed) for seed in seeds)
    tune_seed = _seed(f"tune-seed of {here}", table["tune-seed"])
    if tune_seed in found or len({*found}) < len(found):
        raise UserError(f"{here}: tune-seed and seeds must be different ones, each given once")
    length = to_fraction(table["length"], f"length of {here}")
    if not 0 < length <= 1:
        shown = quote(str(table["length"]))
        raise UserError(f"length of {here} {shown}: give a share above 0 and up to 1, such as 1/8")
    return Protocol(trials, length, tune_seed, found)


def _row(name: str, table: Mapping[str, Any], where: str) -> Row:
    here = f"[rows.{name}] of {where}"
    if "method" not in table:
        raise UserError(f"{here} has no method; give one of {', '.join(BY_NAME)}")
    own = from_table({k: v for k, v in table.items() if k not in (GRID, OWN_LENGTH)}, here)
    method = own.pop("method")
    grid = _grid(table.get(GRID, {}), f"{GRID} of {here}")
    _refuse({**own, **grid}, [n for n in COMMON if n not in SHARED], here)
    for name_of in grid:
        if name_of in own:
            raise UserError(f"{here} has {key_of(name_of)} in its {GRID} and beside it; keep one")
    if not isinstance(table.get(OWN_LENGTH, True), bool):
        raise UserError(f"{OWN_LENGTH} of {here}: give true or false")
    return Row(name, method, own, grid, table.get(OWN_LENGTH, False))


def _grid(table: object, where: str) -> dict[str, tuple[Any, ...]]:
    """Return the values to try of some settings, converted and by field name."""
    if not isinstance(table, dict):
        raise UserError(f"{where}: give lists of values, such as {{lr = [0.1, 0.2]}}")
    found: dict[str, tuple[Any, ...]] = {}
    for key, values in table.items():
        # A method's own settings stand in a table of its name.
        inner = values.items() if isinstance(values, dict) else [("", values)]
        for name, items in inner:
            if not isinstance(items, list) or not items:
                raise UserError(f"{where}: {name or key} has to be a list of values")
            tables = [{key: {name: item} if name else item} for item in items]
            made = [from_table(one, where) for one in tables]
            (flat,) = made[0]
            found[flat] = tuple(one[flat] for one in made)
            refuse_repeated(f"{key_of(flat)} in {where}", found[flat])
    return found


def _refuse(values: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for name in values:
        if name not in allowed:
            raise UserError(f"{key_of(name)} can't stand in {where}; leave it away")


def refuse_repeated(where: str, values: Sequence[object]) -> None:
    """Raise UserError where a value is given twice."""
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"{where} has {value} twice; give it once")


def _seed(where: str, value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isdecimal() and int(text) <= MAX_SEED):
        raise UserError(f"{where} {quote(text)}: a seed is a whole number up to {MAX_SEED}")
    return int(text)


# --------------------------------------------------------------------------------------------------
# The settings of a run
# --------------------------------------------------------------------------------------------------


def meant_for(name: str, row: Row) -> bool:
    """Return whether a common setting means something to a row."""
    method = BY_NAME[row.method]
    if method.flat and name == "ranks_per_node":
        # Every rank is a node of its own there, which is what is compared.
        return False
    return concerns(name, method)


def settings_of(
    common: Mapping[str, Any],
    row: Row,
    seed: int | None,
    point: Mapping[str, Any] | None = None,
    length: Fraction = Fraction(1),
) -> Settings:
    """Return the settings of one run of a row, with what a `point` of its grid adds.

    It has a share `length` of the row's outer iterations, and so has what counts in them or in
    epochs; what is a share of these stays one. No run opens test data.
    """
    values = {name: value for name, value in common.items() if meant_for(name, row)}
    values |= {**row.own, **(point or {}), "method": row.method, "seed": seed}
    values |= {n: values[n].replace(SEED, str(seed)) for n in BY_SEED if n in values}
    if values.get("val_split"):
        values["test_data"] = False
    preset = values.pop("preset", FIELDS["preset"].default)
    if BY_NAME[row.method].consensus:
        # An early stop would spare it work that the others do.
        values |= {"eps_abs": 0.0, "eps_rel": 0.0}
    settings = build(preset, values)
    if length == 1:
        return settings
    whole = flat_values(settings)
    values |= {
        name: max(1, round(whole[name] * length))
        for name in COUNTING_ITERATIONS
        if concerns(name, settings.method)
    }
    if settings.method.averages and settings.overlap_steps:
        # An evaluation in every outer iteration would wait for every exchange.
        values["evaluate_every"] = max(2, values["evaluate_every"])
    shorter, outer = values["outer_iterations"], settings.outer_iterations
    counts = {name: values[name] for name in STAGES if values.get(name, 0) >= 1}
    # Shares are rounded so that one stage does not run into the next.
    values |= {n: Fraction(c) / outer if c < outer else shorter for n, c in counts.items()}
    warmup = whole.get("dgc_warmup_epochs", AUTO)
    if warmup != AUTO:
        values["dgc_warmup_epochs"] = warmup * length
    return build(preset, values)
