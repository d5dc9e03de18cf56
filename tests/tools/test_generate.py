"""How a language model continues a text."""

import json
from itertools import pairwise

import pytest
import torch
from jobs import run_job_here
from torch import nn

from prunex_mpi import evaluate as program
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.config.resolve import make
from prunex_mpi.data.text_files import Tokenizer, decode, encode
from prunex_mpi.models.inputs import Tokens
from prunex_mpi.tools.evaluate_options import parse
from prunex_mpi.tools.generate import Sampling, generate

MODEL = "tiny_text:gpt"
RUN = {"method": "dense", "dataset": "text", "tokenizer": "chars", "model": MODEL, "context": 8}
RUN |= {"batch_size": 4, "local_steps": 3, "outer_iterations": 2, "progress": "off"}


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
    assert run_job_here(make(**RUN, data_dir=str(data), run_dir=run)) == 0
    capsys.readouterr()
    found = tmp_path / "found.json"
    flags = [run, "--model", MODEL, "--prompt", "abc", "--tokens", "5", "--json", str(found)]
    assert program.main(flags) == 0
    told = json.loads(found.read_text())
    assert len(told["continuation"]) == 5 and list(told["seconds_per_token"]) == ["now"]
    printed = capsys.readouterr().out
    assert printed.startswith("abc" + told["continuation"]) and "ms per token" in printed
