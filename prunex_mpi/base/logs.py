"""Log records that name the rank."""

import logging
import sys

log = logging.getLogger("prunex_mpi")


def set_up_logging(rank: int, size: int) -> None:
    """Send records to standard error; ranks other than 0 say warnings and worse only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[{rank}/{size}] %(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
