"""The keys of what a run records (metrics.jsonl, layers.jsonl, ranks.jsonl), written and read.

And what the phases of an outer iteration are called on pictures, and what an evaluation came to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PHASES = ("local", "intra", "project", "inter", "dual", "evaluate", "setup", "total")
# Of each rank apart; what a method does once to begin is in none of them.
RANK_PHASES = PHASES[:-2]
# Phases 2 to 5: what H-SADMM adds to local steps.
CONSENSUS_PHASES = ("intra", "project", "inter", "dual")
LABELS = {
    "local": "1 local steps",
    "intra": "2 in the node",
    "project": "3 projection",
    "inter": "4 between nodes",
    "dual": "5 corrections",
    "evaluate": "evaluation",
    "setup": "set-up",
}
# Bytes: see `comm.traffic.Traffic`.
KINDS = ("dense", "payload", "sent", "racks", "mask", "intra", "control", "evaluate", "setup")
# Of text: tokens of all ranks per second of training.
SPEED = "tokens_per_second"


@dataclass(frozen=True)
class Measure:
    """The number that tells how good a network is; its key follows `test_` or `val_`.

    It is shown `scale` times as large, with so many `digits`, in `unit`, or the `short` one.
    """

    key: str
    label: str
    unit: str
    short: str
    scale: float
    digits: int
    higher_is_better: bool

    def text(self, value: float) -> str:
        """Return the number with its unit."""
        return f"{self.scale * value:.{self.digits}f} {self.unit}"


ACCURACY = Measure("accuracy", "accuracy", "%", "%", 100, 2, True)
LOSS = Measure("loss", "loss", "nats per token", "nats", 1, 4, False)


def measure_of(record: Mapping[str, Any]) -> Measure:
    """Return what networks are evaluated by in metrics.jsonl or summary.json: accuracy, or loss."""
    return ACCURACY if "test_accuracy" in record else LOSS


def reached(record: Mapping[str, Any], which: str) -> str:
    """Return what an evaluation on data `which` (test, val) came to, as text, "" for none."""
    measure = measure_of(record)
    value = record.get(f"{which}_{measure.key}")
    if value is None:
        return ""
    text = measure.text(value)
    if measure is LOSS:
        perplexity, bits = (record.get(f"{which}_{key}") for key in ("perplexity", "bits_per_byte"))
        text += f" (perplexity {perplexity:.2f}, {bits:.3f} bits per byte)"
    return text


def flat_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without tables inside it: what these hold is called "KEY.key"."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        inner = value if isinstance(value, dict) else {"": value}
        found |= {f"{key}.{own}" if own else key: item for own, item in inner.items()}
    return found


RESIDUALS = ("intra_primal", "intra_dual", "inter_primal", "inter_dual")
