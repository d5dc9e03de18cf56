"""Networks that predict the next token become smaller files."""

import json

import pytest
import torch
from jobs import run_job_here

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.export import parse
from prunex_mpi.models import standalone
from prunex_mpi.tools.export_run import export

MODEL, CONTEXT = "tiny_text:gpt", 8
RUN = {"dataset": "text", "tokenizer": "bytes", "model": MODEL, "context": CONTEXT}
RUN |= {"batch_size": 4, "local_steps": 2, "outer_iterations": 6, "test_samples": 16}
RUN |= {"warmup_iterations": 1, "keep_ramp_iterations": 1, "freeze_iteration": 4}
RUN |= {"groups": ("coupled",), "progress": "off"}


@pytest.mark.parametrize("onnx", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_pruned_transformer_is_exported(onnx, capsys, tmp_path):
    run = tmp_path / "run"
    assert run_job_here(make(**RUN, run_dir=str(run))) == 0
    capsys.readouterr()
    flags = ["--model", MODEL, "--repeat", "1", "--torch-export", "--transformers"]
    # A format that can't be written costs none of the rest.
    with pytest.raises(UserError, match="--transformers: LayerNorm takes the mean of all"):
        export(parse([str(run), *flags, *(["--onnx"] if onnx else [])]))
    assert not (run / "model/transformers").exists()
    told = capsys.readouterr().out
    assert f"on {16 * CONTEXT} test tokens the outputs differ" in told
    assert "tokens/s" in told and "tokens alone" not in told
    model = standalone.load(run / "model")
    plan = json.loads((run / "model/plan.json").read_text())
    assert plan["layers"]["head"] == {"weight": [256, 8]}
    assert plan["test_perplexity"] > 1
    assert model.head.weight is model.embedding.weight
    # Windows may be shorter, of any number.
    tokens = torch.randint(256, (3, 5))
    program = torch.export.load(run / "model/model.pt2").module()
    torch.testing.assert_close(program(tokens), model(tokens))


def test_a_pruned_llama_is_written_for_others(capsys, tmp_path):
    run = tmp_path / "run"
    assert run_job_here(make(**{**RUN, "model": "text_nets:our_llama"}, run_dir=str(run))) == 0
    capsys.readouterr()
    flags = [str(run), "--model", "text_nets:our_llama", "--repeat", "0"]
    export(parse([*flags, "--gguf"]))
    told = capsys.readouterr().out
    assert "5 norms: they divide by the width before pruning" in told
    assert "transformers/: LlamaForCausalLM, logits differ by at most" in told
    assert "model.gguf: llama" in told and "read back equal" in told
    config = json.loads((run / "model/transformers/config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"]) == (16, 2)
    # The next export takes both away, and says so.
    export(parse(flags))
    assert "gone: model.gguf, transformers of the export before" in capsys.readouterr().out
