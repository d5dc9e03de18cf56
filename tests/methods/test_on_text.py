"""Every method trains on text as it is, goes on bit for bit, and is judged alike on any ranks."""

import json
from pathlib import Path

import pytest
from jobs import run_folder, run_job_here
from nodes import WORLD

from prunex_mpi import train
from prunex_mpi.base.errors import PREEMPTED, UNREADABLE, USAGE
from prunex_mpi.config.cli import parse
from prunex_mpi.config.resolve import make
from prunex_mpi.methods.declared import METHODS
from prunex_mpi.settings.fields import Settings

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]

TEXT = "".join(f"{i} times {j} is {i * j};\n" for i in range(12) for j in range(12))
COUPLED = {"groups": ("coupled",), "keep_ratio": (0.5,)}
# What a run so short can't have by default.
OWN = {
    "prunetrain": {"prunetrain_reconfigure_every": 1},
    "pactrain": {"keep_ratio": (0.2,), "pactrain_stable_window": 1},
    "prunex": COUPLED,
    "prunex-flat": COUPLED,
    "one-shot": COUPLED,
    "parallax": {"model": "tiny_text:untied"},
    "embrace": {"model": "tiny_text:untied"},
}


# One of each driver; the others differ in what they send alone.
ON_TEXT = [m.name for m in METHODS if not m.own_groups]
SOME, LONG = ("prunex", "prunex-flat", "local-sgd", "dense", "prunetrain"), pytest.mark.long


def settings_of(folder: Path, name: str, method: str, **changes: object) -> Settings:
    common = {
        "dataset": "text",
        "data_dir": str(folder / "text"),
        "model": "tiny_text:gpt",
        "context": 8,
        "batch_size": 4,
        "local_steps": 3,
        "outer_iterations": 4,
        "lr": 0.01,
        "progress": "off",
        "run_dir": str(folder / name),
    }
    return make(method=method, **{**common, **OWN.get(method, {}), **changes})


def write_text(folder: Path) -> None:
    if WORLD.rank == 0:
        (folder / "text").write_text(TEXT)
    WORLD.Barrier()


@pytest.mark.mpi
@pytest.mark.parametrize(
    "method", [name if name in SOME else pytest.param(name, marks=LONG) for name in ON_TEXT]
)
def test_a_method_trains_on_text(method):
    with run_folder() as folder:
        write_text(folder)
        assert run_job_here(settings_of(folder, "run", method, ranks_per_node=1)) == 0
        if WORLD.rank == 0:
            records = [json.loads(x) for x in (folder / "run/metrics.jsonl").open()]
            assert records[-1]["test_loss"] < records[0]["test_loss"] < 5.55
            assert "test_accuracy" not in records[-1] and records[-1]["tokens_per_second"] > 0
            summary = json.loads((folder / "run/summary.json").read_text())
            assert summary["test_loss"] == records[-1]["test_loss"]
            assert summary["test_bits_per_byte"] == pytest.approx(summary["test_loss"] / 0.693147)


@pytest.mark.mpi
@pytest.mark.usefixtures("leaving_early")
def test_a_run_on_text_goes_on_bit_for_bit():
    same = {"tokenizer": "chars", "val_split": 0.2, "lr_schedule": "constant", "warmup_ratio": 0.0}
    with run_folder() as folder:
        write_text(folder)
        assert run_job_here(settings_of(folder, "whole", "local-sgd", **same)) == 0
        leaves = settings_of(folder, "run", "local-sgd", **same, time_limit=1.0)
        assert run_job_here(leaves) == PREEMPTED
        flags = ["--resume", "--run-dir", str(folder / "run"), "--time-limit", "0"]
        assert run_job_here(parse(flags)) == 0
        if WORLD.rank == 0:
            runs = [folder / name for name in ("run", "whole")]
            losses = [
                [(r["train_loss"], r["val_loss"]) for r in map(json.loads, path.open())]
                for path in (run / "metrics.jsonl" for run in runs)
            ]
            assert losses[0] == losses[1] and len(losses[0]) == 4
            states = [(run / "state.safetensors").read_bytes() for run in runs]
            assert states[0] == states[1]
            summary = json.loads((folder / "run/summary.json").read_text())
            # The best by the loss of the text that is held out.
            best = min(range(4), key=lambda i: losses[0][i][1])
            assert summary["validation"]["iteration"] == best + 1
            assert summary["validation"]["loss"] == losses[0][best][1]


# Flags, the exit code, and what is wrong, on two ranks.
WRONG = {
    "long context": ("--context 9999", UNREADABLE, "context 9999 is longer than the"),
    "few tokens": ("--train-samples 1", UNREADABLE, "2 ranks are more than the 1 windows"),
    "a token beyond": ("--model tiny_text:of_few_tokens", USAGE, "does not fit windows of 8"),
    "no mask": ("--model tiny_text:without_a_mask", USAGE, "depends on later tokens"),
    "no channels": ("--model tiny_text:lstm", USAGE, "network's): choose a --method"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("failing_instead_of_aborting")
@pytest.mark.parametrize("what", WRONG)
def test_bad_text_is_one_line_for_all_ranks(what, capfd):
    flags, code, line = WRONG[what]
    with run_folder() as folder:
        write_text(folder)
        capfd.readouterr()
        common = "--dataset text --model tiny_text:gpt --context 8 --batch-size 4 --local-steps 3"
        places = ["--data-dir", str(folder / "text"), "--run-dir", str(folder / "run")]
        assert train.main([*common.split(), *places, *flags.split()]) == code
        told = [x for x in capfd.readouterr().err.splitlines() if "error" in x or "Error" in x]
        assert len(told) == (WORLD.rank == 0)
        assert all(x.startswith("prunex_mpi.train: error: ") and line in x for x in told)
        assert not (folder / "run/summary.json").exists()
