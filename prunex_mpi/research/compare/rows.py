"""What a comparison trains: rows, each a method with settings of its own over common ones.

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

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import UserError, meant, quote
from prunex_mpi.settings.fields import (
    ESTIMATED,
    FIELDS,
    OF_SECTION,
    Settings,
    concerns,
    key_of,
    methods_of,
)
from prunex_mpi.settings.methods import AVERAGING, CONSENSUS, EVERY_RANK_ALONE, METHODS
from prunex_mpi.settings.resolve import build, from_table
from prunex_mpi.settings.values import AUTO, convert

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What the comparison itself decides, or what only a run of its own can do.
OWN = ("seed", "lr", "eps_abs", "eps_rel", "run_dir", "dry_run", *ESTIMATED)
ALONE = (
    *("resume", "checkpoint_every", "time_limit", "preempt_signals", "on_divergence"),
    *("tensorboard", "trace"),
)
COMMON = tuple(name for name in FIELDS if name not in ("method", *OWN, *ALONE))
# What a shorter run has fewer of, or more often.
COUNTING_ITERATIONS = ("outer_iterations", "evaluate_every", "reconfigure_every")
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
    *("device", "bucket_mib", "piece_kib", "mpi_buffers", "ranks_per_node", "leaders_per_node"),
    *("timeout", "progress"),
)


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


def _row(name: str, table: Mapping[str, Any], where: str) -> Row:
    here = f"[rows.{name}] of {where}"
    if "method" not in table:
        raise UserError(f"{here} has no method; give one of {', '.join(METHODS)}")
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
    if row.method in CONSENSUS:
        # An early stop would spare it work that the others do.
        values |= {"eps_abs": 0.0, "eps_rel": 0.0}
    settings = build(preset, [values])
    if length == 1:
        return settings
    values |= {
        name: max(1, round(getattr(settings, name) * length))
        for name in COUNTING_ITERATIONS
        if concerns(name, values)
    }
    if settings.method in AVERAGING and settings.overlap_steps:
        # An evaluation in every outer iteration would wait for every exchange.
        values["evaluate_every"] = max(2, values["evaluate_every"])
    shorter, outer = values["outer_iterations"], settings.outer_iterations
    counts = {name: values[name] for name in STAGES if values.get(name, 0) >= 1}
    # Shares are rounded so that one stage does not run into the next.
    values |= {n: Fraction(c) / outer if c < outer else shorter for n, c in counts.items()}
    warmup = settings.dgc_warmup_epochs
    if concerns("dgc_warmup_epochs", values) and warmup != AUTO:
        values["dgc_warmup_epochs"] = warmup * length
    return build(preset, [values])


def name_seed(settings: Settings) -> Settings:
    """Return the settings with the run's seed in the paths that ask for it."""
    paths = {name: getattr(settings, name) for name in BY_SEED}
    return replace(
        settings, **{n: path.replace(SEED, str(settings.seed)) for n, path in paths.items()}
    )


def meant_for(name: str, row: Row, common: Mapping[str, Any]) -> bool:
    """Say whether a common setting means something to a row."""
    if row.method in EVERY_RANK_ALONE and name in ("ranks_per_node", "leaders_per_node"):
        # Every rank is a node of its own there, which is what is compared.
        return False
    defaults = {name: field.default for name, field in FIELDS.items()}
    return concerns(name, {**defaults, **common, **row.own, "method": row.method})


def refuse_unused(names: Iterable[str], common: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Raise UserError for one of `names`, settings in `common`, that means nothing to any row."""
    methods = list(dict.fromkeys(row.method for row in rows))
    for name in names:
        if not any(meant_for(name, row, common) for row in rows):
            others = [method for method in methods_of(name) if method not in methods]
            raise UserError(
                f"--{key_of(name)} means nothing to {', '.join(methods)}; leave it away "
                f"(it is for {', '.join(others)})"
            )


def refuse_unknown(method: str, where: str) -> None:
    """Raise UserError unless there is such a method."""
    if method not in METHODS:
        guess = meant(method, METHODS, f"; there are {', '.join(METHODS)}")
        raise UserError(f"{where}: unknown method {quote(method)}{guess}")
