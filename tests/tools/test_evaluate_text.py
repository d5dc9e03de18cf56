"""Networks that predict the next token, tested from their folders, and how they continue a text."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import run_folder, run_job_here
from nodes import WORLD
from torch import nn

from prunex_mpi import evaluate as program
from prunex_mpi import export as export_program
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.config.resolve import make
from prunex_mpi.data.text import Windows
from prunex_mpi.data.text_files import Tokenizer, decode, encode
from prunex_mpi.data.text_files import Tokens as TextTokens
from prunex_mpi.models.inputs import Tokens
from prunex_mpi.run.finished_run import read_finished_run
from prunex_mpi.tools.evaluate_network import Sampling, count_tokens, evaluate, generate
from prunex_mpi.tools.evaluate_options import parse
from prunex_mpi.tools.export_run import export
from prunex_mpi.tools.report.read_runs import read_run

pytestmark = [pytest.mark.any_mpi, pytest.mark.two_ranks]

TEXT = "".join(f"{i} times {j} is {i * j};\n" for i in range(12) for j in range(12))
MODEL = "tiny_text:gpt"
TINY = {"method": "dense", "dataset": "text", "tokenizer": "chars", "model": MODEL, "context": 8}
TINY |= {"batch_size": 4, "local_steps": 3, "outer_iterations": 2, "progress": "off"}


def write(path: Path, text: str) -> Path:
    if WORLD.rank == 0:
        path.write_text(text)
    WORLD.Barrier()
    return path


def train(folder: Path, name: str, data: Path, **changes: object) -> None:
    places = {"data_dir": str(data), "run_dir": str(folder / name)}
    assert run_job_here(make(**{**TINY, **places, **changes})) == 0


@pytest.mark.mpi
def test_evaluate_finds_what_the_run_reached_and_refuses_other_text(capfd):
    with run_folder() as folder:
        data = write(folder / "text", TEXT)
        # Tests are of cross-entropy, whatever training minimises.
        train(folder, "run", data, loss="tiny_text:focal")
        found = folder / "found.json"
        flags = [str(folder / "run"), "--model", MODEL]
        assert evaluate(WORLD, parse([*flags, "--json", str(found)]), Heartbeat()) == 0
        WORLD.Barrier()
        summary = json.loads((folder / "run/summary.json").read_text())
        told = json.loads(found.read_text())
        for name in ("loss", "perplexity", "bits_per_byte"):
            assert told[name] == pytest.approx(summary[f"test_{name}"], rel=1e-6)
        assert told["tokens"] == (len(TEXT) - len(TEXT) * 9 // 10 - 1) // 8 * 8
        if WORLD.rank == 0:
            out = capfd.readouterr().out
            assert "nats per token" in out and str(data) in out
            assert f"{told['tokens']:,} of the text's {len(TEXT):,}" in out
            finished = read_finished_run(folder / "run", given=(MODEL,))
            assert len(finished.test) == told["tokens"] // 8
            run = read_run(folder / "run")
            assert run.final == (summary["test_loss"], "test") and run.measure.key == "loss"
        other = write(folder / "other", TEXT + "?" * 50)
        assert evaluate(WORLD, parse([*flags, "--data-dir", str(other)]), Heartbeat()) == 0
        told = "the tokenizer loses 50 characters: '?' (50)" in capfd.readouterr().err
        assert told == (WORLD.rank == 0)
        with pytest.raises(UserError, match="the network reads text"):
            evaluate(WORLD, parse([*flags, "--dataset", "digits"]), Heartbeat())


@pytest.mark.mpi
def test_of_another_text_all_is_tested_and_of_the_run_s_the_test_part(capfd):
    with run_folder() as folder:
        data = write(folder / "text", TEXT)
        train(folder, "run", data)
        if WORLD.rank == 0:
            export(export_program.parse([str(folder / "run"), f"--model={MODEL}", "--repeat=0"]))
            (folder / "moved").write_text(TEXT)
            (folder / "other").write_text(TEXT[:999])
            (folder / "short").write_text(TEXT[:8])
            (folder / "parts").mkdir()
            for name, part in (("train", TEXT), ("test", TEXT[:99])):
                (folder / "parts" / f"{name}.txt").write_text(part)
        WORLD.Barrier()

        def found(network: str, *flags: str) -> dict[str, Any]:
            flags = (str(folder / network), "--model", MODEL, *flags, "--json", f"{folder}/found")
            assert evaluate(WORLD, parse(flags), Heartbeat()) == 0
            WORLD.Barrier()
            return json.loads((folder / "found").read_text())

        own, text = found("run"), "--dataset=text"
        moved = f"--data-dir={folder}/moved"
        for again in (found("run", moved), found("run/model", text, moved)):
            assert again["tokens"] == own["tokens"] < again["tokens_of_text"] == len(TEXT)
            assert again["loss"] == pytest.approx(own["loss"], rel=1e-5)
        other = f"--data-dir={folder}/other"
        for network in ("run", "run/model"):
            told = found(network, text, other)
            assert (told["tokens"], told["tokens_of_text"]) == (998 // 8 * 8, 999)
            assert told["text"] == f"{folder}/other, 999 bytes"
            assert told["bits_per_byte"] == pytest.approx(told["loss"] / math.log(2))
        assert found("run", other, "--test-samples=5")["tokens"] == 40
        # Of a text whose names tell its parts, that to test on.
        assert found("run", f"--data-dir={folder}/parts")["tokens"] == 98 // 8 * 8
        for flags, says in (
            ([f"--data-dir={folder}/short"], "has 8 tokens, .* takes at least 9: give more text"),
            ([other, "--test-samples=125"], "there are only 124 windows"),
            ([], "does not say which text it is for: give --data-dir"),
        ):
            with pytest.raises(UserError, match=says):
                found("run/model", text, *flags)


@pytest.mark.mpi
def test_the_file_of_a_tokenizer_may_be_gone_after_the_run(monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {letter: number for number, letter in enumerate(sorted(set(TEXT)))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    with run_folder() as folder:
        monkeypatch.chdir(folder)
        data, file = write(folder / "text", TEXT), write(folder / "own.json", made.to_str())
        train(folder, "run", data, tokenizer="own.json")
        if WORLD.rank == 0:
            file.unlink()
            export(export_program.parse([str(folder / "run"), f"--model={MODEL}", "--repeat=0"]))
        WORLD.Barrier()
        flags, moved = ("--model", MODEL, "--json=found"), ("--dataset=text", f"--data-dir={data}")
        for network in (["run"], ["run/model", *moved]):
            assert evaluate(WORLD, parse([*network, *flags]), Heartbeat()) == 0
        summary = json.loads((folder / "run/summary.json").read_text())
        assert evaluate(WORLD, parse(["run", *flags]), Heartbeat()) == 0
        WORLD.Barrier()
        told = json.loads((folder / "found").read_text())
        assert told["loss"] == pytest.approx(summary["test_loss"], rel=1e-6)
        write(folder / "run/tokenizer.json", made.to_str(pretty=True))
        with pytest.raises(UserError, match="is not the file any more"):
            evaluate(WORLD, parse(["run", *flags]), Heartbeat())


@pytest.mark.parametrize(("batch", "sizes"), [(2, [2, 2, 1]), (256, [5])])
def test_so_many_windows_are_tested_at_once(batch, sizes):
    tokens = TextTokens(np.arange(41, dtype=np.uint8) % 8)
    shard, seen = Windows(tokens, range(0, 40, 8), 8), []

    def model(windows: torch.Tensor) -> torch.Tensor:
        seen.append(len(windows))
        return torch.zeros(*windows.shape, 8)

    sums = count_tokens(model, shard, Tokens(8, 8), torch.device("cpu"), batch, Heartbeat())
    assert seen == sizes
    assert sums.tolist() == pytest.approx([40 * math.log(8), 40])


@pytest.mark.mpi
def test_weights_of_other_tokens_are_refused_and_those_of_the_same_taken():
    with run_folder() as folder:
        data = write(folder / "text", TEXT)
        train(folder, "run", data)
        # As many characters, but others.
        other = write(folder / "other", TEXT.replace("t", "z"))
        with pytest.raises(UserError, match="knows other tokens than the text has"):
            train(folder, "next", other, init_from=str(folder / "run"))
        with pytest.raises(UserError, match="knows other classes"):
            train(folder, "next", other, teacher=str(folder / "run"))
        with pytest.raises(UserError, match="knows other tokens than the text has"):
            train(folder, "next", data, init_from=str(folder / "run"), tokenizer="bytes")
        run = str(folder / "run")
        train(folder, "next", data, init_from=run, teacher=run)
        if WORLD.rank == 0:
            began = json.loads((folder / "next/initial.json").read_text())
            ended = json.loads((folder / "run/summary.json").read_text())
            assert began["test_loss"] == pytest.approx(ended["test_loss"], rel=1e-6)


# --------------------------------------------------------------------------------------------------
# Continuing a text
# --------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Has the sum of what it reads follow, modulo 7; logit 8 is beyond the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.seen: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(tokens.shape[1])
        logits = nn.functional.one_hot(tokens.cumsum(dim=1) % 7, 9) * self.scale
        logits[..., 8] = 100.0
        return logits


def test_the_likeliest_token_follows_what_fits_into_the_context():
    model, inputs = Counting(), Tokens(vocabulary=8, context=3)
    assert generate(model, inputs, [1, 2], Sampling(4, 0, 0), Heartbeat()) == [3, 6, 4, 6]
    assert model.seen == [2, 3, 3, 3]


def test_a_seed_gives_the_same_tokens_by_their_shares():
    model, inputs = Counting(), Tokens(vocabulary=8, context=1)
    draw = lambda seed: generate(model, inputs, [0], Sampling(400, 2.0, seed), Heartbeat())  # noqa: E731
    tokens = draw(1)
    assert tokens == draw(1) != draw(2)
    # Each repeats the one before with e^(1/2) to 1 for each of 7 others; 7 becomes 0.
    again = [b == a % 7 for a, b in pairwise(tokens)]
    share = torch.softmax(torch.tensor([0.5] + 7 * [0.0]), dim=0)[0]
    assert sum(again) / len(again) == pytest.approx(float(share), abs=0.08)


@pytest.mark.parametrize("tokenizer", [Tokenizer("bytes", 256), Tokenizer("chars", 4, " abé")])
def test_a_text_comes_back_from_its_tokens(tokenizer):
    assert decode(tokenizer, encode(tokenizer, "é ba")) == "é ba"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--seed 1", "--seed is of a continuation: give --prompt TEXT too"),
        ("--prompt a --test-samples 4", "--test-samples is of a test, and --prompt is none"),
        ("--prompt a --batch-size 256", "--batch-size is of a test, and --prompt is none"),
        ("--prompt a --temperature -1", "--temperature must be from 0"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, text):
    with pytest.raises(UserError, match=text):
        parse(["run", *flags.split()])


def test_a_run_answers(capsys, tmp_path):
    data = tmp_path / "text"
    data.write_text("abcd abcd\n" * 60)
    run = str(tmp_path / "run")
    assert run_job_here(make(**TINY, data_dir=str(data), run_dir=run)) == 0
    capsys.readouterr()
    found = tmp_path / "found.json"
    flags = [run, "--model", MODEL, "--prompt", "abc", "--tokens", "5", "--json", str(found)]
    assert program.main(flags) == 0
    told = json.loads(found.read_text())
    assert len(told["continuation"]) == 5 and list(told["seconds_per_token"]) == ["now"]
    printed = capsys.readouterr().out
    assert printed.startswith("abc" + told["continuation"]) and "ms per token" in printed
