"""What users are told: errors with their exit codes, what messages are made of, and log records."""

import difflib
import logging
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction

FAILURE = 1
USAGE = 2
UNREADABLE = 3
PREEMPTED = 75
# Names that other trainers have for what is no near word here.
ELSEWHERE = {
    "learning-rate": "lr",
    "num-epochs": "epochs",
    "num-train-epochs": "epochs",
    "output-dir": "run-dir",
    "grad-clip": "clip-grad",
    "max-grad-norm": "clip-grad",
}
# Of several names, how many a message shows.
SHOWN_NAMES = 3

log = logging.getLogger("prunex_mpi")


class UserError(Exception):
    """One line that says what is wrong and what to do about it, and the exit code.

    `together`: every rank of the job raises it, so that none has to be ended by the others.
    """

    together = False

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Diverged(UserError):
    """Training does not converge; raised on every rank alike."""


class DamagedCheckpoint(Exception):
    """One line that says why a checkpoint can't be used."""


def one_line(error: Exception) -> str:
    """Return the kind and the text of a caught exception, for a message of one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def printable(text: str) -> str:
    """Return `text` with escapes for what a terminal would not show but obey, or not take."""
    if text.isprintable():
        return text
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)


def quote(value: object, limit: int = 80) -> str:
    """Return `value` for an error message: on one line and not too long."""
    text = repr(str(value) if isinstance(value, Fraction) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def listed(names: Iterable[str], between: str = ", ") -> str:
    """Return some distinct names and how many more there are."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - SHOWN_NAMES
    shown = between.join(distinct[:SHOWN_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def enumerated(words: Sequence[str]) -> str:
    """Return all of some words as a sentence has them: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def meant(word: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Return "; did you mean X?" with the valid word that looks like `word`, else `otherwise`."""
    plain = {_plain(name): name for name in valid}
    written = _plain(word)
    found = difflib.get_close_matches(ELSEWHERE.get(written, written), plain, n=1)
    if not found:
        return otherwise
    name = plain[found[0]]
    return f"; did you mean {name if name.startswith('-') else repr(name)}?"


def _plain(word: str) -> str:
    """Return a word without what is often written another way."""
    return word.lower().lstrip("-").replace("_", "-")


class _OneLine(logging.Formatter):
    """Format a record as one line, whatever names of files and classes are in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def set_up_logging(rank: int, size: int) -> None:
    """Send records to standard error; ranks other than 0 say warnings and worse only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"[{rank}/{size}] %(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
