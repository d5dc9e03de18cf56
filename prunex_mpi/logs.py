"""Log records that name the rank, a progress line for rank 0, and the run directory's files."""

import json
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from prunex_mpi.errors import USAGE, UserError

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
            payload = record["bytes"]["payload"] / 2**20
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


class RunDirectory:
    """The files of one run; only world rank 0 makes one.

    Raises UserError when `path` already holds a run or cannot be written.
    """

    def __init__(self, path: Path, config_toml: str) -> None:
        self.path = path
        try:
            if (path / "config.toml").exists():
                raise UserError(
                    f"--run-dir {path} already holds a run; choose another or remove it"
                )
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.toml").write_text(config_toml, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--run-dir {path}: {error.strerror}; choose another", USAGE) from None

    def append(self, name: str, records: Iterable[dict[str, Any]]) -> None:
        """Append one JSON object per line to the file `name`."""
        with open(self.path / name, "a", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, allow_nan=False) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json in one atomic step: its presence says that the run ended well."""
        temporary = self.path / "summary.json.partial"
        temporary.write_text(
            json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        os.replace(temporary, self.path / "summary.json")


def format_table(rows: list[tuple[str, str]]) -> str:
    """Return aligned "name  value" lines."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
