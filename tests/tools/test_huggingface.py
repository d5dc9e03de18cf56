"""Folders that transformers loads, read by a process that does not know this package."""

import json

import pytest
import torch
from launch import run_python
from pruned_text import BYTES, CHARS, WINDOWS, built, pruned
from text_nets import TOKENS, Logits, ours

from prunex_mpi.base.errors import UserError
from prunex_mpi.data.text_files import UNKNOWN, Tokenizer, read_tokenizer
from prunex_mpi.tools.huggingface import (
    as_encoder,
    convert,
    encode,
    what_differs,
    write_transformers,
)

TEXT = "a bad\nhead é?"
# Prints what each folder's network and tokenizer make.
READER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
job = json.loads(sys.argv[1])
for folder in job["folders"]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor(job["tokens"])
    with torch.no_grad():
        logits = model(tokens).logits.tolist()
    text = tokenizer.encode(job["text"])
    given = {"inputs": tokens[:1, :4], "attention_mask": torch.ones(1, 4)}
    made = model.generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=0)
    text = [text, tokenizer.decode(text)]
    print(json.dumps([type(model).__name__, logits, made[0].tolist(), *text]))
assert "prunex_mpi" not in sys.modules
"""


def tokenizer_of(name: str) -> Tokenizer:
    """Return what stands beside a network; AutoTokenizer takes byte-level ones alone of Qwen2."""
    return BYTES if name == "qwen2" else CHARS


def read_elsewhere(folders: list[str], tokens: torch.Tensor, text: str) -> list[list[object]]:
    job = json.dumps({"folders": folders, "tokens": tokens.tolist(), "text": text})
    done = run_python(["-c", READER, job])
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@torch.no_grad()
def test_every_kind_goes_back_as_its_own_class(tmp_path):
    # A third of 32 channels is 11, which two heads do not divide.
    cases = [("llama_tied", 0.34), ("qwen2", 0.5), ("our_llama", 0.5)]
    cases += [("gpt2", None)]
    smaller = [pruned(built(name), keep)[0] if keep else built(name) for name, keep in cases]
    folders = []
    for (name, _), model in zip(cases, smaller, strict=True):
        line = write_transformers(tmp_path / name, model, WINDOWS, tokenizer_of(name), 0.0)
        assert "logits differ by at most" in line and "4 greedy tokens" in line
        folders.append(str(tmp_path / name / "transformers"))
    found = read_elsewhere(folders, WINDOWS, TEXT)
    kinds = [kind.removesuffix("ForCausalLM") for kind, *_ in found]
    assert kinds == ["Llama", "Qwen2", "Llama", "GPT2LMHeadModel"]
    every = zip(found, cases, smaller, strict=True)
    for (_, logits, made, text, decoded), (name, _), model in every:
        wanted, tokenizer = model(WINDOWS), tokenizer_of(name)
        limit = 1e-5 * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(torch.tensor(logits), wanted, rtol=0, atol=limit)
        greedy = WINDOWS[:1, :4]
        for _ in range(4):
            greedy = torch.cat([greedy, model(greedy)[:, -1:].argmax(dim=-1)], dim=1)
        assert made == greedy[0].tolist()
        assert text == encode(tokenizer, TEXT)
        assert decoded == (TEXT if tokenizer is BYTES else TEXT.replace("?", UNKNOWN))


@torch.no_grad()
def test_a_plain_class_of_the_smaller_widths_computes_something_else():
    model, sizes = pruned(built("llama"))
    (line,) = what_differs(sizes)
    assert line.startswith("5 norms")
    plain = convert(model, TOKENS)
    wanted = plain(WINDOWS).logits
    plain.load_state_dict(model.model.state_dict())
    assert float((plain(WINDOWS).logits - wanted).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: pruned(built("gpt2"))[0], "LayerNorm takes the mean of all channels"),
        (lambda: built("by_hand"), "no gpt_* and no language model"),
        (lambda: ours(19, 8), "gpt_*-rms-rotary-swiglu alone"),
        (lambda: ours(19, 8, "rotary", "gqa"), "gpt_*-rms-rotary-swiglu alone"),
        (
            lambda: pruned(built("llama"), layer="model.model.layers.1.mlp.gate_proj.weight")[0],
            "layers have 1 and 24 channels in up_proj.weight, and a config states one",
        ),
    ],
)
def test_what_no_class_computes_is_refused(model, reason):
    with pytest.raises(UserError, match="--transformers: ") as raised:
        convert(model(), TOKENS)
    assert reason in str(raised.value)


@pytest.mark.parametrize("name", ["our_llama", "gpt2"])
def test_windows_of_a_single_token_are_proved(name, tmp_path):
    line = write_transformers(tmp_path, built(name), WINDOWS[:, :1], CHARS, 0.0)
    assert "1 greedy tokens" in line


def test_a_tokenizer_that_becomes_another_is_refused(tmp_path):
    with pytest.raises(UserError, match="AutoTokenizer makes other tokens"):
        write_transformers(tmp_path, built("qwen2"), WINDOWS, CHARS, 0.0)


def test_a_tokenizer_with_damaged_files_beside_it_is_refused(tmp_path):
    as_encoder(BYTES).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    tokenizer = read_tokenizer(str(tmp_path / "tokenizer.json"))[0]
    with pytest.raises(UserError, match="AutoTokenizer can't load the tokenizer in"):
        write_transformers(tmp_path / "new", built("qwen2"), WINDOWS, tokenizer, 0.0, str(tmp_path))


def test_a_network_that_differs_is_refused(tmp_path):
    class Louder(Logits):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return 1.1 * super().forward(tokens)

    with pytest.raises(UserError, match="differs by"):
        write_transformers(tmp_path, Louder(built("llama").model), WINDOWS, CHARS, 0.0)
