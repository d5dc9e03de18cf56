"""Flags of `python -m prunex_mpi.bench compare`: methods, their learning rates, common settings."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunex_mpi.base.errors import UserError, nearest, quote
from prunex_mpi.settings.cli import add_settings, convert_flag, join_negative_numbers
from prunex_mpi.settings.fields import ESTIMATED, FIELDS, Settings, key_of, methods_of
from prunex_mpi.settings.methods import CONSENSUS, EVERY_RANK_ALONE, METHODS
from prunex_mpi.settings.parser import Parser, program_parser
from prunex_mpi.settings.resolve import build
from prunex_mpi.settings.values import convert

# What the comparison itself decides, or what only a run of its own can do.
OWN = ("method", "seed", "lr", "eps_abs", "eps_rel", "run_dir", "dry_run", *ESTIMATED)
ALONE = ("resume", "checkpoint_every", "time_limit", "preempt_signals", "on_divergence")
COMMON = tuple(name for name in FIELDS if name not in (*OWN, *ALONE))
MAX_SEED = 2**31 - 1


@dataclass(frozen=True)
class Options:
    """What to compare; `common` holds converted values by field name.

    `lr` has the methods whose learning rate is given. For the others, short runs of
    `tune_iterations` outer iterations with seed `tune_seed` choose it from `grid`; without a grid
    it is the preset's.
    """

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    common: Mapping[str, Any]
    lr: Mapping[str, float]
    grid: tuple[float, ...]
    tune_iterations: int
    tune_seed: int
    folder: str
    json_file: str
    text_file: str

    @property
    def tuned(self) -> tuple[str, ...]:
        """The methods whose learning rate short runs choose."""
        return tuple(m for m in self.methods if m not in self.lr) if self.grid else ()


def build_parser() -> Parser:
    """Return the parser of the comparison's flags, which converts nothing."""
    parser = program_parser(
        "bench compare",
        "Train with one method after the other, on the same ranks and the same samples in one job, "
        "and print what each of them reaches and costs.",
        "Start it with mpirun or srun. A setting goes to those methods that it means something to. "
        "H-SADMM's stopping test is off: all methods do the same work.",
        usage="%(prog)s --methods NAME ... [--seeds N ...] [--FLAG VALUE ...]",
        argument_default=argparse.SUPPRESS,
    )
    group = parser.add_argument_group("comparison")
    add = group.add_argument
    add("--methods", nargs="+", metavar="NAME", help=f"some of {', '.join(METHODS)}")
    add("--seeds", nargs="+", metavar="N", help="one run of each method per seed [0]")
    add(
        "--lr",
        nargs="+",
        metavar="METHOD=X",
        help="peak learning rate of a method, a bare X for all others [the preset's]",
    )
    add("--tune-lr", nargs="+", metavar="X", help="choose the other learning rates among these")
    add(
        "--tune-iterations",
        metavar="N",
        help="outer iterations of a run that tunes [a quarter of --outer-iterations]",
    )
    add("--tune-seed", metavar="N", help="their seed, none of --seeds [the largest of these + 1]")
    add("--dir", metavar="DIR", help="keep each run's directory, named METHOD-SEED, in DIR")
    add("--json", metavar="FILE", help="write the tables there too")
    add("--text", metavar="FILE", help="write what is printed there too")
    add_settings(parser, COMMON)
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` (without the program's name and `compare`) asks for.

    Every run's settings are checked. Raises UserError with one line that names the culprit;
    `--help` prints and exits.
    """
    given = vars(build_parser().parse_all(join_negative_numbers(argv)))
    methods = _methods(given.pop("methods", []))
    seeds = tuple(_seed("seeds", text) for text in given.pop("seeds", ["0"]))
    _refuse_repeated("seeds", seeds)
    lr = _learning_rates(given.pop("lr", []), methods)
    grid = tuple(_rate("--tune-lr", text) for text in given.pop("tune_lr", []))
    _refuse_repeated("tune-lr", grid)
    if grid and not set(methods) - set(lr):
        raise UserError(
            "--tune-lr has nothing to choose: --lr gives a learning rate to all methods"
        )
    for name in ("tune_iterations", "tune_seed"):
        if name in given and not grid:
            raise UserError(f"--{key_of(name)} means nothing without --tune-lr")
    tune_seed = _seed("tune-seed", given.pop("tune_seed", str(max(seeds) + 1)))
    if tune_seed in seeds:
        raise UserError(f"--tune-seed {tune_seed} is one of --seeds; choose another")
    iterations = given.pop("tune_iterations", None)
    places = {key: given.pop(key, "") for key in ("dir", "json", "text")}
    common = {name: convert_flag(name, text) for name, text in given.items()}
    _refuse_unused(common, methods)
    outer = _settings(methods[0], common).outer_iterations
    tune_iterations = max(1, outer // 4)
    if iterations is not None:
        field = FIELDS["outer_iterations"]
        number = int(iterations) if iterations.isdecimal() else iterations
        tune_iterations = convert(field, number, "--tune-iterations")
    options = Options(
        methods,
        seeds,
        common,
        lr,
        grid,
        tune_iterations,
        tune_seed,
        places["dir"],
        places["json"],
        places["text"],
    )
    for method in methods:
        settings_of(options, method, seeds[0], lr.get(method))
    for method in options.tuned:
        try:
            tuning_settings(options, method, grid[0])
        except UserError as error:
            raise UserError(f"with --tune-iterations {tune_iterations}: {error}") from None
    return options


def settings_of(options: Options, method: str, seed: int, lr: float | None) -> Settings:
    """Return the settings of one run; without `lr` the preset's is taken."""
    rate = {} if lr is None else {"lr": lr}
    return _settings(method, options.common, seed=seed, **rate)


def tuning_settings(options: Options, method: str, lr: float) -> Settings:
    """Return the settings of a short run with the learning rate `lr`."""
    return _settings(
        method,
        options.common,
        seed=options.tune_seed,
        lr=lr,
        outer_iterations=options.tune_iterations,
        evaluate_every=options.tune_iterations,
    )


def _settings(method: str, common: Mapping[str, Any], **own: Any) -> Settings:
    values = {name: value for name, value in common.items() if _concerns(name, method)}
    preset = values.pop("preset", FIELDS["preset"].default)
    if method in CONSENSUS:
        # An early stop would spare it work that the others do.
        own |= {"eps_abs": 0.0, "eps_rel": 0.0}
    return build(preset, [{**values, "method": method, **own}])


def _concerns(name: str, method: str) -> bool:
    if method in EVERY_RANK_ALONE and name in ("ranks_per_node", "leaders_per_node"):
        # Every rank is a node of its own there, which is what is compared.
        return False
    return method in methods_of(name)


def _refuse_unused(common: Mapping[str, Any], methods: Sequence[str]) -> None:
    for name in common:
        if not any(_concerns(name, method) for method in methods):
            raise UserError(
                f"--{key_of(name)} means nothing to {', '.join(methods)}; leave it away "
                f"(it is for {', '.join(methods_of(name))})"
            )


def _methods(words: Sequence[str]) -> tuple[str, ...]:
    if not words:
        raise UserError(f"--methods is missing: give some of {', '.join(METHODS)}")
    for word in words:
        _refuse_unknown(word, "--methods")
    _refuse_repeated("methods", words)
    return tuple(words)


def _refuse_unknown(method: str, where: str) -> None:
    if method not in METHODS:
        guess = nearest(method, METHODS)
        raise UserError(f"{where}: unknown method {quote(method)}; did you mean {guess!r}?")


def _refuse_repeated(flag: str, values: Sequence[object]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"--{flag} has {value} twice; give it once")


def _learning_rates(items: Sequence[str], methods: Sequence[str]) -> dict[str, float]:
    rates: dict[str, float] = {}
    for item in items:
        method, equals, text = item.rpartition("=")
        if equals:
            _refuse_unknown(method, f"--lr {quote(item)}")
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
