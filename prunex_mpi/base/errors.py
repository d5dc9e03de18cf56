"""Errors that a user can cause, each with the exit code the process ends with."""

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
