"""Check what the files of a run and of an export say, once, where they are read."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prunex_mpi.base.files import read_text

# Of summary.json, where they are there.
TEXTS = ("status", "reason", "method", "model", "dataset")
NUMBERS = (
    *("iterations", "density", "parameters", "parameters_kept", "prunable", "prunable_kept"),
    *("seconds_total", "tokens_per_second"),
)
TABLES = ("seconds", "bytes", "checkpoints", "validation", "work")


def read_json(path: Path) -> Any:
    """Return what a regular file holds, as `loads` does; raise OSError, ValueError."""
    return loads(read_text(path))


def loads(text: str | bytes) -> Any:
    """Return what JSON holds, all numbers finite in float64 too; raise ValueError."""
    try:
        return json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


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


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_numbers(values: Iterable[object]) -> bool:
    return all(map(is_number, values))


def _are_counts(values: Iterable[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _require(fits: bool, name: str) -> None:
    if not fits:
        raise ValueError(name)
