"""The records of metrics.jsonl as scalars for TensorBoard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
FLUSH_S = 30


class Board:
    """Write scalars into a folder of `run`; those of outer iteration `first` and later are new."""

    def __init__(self, run: Path, first: int) -> None:
        self.folder = run / FOLDER
        self.writer = self._open(first)

    def add(self, record: dict[str, Any]) -> None:
        """Add the numbers of a record; what is null is left out."""
        for name, value in scalars(record):
            self.writer.add_scalar(name, value, record["iteration"])

    def rewind(self, first: int) -> None:
        """Forget what was shown of outer iteration `first` and later."""
        self.writer.close()
        self.writer = self._open(first)

    def close(self) -> None:
        """Bring all to the disk."""
        self.writer.close()

    def _open(self, first: int) -> Any:
        # An import of seconds, for those alone who ask for it.
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder), purge_step=first, flush_secs=FLUSH_S)


def scalars(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield names (`seconds/local`) and values of the numbers in a record."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, bool | int | float) and key != "iteration":
            yield f"{prefix}{key}", float(value)
