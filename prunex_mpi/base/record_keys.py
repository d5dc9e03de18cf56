"""The keys of what a run records (metrics.jsonl, layers.jsonl, ranks.jsonl), written and read.

And what the phases of an outer iteration are called on pictures, what an evaluation came to, and
checks of what the files of a run and of an export say, once, where they are read.
"""

from collections.abc import Iterable, Mapping
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
RESIDUALS = ("intra_primal", "intra_dual", "inter_primal", "inter_dual")
# Of summary.json, where they are there.
TEXTS = ("status", "reason", "method", "model", "dataset")
NUMBERS = (
    *("iterations", "density", "parameters", "parameters_kept", "prunable", "prunable_kept"),
    *("seconds_total", "tokens_per_second"),
)
TABLES = ("seconds", "bytes", "checkpoints", "validation", "work")


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


def check_summary(summary: Any) -> None:
    """Raise ValueError with a name unless `summary` is what a run says of its end."""
    _require(isinstance(summary, dict) and "status" in summary, "status")
    for name, value in summary.items():
        if name in TEXTS:
            _require(isinstance(value, str), name)
        elif name in NUMBERS:
            _require(is_number(value), name)
        elif name.startswith("test_"):
            _require(value is None or is_number(value), name)
        elif name in TABLES:
            _require(isinstance(value, dict) and _are_numbers(value.values()), name)
        elif name == "nodes":
            _require(isinstance(value, list) and _are_counts(value), name)
        elif name == "initial":
            _require(isinstance(value, dict), name)
    if "delivered" in summary:
        model = summary["delivered"]
        _require(isinstance(model, dict) and _are_counts([model.get("bytes")]), "delivered.bytes")
        _require(_are_counts([model.get("crc32")]), "delivered.crc32")
        check_network(model, model, model)


def check_network(
    network: Mapping[str, Any], sizes: Mapping[str, Any], look: Mapping[str, Any]
) -> None:
    """Raise ValueError unless a file describes a `network` and how its images are normalised.

    `sizes` are those of its inputs: text, which has a vocabulary, is not normalised.
    """
    colours = 0 if "vocab_size" in sizes else 3
    for name in ("mean", "std"):
        numbers = look.get(name)
        fits = isinstance(numbers, list) and len(numbers) == colours and _are_numbers(numbers)
        _require(fits and (name == "mean" or all(number > 0 for number in numbers)), name)
    probe, classes = network.get("probe", []), network.get("classes", [])
    _require(isinstance(probe, list) and _are_numbers(probe), "probe")
    _require(isinstance(classes, list) and all(isinstance(x, str) for x in classes), "classes")
    layers = network.get("layers", {})
    _require(isinstance(layers, dict), "layers")
    for module, found in layers.items():
        _require(isinstance(found, dict), f"layers.{module}")
        for name, size in found.items():
            counts = size if isinstance(size, list) else [size]
            # Those of torch's calls are looked at where they are made.
            fits = name == "calls" or (_are_counts(counts) and (name != "groups" or size != 0))
            _require(fits, f"layers.{module}.{name}")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_numbers(values: Iterable[object]) -> bool:
    return all(map(is_number, values))


def _are_counts(values: Iterable[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _require(fits: bool, name: str) -> None:
    if not fits:
        raise ValueError(name)
