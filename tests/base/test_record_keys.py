"""Damaged fields of a run's summary and of an export's plan are found where the file is read."""

import copy
import os
from pathlib import Path

import pytest

from prunex_mpi.base.files import read_json
from prunex_mpi.base.record_keys import check_network, check_summary

SUMMARY = {
    "status": "completed",
    "test_accuracy": 0.5,
    "density": 0.5,
    "seconds": {"total": 1.5},
    "delivered": {
        "bytes": 7,
        "crc32": 3,
        "num_classes": 2,
        "image_size": 8,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.2, 0.2, 0.2],
        "probe": [0.1, -0.1],
        "classes": ["cat", "dog"],
        "layers": {"0": {"groups": 1, "weight": [5, 3], "calls": {"view": -1}}},
    },
}


def test_what_a_run_writes_is_taken():
    check_summary(SUMMARY)
    check_summary({"status": "preempted", "reason": "SIGTERM"})
    check_network({}, {"vocab_size": 5}, {"mean": [], "std": []})


@pytest.mark.parametrize(
    ("place", "value", "name"),
    [
        (("status",), 3, "status"),
        (("test_accuracy",), "high", "test_accuracy"),
        (("seconds",), [1], "seconds"),
        (("nodes",), 3, "nodes"),
        (("validation",), "x", "validation"),
        (("validation",), {"accuracy": []}, "validation"),
        (("work",), [1], "work"),
        (("initial",), [1], "initial"),
        (("delivered",), None, "delivered"),
        (("delivered",), 3, "delivered"),
        (("delivered", "crc32"), "x", "crc32"),
        (("delivered", "classes"), 3, "classes"),
        (("delivered", "probe"), ["x"], "probe"),
        (("delivered", "std"), [1, 1], "std"),
        (("delivered", "std"), [1, 1, 0], "std"),
        (("delivered", "mean"), "0.5", "mean"),
        (("delivered", "layers"), 3, "layers"),
        (("delivered", "layers", "0"), 3, "layers.0"),
        (("delivered", "layers", "0", "groups"), 0, "layers.0.groups"),
        (("delivered", "layers", "0", "weight"), [5, "x"], "layers.0.weight"),
    ],
)
def test_a_damaged_field_is_named(place, value, name):
    damaged = copy.deepcopy(SUMMARY)
    table = damaged
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    with pytest.raises(ValueError, match=name):
        check_summary(damaged)


@pytest.mark.parametrize("text", ["Infinity", "1e999", "1" * 400, "NaN", "[" * 100_000, "{"])
def test_numbers_are_finite(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_json(tmp_path / "file")


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind):
    path = tmp_path / "file"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        read_json(path)
