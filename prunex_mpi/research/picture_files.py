"""The files that figures are written to."""

from pathlib import Path
from typing import TYPE_CHECKING

from prunex_mpi.base.errors import UserError, quote
from prunex_mpi.tools.drawing import DPI

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".svg", ".png", ".pdf")


def check_file_kind(flag: str, path: str) -> None:
    """Raise UserError unless the name that a flag gives ends as a picture's does."""
    if Path(path).suffix not in KINDS:
        names = ", ".join(KINDS[:-1])
        raise UserError(
            f"{flag} {quote(path, 250)}: give a name that ends in {names} or {KINDS[-1]}"
        )


def save(figure: "Figure", path: str, flag: str) -> None:
    """Write a figure to the file that a flag names; raise UserError."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise UserError(f"{flag} {quote(path, 250)}: {error.strerror}; choose another") from None
