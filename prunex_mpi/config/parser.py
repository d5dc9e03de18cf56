"""What the parsers of all programs share: how they refuse, `--version`, ranges of numbers."""

import argparse
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from prunex_mpi import __version__
from prunex_mpi.base.errors import UserError, meant, quote


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
        shown = flag if re.fullmatch(r"[\w-]{1,60}", flag) else quote(flag)
        raise UserError(f"unknown flag {shown}{meant(flag, flags, '; see --help')}")


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


def last_value(words: Iterable[str], flag: str) -> str:
    """Return what `flag` was given last, as `--flag X` or `--flag=X`; "" where it is not given."""
    found = ""
    for word, after in pairwise([*words, ""]):
        if word == flag:
            found = after
        elif word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
    return found


def check_range(given: argparse.Namespace, name: str, low: int, high: int) -> None:
    """Raise UserError unless the flag `--name` was given a number from `low` to `high`."""
    value = getattr(given, name)
    if not low <= value <= high:
        raise UserError(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")
