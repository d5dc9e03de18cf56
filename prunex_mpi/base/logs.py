"""Log records that name the rank."""

import logging
import sys

from prunex_mpi.base.errors import printable

log = logging.getLogger("prunex_mpi")


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
