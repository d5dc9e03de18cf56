"""What a comparison trains: rows, each a method with settings of its own.

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

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.base.files import tomllib
from prunex_mpi.base.imports import check_named, named_in
from prunex_mpi.config.resolve import (
    BY_NAME,
    FIELDS,
    build,
    concerns,
    flat_values,
    from_table,
    methods_of,
)
from prunex_mpi.settings.fields import OF_SECTION, OF_THE_JOB, Settings, key_of
from prunex_mpi.settings.values import AUTO, to_fraction

# What the comparison itself decides, or what only a run of its own can do.
OWN = ("seed", "eps_abs", "eps_rel", "epochs", "run_dir", "dry_run", "test_data")
ALONE = (
    *("rack_of", "resume", "checkpoint_every", "time_limit", "tensorboard", "trace"),
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
# The share of the training images that is held out where nothing says it.
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
# Of a digest: enough to tell plans, and their rows, apart.
DIGITS = 12


@dataclass(frozen=True)
class Row:
    """A method with settings of its own, converted and by field name.

    `grid` has the values that trials try of some settings; `own_length` says that the row is not
    to be trained on as many samples as others.
    """

    name: str
    method: str
    own: Mapping[str, Any]
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    own_length: bool = False

    @property
    def folder(self) -> str:
        """The name of the row as that of a folder."""
        return re.sub(r"[^A-Za-z0-9._=-]+", "-", self.name)

    def run_name(self, seed: int) -> str:
        """Return the name of a run's folder."""
        return f"{self.folder}-{seed}"

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


def rows_of(methods: Sequence[str]) -> tuple[Row, ...]:
    """Return a row for each method, named as it."""
    return tuple(Row(method, method, {}) for method in methods)


def read_plan(path: str) -> tuple[dict[str, Any], tuple[Row, ...], Protocol, dict[str, Any]]:
    """Return the common settings, the rows and the protocol of a plan, and all that it says.

    Raises UserError.
    """
    where = f"--plan {quote(path, 250)}"
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}; choose another") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not TOML: {error}") from None
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
    found = tuple(to_seed(f"seeds of {here}", seed) for seed in seeds)
    tune_seed = to_seed(f"tune-seed of {here}", table["tune-seed"])
    if tune_seed in found or len({*found}) < len(found):
        raise UserError(f"{here}: tune-seed and seeds must be different ones, each given once")
    length = to_share(f"length of {here}", table["length"])
    return Protocol(trials, length, tune_seed, found)


def check_plan_names(common: Mapping[str, Any], rows: Sequence[Row], argv: Sequence[str]) -> None:
    """Raise UserError for modules to import that the plan alone names, and no flag in `argv`."""
    given = named_in(argv)
    for what in ("model", "dataset", "loss"):
        for name in named(what, common, rows):
            # Rows may have several models, of which a flag names one.
            check_named(what, name, given, "the file of --plan", whole=False)


def named(what: str, common: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return all values that common settings, rows and their grids have of the setting `what`."""
    values = [of[what] for of in (common, *(row.own for row in rows)) if what in of]
    return list(map(str, [*values, *(v for row in rows for v in row.grid.get(what, ()))]))


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


def settings_of(
    common: Mapping[str, Any],
    row: Row,
    seed: int,
    point: Mapping[str, Any] | None = None,
    length: Fraction = Fraction(1),
) -> Settings:
    """Return the settings of one run of a row, with what a `point` of its grid adds.

    It has a share `length` of the row's outer iterations, and so has what counts in them or in
    epochs; what is a share of these stays one.
    """
    values = {name: value for name, value in common.items() if meant_for(name, row)}
    values |= {**row.own, **(point or {}), "method": row.method, "seed": seed}
    if values.get("val_split"):
        # No run opens test data; --reveal does.
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


def name_seed(settings: Settings) -> Settings:
    """Return the settings with the run's seed in the paths that ask for it."""
    paths = {name: getattr(settings, name) for name in BY_SEED}
    return replace(
        settings, **{n: path.replace(SEED, str(settings.seed)) for n, path in paths.items()}
    )


def meant_for(name: str, row: Row) -> bool:
    """Return whether a common setting means something to a row."""
    method = BY_NAME[row.method]
    if method.flat and name == "ranks_per_node":
        # Every rank is a node of its own there, which is what is compared.
        return False
    return concerns(name, method)


def check_used(names: Iterable[str], rows: Sequence[Row]) -> None:
    """Raise UserError for one of `names`, common settings, that means nothing to any row."""
    methods = list(dict.fromkeys(row.method for row in rows))
    for name in names:
        if not any(meant_for(name, row) for row in rows):
            others = [method for method in methods_of(name) if method not in methods]
            raise UserError(
                f"--{key_of(name)} means nothing to {', '.join(methods)}; leave it away "
                f"(it is for {', '.join(others)})"
            )


def check_method_name(method: str) -> None:
    """Raise UserError unless there is such a method as one of `--methods`."""
    if method not in BY_NAME:
        guess = meant(method, BY_NAME, f"; there are {', '.join(BY_NAME)}")
        raise UserError(f"--methods: unknown method {quote(method)}{guess}")


def digest_of(settings: Settings) -> str:
    """Return what tells rows of other settings apart, whatever their seed and learning rate are.

    Of what means something to the method, but for settings of no preset at their defaults: one that
    is added changes nothing, nor does another default of other methods.
    """
    told = {
        name: str(value)
        for name, value in flat_values(settings).items()
        if name not in (*OF_THE_JOB, "preset", "seed", "lr", "test_data")
        and concerns(name, settings.method)
        and value != FIELDS[name].default
    }
    return hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest()[:DIGITS]


def refuse_repeated(where: str, values: Sequence[object]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"{where} has {value} twice; give it once")


def to_seed(where: str, value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isdecimal() and int(text) <= MAX_SEED):
        raise UserError(f"{where} {quote(text)}: a seed is a whole number up to {MAX_SEED}")
    return int(text)


def to_share(where: str, text: object) -> Fraction:
    share = to_fraction(text, where)
    if not 0 < share <= 1:
        raise UserError(f"{where} {quote(text)}: give a share above 0 and up to 1, such as 1/8")
    return share
