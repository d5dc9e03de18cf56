"""GGUF files, read by the package `gguf` and by transformers' own reader of them."""

from pathlib import Path

import pytest
import torch
from pruned_text import CHARS, WINDOWS, built, pruned
from text_nets import TOKENS
from tokenizers import Tokenizer as Encoder
from tokenizers import models, pre_tokenizers

from prunex_mpi.base.errors import UserError
from prunex_mpi.data.text_files import Tokenizer, read_tokenizer
from prunex_mpi.tools.gguf_file import write_gguf
from prunex_mpi.tools.huggingface import convert

gguf = pytest.importorskip("gguf")

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def tokenizer_file(folder: Path, cut: object = BYTE_LEVEL, ends: bool = True) -> Tokenizer:
    """Write a tokenizer of three tokens, and one that ends text."""
    encoder = Encoder(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    encoder.pre_tokenizer = cut
    encoder.add_special_tokens(["<|end|>"] * ends)
    encoder.save(str(folder / "tokenizer.json"))
    return read_tokenizer(str(folder / "tokenizer.json"))[0]


@torch.no_grad()
@pytest.mark.parametrize(("name", "count"), [("our_llama", 21), ("qwen2", 27)])
def test_a_reader_of_others_finds_the_same_network(name, count, tmp_path):
    from transformers import AutoModelForCausalLM

    network = convert(pruned(built(name))[0], TOKENS)
    network.save_pretrained(tmp_path / "transformers")
    line = write_gguf(tmp_path, tokenizer_file(tmp_path))
    assert f"{count} tensors" in line
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert torch.equal(found(WINDOWS).logits, network(WINDOWS).logits)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    of = {key.removeprefix("tokenizer.ggml."): field.contents() for key, field in fields.items()}
    assert of["tokens"] == ["a", "b", "ab", "<|end|>", *(f"[PAD{n}]" for n in range(4, 19))]
    assert of["token_type"] == [1, 1, 1, 3, *[5] * 15]
    assert (of["merges"], of["pre"], of["eos_token_id"]) == (["a b"], "gpt-2", 3)


@pytest.mark.parametrize(
    ("name", "tokenizer", "reason"),
    [
        ("llama", lambda folder: CHARS, "no vocabulary of characters"),
        ("gpt2", tokenizer_file, "GELU llama.cpp approximates"),
        ("llama", lambda folder: tokenizer_file(folder, pre_tokenizers.Digits()), "byte-level BPE"),
        ("our_llama", lambda folder: tokenizer_file(folder, ends=False), "which token ends text"),
    ],
)
def test_what_llama_cpp_has_not_is_refused(name, tokenizer, reason, tmp_path):
    convert(built(name), TOKENS).save_pretrained(tmp_path / "transformers")
    with pytest.raises(UserError, match=f"--gguf: .*{reason}"):
        write_gguf(tmp_path, tokenizer(tmp_path))
