"""Errors that a user can cause, each with its exit code, and what their messages are made of."""

import difflib
from collections.abc import Iterable
from fractions import Fraction

FAILURE = 1
USAGE = 2
UNREADABLE = 3
PREEMPTED = 75


class UserError(Exception):
    """Say in one line what is wrong and what to do about it."""

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Diverged(UserError):
    """Say that training does not converge; raised on every rank alike."""


class DamagedCheckpoint(Exception):
    """Say in one line why a checkpoint can't be used."""


def one_line(error: Exception) -> str:
    """Return the kind and the text of a caught exception, for a message of one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def quote(value: object, limit: int = 80) -> str:
    """Return `value` for an error message: on one line and not too long."""
    text = repr(str(value) if isinstance(value, Fraction) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return the valid word that looks most like `word`, however far away it is."""
    return difflib.get_close_matches(word, list(valid), 1, 0.0)[0]
