"""What a comparison trains: its flags, and rows, each a method with settings of its own.

A row comes from `--methods`, which names as many rows as methods, or from a plan, a TOML file:

    [settings]                  # common; a setting goes to the rows that it means something to
    model = "resnet8"

    [rows."local-sgd int4"]     # a row: its method, its settings, its learning rate if not tuned
    method = "local-sgd"
    payload = "int4"

    [rows.lion]
    method = "lion"
    tune-lr = [0.001]           # where the search of its learning rate begins, if not as others'

    [rows.pretrained]
    method = "prunex"
    init-from = "runs/dense-{seed}"     # here and in `teacher`, {seed} is that of the run
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.base.imports import check_named
from prunex_mpi.config.cli import add_settings, convert_flag, join_negative_numbers
from prunex_mpi.config.parser import Parser, program_parser
from prunex_mpi.config.resolve import (
    BY_NAME,
    ESTIMATED,
    FIELDS,
    build,
    concerns,
    defaults,
    flat_values,
    from_table,
    methods_of,
)
from prunex_mpi.settings.fields import OF_SECTION, OF_THE_JOB, Settings, key_of
from prunex_mpi.settings.values import AUTO, convert, to_fraction

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What the comparison itself decides, or what only a run of its own can do.
OWN = ("seed", "lr", "eps_abs", "eps_rel", "epochs", "run_dir", "dry_run", *ESTIMATED)
ALONE = (
    *("resume", "checkpoint_every", "time_limit", "preempt_signals", "on_divergence"),
    *("tensorboard", "trace"),
)
COMMON = tuple(name for name in FIELDS if name not in ("method", *OWN, *ALONE))
# What a shorter run has fewer of, or more often.
COUNTING_ITERATIONS = ("outer_iterations", "evaluate_every", "prunetrain_reconfigure_every")
# Stages of a run, each a count or a share of its outer iterations.
STAGES = tuple(name for name, field in FIELDS.items() if field.metadata.get("share"))
# The key of a row that begins the search elsewhere.
GRID = "tune-lr"
# Each seed of a row may begin with a network of its own, or learn from one.
BY_SEED = ("init_from", "teacher")
SEED = "{seed}"
# What is alike in all rows: the same images on the same ranks, and one transport.
SHARED = (
    *OF_SECTION["data"],
    *("device", "bucket_mib", "piece_kib", "mpi_buffers", "ranks_per_node"),
    *("timeout", "progress"),
)
MAX_SEED = 2**31 - 1
# Flags of the search for learning rates, which mean nothing without a grid.
OF_TUNING = ("tune_length", "tune_seed")
# Of a digest: enough to tell a plan's rows apart.
DIGITS = 12


@dataclass(frozen=True)
class Row:
    """A method with settings of its own, converted and by field name.

    `lr` is its peak learning rate where that is given; `grid` where a search begins, if not where
    that of the others does.
    """

    name: str
    method: str
    own: Mapping[str, Any]
    lr: float | None = None
    grid: tuple[float, ...] = ()

    @property
    def folder(self) -> str:
        """The name of the row as that of a folder."""
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.name)


@dataclass(frozen=True)
class Options:
    """What to compare; `common` holds converted values by field name.

    For rows without a learning rate runs of a share `tune_length` of the row's outer iterations
    choose it, from `grid` on, with seed `tune_seed`; without a grid it is the preset's. Rows that
    have spent more than the row `equal_bytes` or `equal_time` are trained once more, only so far.
    With `sources` nothing is trained: these files are shown as one, its figure over the seconds of
    others, `times`, by name.
    """

    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    common: Mapping[str, Any]
    grid: tuple[float, ...]
    length: Fraction
    tune_length: Fraction
    tune_seed: int
    equal_bytes: str
    equal_time: str
    folder: str
    resume: bool
    json_file: str
    figure: str
    sources: tuple[str, ...]
    times: Mapping[str, str]

    @property
    def tuned(self) -> tuple[Row, ...]:
        """The rows whose learning rate is searched."""
        return tuple(row for row in self.rows if row.lr is None) if self.grid else ()

    @property
    def tuning_length(self) -> Fraction:
        """The share of a row's outer iterations that runs have which choose its learning rate."""
        return self.length * self.tune_length


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
    add("--seeds", **several, metavar="N", help="one run of each row per seed [0]")
    add("--length", metavar="SHARE", help="share of each row's outer iterations to do [1]")
    add(
        "--lr",
        **several,
        metavar="METHOD=X",
        help="peak learning rate of a method, a bare X for all others [the preset's]",
    )
    add(
        "--tune-lr",
        **several,
        metavar="X",
        help="search the other learning rates: these first, then on by factors of 2 until the best "
        "lies inside",
    )
    add("--tune-length", metavar="SHARE", help="share of a run's length that tunes [1]")
    add("--tune-seed", metavar="N", help="their seed, none of --seeds [the largest of these + 1]")
    add("--equal-bytes", metavar="ROW", help="also train the others as far as this row's bytes go")
    add("--equal-time", metavar="ROW", help="the same with the seconds of this row")
    add("--dir", metavar="DIR", help="keep each run's directory, named ROW-SEED, in DIR")
    add("--resume", action="store_true", help="take over the runs that --dir has already")
    add("--json", metavar="FILE", help="write all there is to know there")
    add("--figure", metavar="FILE", help="draw accuracy over bytes and time: .svg, .png or .pdf")
    add(
        "--times",
        **several,
        metavar="NAME=FILE",
        help="with --from and --figure: over the seconds that such a file has of the same rows",
    )
    add_settings(parser, COMMON, defaults("recipe", BY_NAME["prunex"]))
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` (without the program's name and `compare`) asks for.

    Every run's settings are checked. Raises UserError with one line that names the culprit;
    `--help` prints and exits.
    """
    given = vars(build_parser().parse_all(join_negative_numbers(argv)))
    places = {key: given.pop(key, "") for key in ("dir", "json", "figure")}
    places["sources"] = tuple(given.pop("sources", ()))
    times = _times(given.pop("times", []), places)
    _refuse_what_excludes(given, places)
    rates = given.pop("lr", [])
    wanted = given.pop("rows", [])
    planned, every = _rows(given, rates)
    rows = _chosen(wanted, every, "plan" in given)
    if "plan" in given:
        _check_plan_names(planned, rows, [word for word in argv if ":" in word])
    given.pop("plan", None)
    seeds = tuple(_seed("seeds", text) for text in given.pop("seeds", ["0"]))
    _refuse_repeated("seeds", seeds)
    grid = tuple(_rate("--tune-lr", text) for text in given.pop("tune_lr", []))
    _refuse_repeated("tune-lr", grid)
    if grid and all(row.lr is not None for row in rows):
        raise UserError("--tune-lr has nothing to choose: --lr or the plan gives all rates")
    for name in OF_TUNING:
        if name in given and not grid:
            raise UserError(f"--{key_of(name)} means nothing without --tune-lr")
    tune_seed = _seed("tune-seed", given.pop("tune_seed", str(max(seeds) + 1)))
    if tune_seed in seeds:
        raise UserError(f"--tune-seed {tune_seed} is one of --seeds; choose another")
    names = [row.name for row in rows]
    options = Options(
        rows=rows,
        seeds=seeds,
        length=_share("length", given.pop("length", "1")),
        tune_length=_share("tune-length", given.pop("tune_length", "1")),
        tune_seed=tune_seed,
        grid=grid,
        equal_bytes=_reference("equal-bytes", given.pop("equal_bytes", ""), names),
        equal_time=_reference("equal-time", given.pop("equal_time", ""), names),
        folder=places["dir"],
        resume=given.pop("resume", False),
        json_file=places["json"],
        figure=places["figure"],
        sources=places["sources"],
        times=times,
        common=planned | {name: convert_flag(name, text) for name, text in given.items()},
    )
    if options.resume and not options.folder:
        raise UserError("--resume takes over the runs of --dir; give it")
    if rows:
        # What the plan gives may be for a row that is not wanted now.
        check_used([x for x in planned if x not in given], options.common, every)
        check_used(given, options.common, rows)
        _check_rows(options)
    return options


def _refuse_what_excludes(given: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Raise UserError unless exactly one source of rows is given."""
    if places["sources"]:
        others = [*given, *(key for key in ("dir",) if places[key])]
        if others:
            flag = key_of(others[0])
            raise UserError(f"--{flag} means nothing with --from, which trains nothing")
        return
    if "methods" in given and "plan" in given:
        raise UserError("--methods and --plan both name rows; keep one of them")
    if "methods" not in given and "plan" not in given:
        raise UserError(f"--methods is missing: give some of {', '.join(BY_NAME)}, or --plan")


def _times(items: Sequence[str], places: Mapping[str, str]) -> dict[str, str]:
    """Return the files of NAME=FILE by name."""
    if items and not (places["sources"] and places["figure"]):
        raise UserError("--times means nothing without --from and --figure; give both")
    pairs = [item.partition("=") for item in items]
    for item, (name, _, path) in zip(items, pairs, strict=True):
        if not (name and path):
            raise UserError(f"--times {quote(item)}: give NAME=FILE")
    _refuse_repeated("times", [name for name, _, _ in pairs])
    return {name: path for name, _, path in pairs}


def _rows(given: dict[str, Any], rates: Sequence[str]) -> tuple[dict[str, Any], tuple[Row, ...]]:
    """Take what names the rows out of `given`; return the plan's common settings and the rows."""
    if "plan" in given:
        if rates:
            raise UserError("--lr: the rows of a plan have an lr of their own; write it there")
        return read_plan(given["plan"])
    methods = given.pop("methods", [])
    for word in methods:
        check_method_name(word, "--methods")
    _refuse_repeated("methods", methods)
    return {}, rows_of(methods, _learning_rates(rates, methods))


def _chosen(wanted: Sequence[str], rows: tuple[Row, ...], of_plan: bool) -> tuple[Row, ...]:
    """Return the wanted ones of a plan's rows, all of them if none is named."""
    if wanted and not of_plan:
        raise UserError("--rows chooses among the rows of --plan; give it, or fewer --methods")
    _refuse_repeated("rows", wanted)
    for name in wanted:
        _reference("rows", name, [row.name for row in rows])
    return tuple(row for row in rows if row.name in wanted) if wanted else rows


def _check_rows(options: Options) -> None:
    """Raise UserError unless all runs can be made, and train on as many samples each."""
    trained = {}
    for row in options.rows:
        found = settings_of(options.common, row, options.seeds[0], length=options.length)
        if found.val_split:
            raise UserError(
                "val-split: a comparison holds images out for --tune-lr alone; leave it away"
            )
        if found.local_steps == AUTO and len(options.rows) * len(options.seeds) > 1:
            raise UserError(
                f"row {row.name}: local-steps auto takes as many as the link asks for, other rows "
                "and other seeds take others; give the rows local-steps"
            )
        steps = found.outer_iterations * found.local_steps
        if found.local_steps > 0 and not found.frozen_local_steps:
            trained[row.name] = steps * found.batch_size
    check_equal_length(trained)
    for row in options.tuned:
        try:
            length = options.tuning_length
            settings_of(options.common, row, options.tune_seed, options.grid[0], length)
        except UserError as error:
            raise UserError(f"with --tune-length {options.tune_length}: {error}") from None


def check_equal_length(trained: Mapping[str, int]) -> None:
    """Raise UserError unless all rows are `trained` on as many samples per rank."""
    if len(set(trained.values())) > 1:
        least, most = min(trained, key=trained.get), max(trained, key=trained.get)
        raise UserError(
            f"rows must be trained on as many samples: {least} has {trained[least]:,} and {most} "
            f"{trained[most]:,} per rank; change outer-iterations, local-steps or local-epochs of "
            "one"
        )


def _refuse_repeated(flag: str, values: Sequence[object]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"--{flag} has {value} twice; give it once")


def _learning_rates(items: Sequence[str], methods: Sequence[str]) -> dict[str, float]:
    rates: dict[str, float] = {}
    for item in items:
        method, equals, text = item.rpartition("=")
        if equals:
            check_method_name(method, f"--lr {quote(item)}")
            if method not in methods:
                raise UserError(f"--lr {quote(item)}: {method} is not among --methods")
        if method in rates:
            raise UserError(f"--lr has {method or 'a bare number'} twice; give it once")
        rates[method] = _rate(f"--lr {quote(item)}", text)
    if "" in rates:
        everyone = rates.pop("")
        rates = {method: everyone for method in methods} | rates
    return rates


def _rate(where: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        raise UserError(f"{where}: {quote(text)} is not a learning rate") from None
    return convert(FIELDS["lr"], rate, where)


def _seed(flag: str, text: str) -> int:
    if not (text.isdecimal() and int(text) <= MAX_SEED):
        raise UserError(f"--{flag} {quote(text)}: a seed is a whole number up to {MAX_SEED}")
    return int(text)


def _share(flag: str, text: str) -> Fraction:
    share = to_fraction(text, f"--{flag}")
    if not 0 < share <= 1:
        raise UserError(f"--{flag} {quote(text)}: give a share above 0 and up to 1, such as 1/8")
    return share


def _reference(flag: str, name: str, names: Sequence[str]) -> str:
    if name and name not in names:
        raise UserError(
            f"--{flag}: there is no row {quote(name)}{meant(name, names)} ({', '.join(names)})"
        )
    return name


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------


def rows_of(methods: Sequence[str], rates: Mapping[str, float]) -> tuple[Row, ...]:
    """Return a row for each method, named as it."""
    return tuple(Row(method, method, {}, rates.get(method)) for method in methods)


def read_plan(path: str) -> tuple[dict[str, Any], tuple[Row, ...]]:
    """Return the common settings and the rows of a plan; raise UserError."""
    where = f"--plan {quote(path, 250)}"
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}; choose another") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not TOML: {error}") from None
    for key in table:
        if key not in ("settings", "rows"):
            raise UserError(f"{where}: unknown {quote(key)}; there are [settings] and [rows.NAME]")
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
            "write it in the rows, or give --tune-lr"
        )
    _refuse(common, COMMON, f"[settings] of {where}")
    rows = tuple(_row(name, values, where) for name, values in named.items())
    folders = [row.folder for row in rows]
    for row in rows:
        if folders.count(row.folder) > 1:
            raise UserError(f"{where}: two rows have the folder {row.folder}; rename one")
    return common, rows


def _check_plan_names(common: Mapping[str, Any], rows: Sequence[Row], words: Sequence[str]) -> None:
    """Raise UserError for modules to import that the plan alone names, and no flag in `words`."""
    given = [word.partition("=")[2] if word.startswith("--") else word for word in words]
    for values in (common, *(row.own for row in rows)):
        for what in ("model", "dataset", "loss"):
            check_named(what, values.get(what, ""), given, "the file of --plan")


def _row(name: str, table: Mapping[str, Any], where: str) -> Row:
    here = f"[rows.{name}] of {where}"
    if "method" not in table:
        raise UserError(f"{here} has no method; give one of {', '.join(BY_NAME)}")
    own = from_table({key: value for key, value in table.items() if key != GRID}, here)
    method, lr = own.pop("method"), own.pop("lr", None)
    _refuse(own, [n for n in COMMON if n not in (*SHARED, "preset")], here)
    rates = table.get(GRID, [])
    if not isinstance(rates, list) or (GRID in table and (lr is not None or not rates)):
        raise UserError(f"{GRID} of {here}: give a list of learning rates, and no lr beside it")
    grid = tuple(convert(FIELDS["lr"], rate, f"{GRID} of {here}") for rate in rates)
    return Row(name, method, own, lr, grid)


def _refuse(values: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for name in values:
        if name not in allowed:
            raise UserError(f"{key_of(name)} can't stand in {where}; leave it away")


def settings_of(
    common: Mapping[str, Any],
    row: Row,
    seed: int,
    lr: float | None = None,
    length: Fraction = Fraction(1),
) -> Settings:
    """Return the settings of one run of a row; without `lr` the row's counts, else the preset's.

    It has a share `length` of the row's outer iterations, and so has what counts in them or in
    epochs; what is a share of these stays one.
    """
    values = {name: value for name, value in common.items() if meant_for(name, row, common)}
    values |= {**row.own, "method": row.method, "seed": seed}
    if lr is not None or row.lr is not None:
        values["lr"] = lr if lr is not None else row.lr
    preset = values.pop("preset", FIELDS["preset"].default)
    if BY_NAME[row.method].consensus:
        # An early stop would spare it work that the others do.
        values |= {"eps_abs": 0.0, "eps_rel": 0.0}
    settings = build(preset, [values])
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
    return build(preset, [values])


def name_seed(settings: Settings) -> Settings:
    """Return the settings with the run's seed in the paths that ask for it."""
    paths = {name: getattr(settings, name) for name in BY_SEED}
    return replace(
        settings, **{n: path.replace(SEED, str(settings.seed)) for n, path in paths.items()}
    )


def meant_for(name: str, row: Row, common: Mapping[str, Any]) -> bool:
    """Return whether a common setting means something to a row."""
    method = BY_NAME[row.method]
    if method.flat and name == "ranks_per_node":
        # Every rank is a node of its own there, which is what is compared.
        return False
    return concerns(name, method)


def check_used(names: Iterable[str], common: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Raise UserError for one of `names`, settings in `common`, that means nothing to any row."""
    methods = list(dict.fromkeys(row.method for row in rows))
    for name in names:
        if not any(meant_for(name, row, common) for row in rows):
            others = [method for method in methods_of(name) if method not in methods]
            raise UserError(
                f"--{key_of(name)} means nothing to {', '.join(methods)}; leave it away "
                f"(it is for {', '.join(others)})"
            )


def check_method_name(method: str, where: str) -> None:
    """Raise UserError unless there is such a method."""
    if method not in BY_NAME:
        guess = meant(method, BY_NAME, f"; there are {', '.join(BY_NAME)}")
        raise UserError(f"{where}: unknown method {quote(method)}{guess}")


def digest_of(settings: Settings) -> str:
    """Return what tells rows of other settings apart, whatever their seed and learning rate are.

    Of what differs from the defaults alone, so that a setting which is added changes nothing.
    """
    told = {
        name: str(value)
        for name, value in flat_values(settings).items()
        if name not in (*OF_THE_JOB, *ESTIMATED, "preset", "seed", "lr")
        and value != FIELDS[name].default
    }
    return hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest()[:DIGITS]
