"""The flags of all programs; read settings from them and from the file of `--config`."""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, get_args

from prunex_mpi import __version__
from prunex_mpi.base.errors import UNREADABLE, UserError, meant, quote
from prunex_mpi.base.files import TOKENIZER, regular_only, tomllib
from prunex_mpi.base.imports import check_named, named_in
from prunex_mpi.config.resolve import (
    BY_NAME,
    FIELDS,
    OWNER,
    build,
    check_saved,
    defaults,
    from_table,
    is_of_a_run,
    over,
    resumed,
)
from prunex_mpi.settings.fields import Settings, key_of
from prunex_mpi.settings.values import choices_shown, convert, in_words, left_open

# Say which folder a run lies in, and that it goes on: who repeats a run does not mean that.
OF_THE_FOLDER = ("run_dir", "resume")
OF_IMAGES = ("image_mean", "image_std")
# What a newcomer needs to see; --help all has the rest.
FIRST = (
    *("preset", "method", "model", "dataset", "data_dir", "epochs", "batch_size", "lr"),
    *("groups", "keep_ratio", "payload", "local_epochs", "local_steps", "overlap_steps"),
    *("init_from", "device", "amp", "ranks_per_node", "run_dir", "resume", "seed", "dry_run"),
)
HELP_EPILOG = """\
theta are a rank's local parameters, z_i those that its node has agreed on, z the global ones.
A run has epochs / local-epochs outer iterations: local steps (phase 1), then agreement in the node,
pruning, exchange between nodes and dual updates (phases 2 to 5).
--dry-run prints the settings and the bytes of every message, and trains nothing.

--help all prints every flag."""
_METAVARS = {int: "N", float: "X", Fraction: "N|P/Q", str: "NAME"}

# --------------------------------------------------------------------------------------------------
# What the parsers of all programs share
# --------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Raise UserError where argparse would print its usage and exit."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(**rules)
        # argparse takes -1e-3 for a flag, and -1 for a number.
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")

    def error(self, message: str) -> NoReturn:
        raise UserError(" ".join(message.split()) + "; see --help")

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse `argv`; raise UserError that names the first word that no flag takes."""
        given, rest = self.parse_known_args(list(argv))
        if not rest:
            return given
        word = next((word for word in rest if word.startswith("-")), None)
        if word is None:
            raise UserError(
                f"unexpected argument {quote(rest[0])}: values follow a flag, switches take none"
            )
        flag = word.partition("=")[0]
        flags = [name for action in self._actions for name in action.option_strings]
        named = flag if re.fullmatch(r"[\w-]{1,60}", flag) else quote(flag)
        raise UserError(f"unknown flag {named}{meant(flag, flags, '; see --help')}")


def program_parser(program: str, description: str, epilog: str = "", **rules: Any) -> Parser:
    """Return the parser of `python -m prunex_mpi.PROGRAM`; `rules` go to argparse."""
    parser = Parser(
        prog=f"python -m prunex_mpi.{program}",
        description=description,
        epilog=epilog or None,
        allow_abbrev=False,
        **rules,
    )
    parser.add_argument("--version", action="version", version=f"prunex_mpi {__version__}")
    return parser


def add_timeout(parser: Parser, default_s: float) -> None:
    """Let `parser` know --timeout, which is kept as text: it is converted as that of train is."""
    parser.add_argument(
        "--timeout",
        default=f"{default_s:g}",
        metavar="X",
        help=f"seconds without progress before the job is ended [{default_s:g}]",
    )


def add_own_model(parser: Parser) -> None:
    """Let `parser` know --model, which repeats the own model of the run that is read."""
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="repeat the run's own model, package.module:factory: importing it runs its code",
    )


def check_range(given: argparse.Namespace, name: str, low: int, high: int) -> None:
    """Raise UserError unless the flag `--name` was given a number from `low` to `high`."""
    value = getattr(given, name)
    if not low <= value <= high:
        raise UserError(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")


# --------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> Settings:
    """Return the settings that `argv` (without the program's name) asks for.

    Weak to strong: defaults, preset, file of `--config`, flags. Raises UserError; `--help` and
    `--version` print and exit.
    """
    helps = [number for number, word in enumerate(argv) if word in ("-h", "--help")]
    if helps:
        about = argv[helps[0] + 1] if len(argv) > helps[0] + 1 else ""
        print_help("" if about.startswith("-") else about)
        sys.exit(0)
    flags = vars(build_parser().parse_all(argv))
    paths = flags.pop("config", [])
    if len(paths) > 1:
        raise UserError(f"--config is given {len(paths)} times; give it once")
    given = {name: convert_flag(name, text) for name, text in flags.items()}
    of_file, is_run = read_config(paths[0]) if paths else ({}, False)
    laid = over(of_file, given)
    if laid.get("resume"):
        if not laid.get("run_dir"):
            raise UserError("--resume needs --run-dir, the folder of the run that goes on")
        # os.path says no where Path.exists raises; the run directory then says what is wrong.
        if os.path.exists(Path(laid["run_dir"]) / "config.toml"):
            saved, asked = read_saved(laid["run_dir"])
            return resumed_by_tokenizer(saved, laid, asked)
    preset = laid.get("preset", FIELDS["preset"].default)
    return build(preset, given, of_file) if is_run else build(preset, laid)


def resumed_by_tokenizer(
    saved: Mapping[str, Any], given: Mapping[str, Any], asked: Mapping[str, Any]
) -> Settings:
    """Return the settings of a run that goes on, as `resumed`, wherever its tokenizer's file lies.

    The run's own copy stands in where that file is not there any more.
    """
    settings, kept = resumed(saved, given, asked), Path(given["run_dir"]) / TOKENIZER
    gone = os.path.exists(kept) and not os.path.exists(settings.tokenizer)
    return dataclasses.replace(settings, tokenizer=str(kept)) if gone else settings


def read_config(path: str) -> tuple[dict[str, Any], bool]:
    """Read the TOML file of `--config`; return converted values by field name, and whether a run's.

    The file of a run is read to repeat it in another folder. Raises UserError for a bad file.
    """
    where = f"--config {quote(path, 250)}"
    table = load_toml(path, where)
    values, is_run = from_table(table, where), is_of_a_run(table)
    if not is_run:
        return values, False
    # What was measured of images is of those: another run measures its own.
    measured = from_table(table.get("asked", {}), where).keys() & {*OF_IMAGES}
    left_out = (*OF_THE_FOLDER, *measured)
    return {name: value for name, value in values.items() if name not in left_out}, True


def read_saved(run_dir: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the config.toml of a run by field name; all settings must be there and fit.

    Returns them, and what of them had been asked for otherwise, {} for nothing.
    """
    table, where = load_saved(run_dir), quote(str(Path(run_dir) / "config.toml"), 250)
    try:
        saved = from_table(table, where)
        check_saved(saved, where)
        return saved, from_table(table.get("asked", {}), where)
    except UserError as error:
        raise UserError(str(error), UNREADABLE) from None


def load_saved(run_dir: str) -> dict[str, Any]:
    """Return what TOML holds in the config.toml of a run; raise UserError (UNREADABLE)."""
    path, where = str(Path(run_dir) / "config.toml"), quote(run_dir, 250)
    # Unlike those of Path these say no where a folder may not be entered.
    if not os.path.isdir(run_dir):
        raise UserError(f"there is no run in {where}; give the folder of --run-dir", UNREADABLE)
    if not os.path.exists(path):
        raise UserError(f"{where} is not the folder of a run: it has no config.toml", UNREADABLE)
    try:
        return load_toml(path, quote(path, 250), regular_only)
    except UserError as error:
        raise UserError(str(error), UNREADABLE) from None


def load_toml(
    path: str, where: str, opener: Callable[[str, int], int] | None = None
) -> dict[str, Any]:
    """Return what a TOML file holds; raise UserError with `where` it is."""
    try:
        with open(path, "rb", opener=opener) as file:
            return tomllib.load(file)
    except OSError as error:
        raise UserError(f"cannot read {where}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{where} is not a TOML file: {reason}") from None


def build_parser(names: Iterable[str] = FIELDS, grouped: bool = True) -> Parser:
    """Return a parser with a flag per setting, `grouped` by subject or not, that converts nothing.

    Defaults in brackets are those of the recipe.
    """
    parser = program_parser(
        "train",
        "Train a network on several MPI ranks and prune it while it trains.",
        HELP_EPILOG,
        usage="srun %(prog)s [--config FILE] [--preset NAME] [--FLAG VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", action="append", help="TOML file of settings; flags beat it"
    )
    add_settings(parser, names, defaults("recipe", BY_NAME["prunex"]), grouped)
    return parser


def print_help(about: str) -> None:
    """Print the flags that matter first, or all; raise UserError for another word."""
    if about not in ("", "all"):
        raise UserError(f"--help {quote(about)}: give --help for the first flags, --help all")
    (build_parser() if about else build_parser(FIRST, grouped=False)).print_help()


def add_settings(
    parser: Parser, names: Iterable[str], usual: Mapping[str, Any], grouped: bool = True
) -> None:
    """Add a flag, which converts nothing, for each of these settings, with `usual` defaults."""
    sections: dict[str, Any] = {}
    for name in names:
        field = FIELDS[name]
        section = field.metadata["section"]
        if name in OWNER:
            section = f"method {OWNER[name].name}: {OWNER[name].help}"
        section = section if grouped else "the flags that matter first"
        group = sections.get(section) or parser.add_argument_group(section)
        sections[section] = group
        text = f"{field.metadata['help']} [{shown(name, usual.get(name, field.default))}]"
        options = _action(field.type, field.metadata, text)
        group.add_argument(f"--{key_of(name)}", dest=name, **options)


def _action(kind: Any, rules: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return the arguments of add_argument for a field of type `kind`."""
    text = text.replace("%", "%%")
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    item = (*get_args(kind), kind)[0]
    metavar = _METAVARS[item]
    if rules.get("choices"):
        metavar = "{" + ",".join(choices_shown(rules)) + "}"
    metavar = "N|P/Q" if rules.get("share") else metavar
    metavar = "|".join(["N", *rules["words"]]) if "words" in rules else metavar
    metavar = f"{metavar}|auto" if rules.get("auto") else metavar
    metavar = rules.get("metavar", metavar)
    many = {"nargs": "+", "action": "extend"} if get_args(kind) else {}
    return {"metavar": metavar, "help": text, **many}


def shown(name: str, value: object) -> str:
    """Return a value of a setting as help and tables show it."""
    return "auto" if left_open(FIELDS[name], value) else in_words(value)


def convert_flag(name: str, text: Any) -> Any:
    """Convert the text, or the list of texts, of one flag."""
    field, where = FIELDS[name], f"--{key_of(name)}"
    kind = (*get_args(field.type), field.type)[0]
    if kind in (int, float) and not field.metadata.get("share"):
        many = isinstance(text, list)
        text = [_number(kind, item) for item in text] if many else _number(kind, text)
    return convert(field, text, where)


def _number(kind: type, text: str) -> float | str:
    """Return the number that a text is, or the text, which is refused where no word may stand."""
    try:
        return kind(text)
    except ValueError:
        return text


def read_flags(argv: Sequence[str]) -> Settings:
    """Return the settings of a job.

    Raises UserError also for modules to import that a file alone names.
    """
    settings, where = parse(argv), "the file of --config or of the run"
    folder = Path(settings.run_dir) if settings.resume else None
    for what in ("model", "dataset", "loss"):
        check_named(what, getattr(settings, what), named_in(argv), where, folder)
    return settings
