"""A model that transformers has saved is trained, pruned and delivered, with its tokenizer."""

import pytest
import torch
from jobs import run_folder, run_job_here
from nodes import WORLD
from tokenizers import Tokenizer, models, pre_tokenizers

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.export import parse
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images, Tokens
from prunex_mpi.run.pretrained import read_initial
from prunex_mpi.tools.export_run import export

transformers = pytest.importorskip("transformers")

RUN = {"context": 8, "batch_size": 4, "local_steps": 2, "outer_iterations": 4, "test_samples": 16}
RUN |= {"warmup_iterations": 1, "keep_ramp_iterations": 1, "freeze_iteration": 3}


def save(folder: str, **options: object) -> transformers.PreTrainedModel:
    """Save a network of 260 tokens, and a tokenizer of fewer, which names the one that ends."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    encoder = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(letters))}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.add_special_tokens(["<|end|>"])
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=encoder, eos_token="<|end|>")
    found.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=260, eos_token_id=256, **sizes, **heads)
    )
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.mpi
@pytest.mark.any_mpi
@pytest.mark.two_ranks
def test_a_saved_model_is_trained_and_delivered(capsys):
    with run_folder() as folder:
        if WORLD.rank == 0:
            save(f"{folder}/saved", max_shard_size="30KB")
            assert len(list((folder / "saved").glob("*.safetensors"))) > 1
        WORLD.Barrier()
        settings = make(**RUN, model=f"hf:{folder}/saved", run_dir=f"{folder}/run", progress="off")
        assert settings.dataset == "text" and settings.groups == ("coupled",)
        assert run_job_here(settings) == 0
        if WORLD.rank == 0:
            assert read_initial(folder / "run")["from"] == f"{folder}/saved"
            export(parse([f"{folder}/run", "--repeat", "0", "--transformers"]))
            found = folder / "run/model/transformers"
            assert transformers.AutoTokenizer.from_pretrained(found).eos_token == "<|end|>"
            model = transformers.AutoModelForCausalLM.from_pretrained(found)
            config = model.config
            widths = config.hidden_size, config.intermediate_size, config.vocab_size
            assert widths == (16, 24, 257)


@torch.no_grad()
def test_the_weights_are_those_that_were_saved(tmp_path):
    saved = save(str(tmp_path))
    settings = make(**RUN, model=f"hf:{tmp_path}")
    assert settings.init_from == str(tmp_path)
    assert settings.tokenizer == f"{tmp_path}/tokenizer.json"
    model = build_model(settings.model, Tokens(257, 8))
    model.network.load_state_dict(saved.state_dict())
    tokens = torch.randint(257, (2, 8))
    torch.testing.assert_close(model(tokens), saved(tokens).logits[..., :257])


def test_another_tokenizer_than_that_of_the_weights_is_refused(tmp_path):
    save(str(tmp_path / "saved"))
    model = {"model": f"hf:{tmp_path}/saved"}
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes((tmp_path / "saved/tokenizer.json").read_bytes())
    assert make(**RUN, **model, tokenizer=str(copy)).tokenizer == str(copy)
    # Fresh weights go with any.
    assert make(**RUN, **model, tokenizer="bytes", init_from="").init_from == ""
    with pytest.raises(UserError, match=r"--tokenizer bytes is not .*, which the weights are of"):
        make(**RUN, **model, tokenizer="bytes")


def test_what_is_no_such_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config.json can't be read .*save_pretrained"):
        build_model(f"hf:{tmp_path}", Tokens(257, 8))
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"config.json can't be read .*save_pretrained"):
        build_model(f"hf:{tmp_path}", Tokens(257, 8))
    with pytest.raises(UserError, match="reads text: give --dataset text"):
        build_model(f"hf:{tmp_path}", Images(8, 10))
