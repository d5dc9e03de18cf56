"""Log records that name the rank, and a progress line for rank 0."""

import logging
import sys
from typing import Any

from tqdm import tqdm

from prunex_mpi.base.units import MIB

log = logging.getLogger("prunex_mpi")


def set_up_logging(rank: int, size: int) -> None:
    """Send records to standard error; ranks other than 0 say warnings and worse only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[{rank}/{size}] %(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)


class Progress:
    """A bar where standard error is a terminal, one line per outer iteration elsewhere."""

    def __init__(self, total: int, mode: str, rank: int) -> None:
        self.total = total
        self.enabled = rank == 0 and mode != "off"
        terminal = self.enabled and sys.stderr.isatty()
        self.bar = tqdm(total=total, unit="it", file=sys.stderr) if terminal else None

    def start(self, done: int) -> None:
        """Count the iterations that an earlier job has done."""
        if self.bar is not None:
            self.bar.update(done)

    def update(self, record: dict[str, Any]) -> None:
        """Show the metrics of one finished outer iteration."""
        if not self.enabled:
            return
        accuracy = record["test_accuracy"]
        shown = "-" if accuracy is None else f"{100 * accuracy:.2f} %"
        text = f"loss {record['train_loss']:.4f}, accuracy {shown}, density {record['density']:.3f}"
        if self.bar is not None:
            self.bar.set_postfix_str(text)
            self.bar.update()
        else:
            payload = record["bytes"]["payload"] / MIB
            log.info(
                "iteration %d/%d: %s, payload %.2f MiB, %.2f s%s",
                record["iteration"],
                self.total,
                text,
                payload,
                record["seconds"]["total"],
                ", frozen" if record["frozen"] else "",
            )

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()
