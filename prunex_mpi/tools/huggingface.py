"""Write a language model as a folder that `transformers` loads: its own class, of smaller widths.

A config states one width for all layers of a kind, and norms of a class divide by it. Norms of a
pruned network go on dividing by the width that it had. With W that one and k the smaller one,

    w_i x_i / sqrt(sum x^2 / W + eps) = (sqrt(W / k) w_i) x_i / sqrt(sum x^2 / k + (W / k) eps)

so that other weights and another epsilon make up for RMSNorm. LayerNorm subtracts a mean as well.
"""

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import FAILURE, UserError, enumerated, one_line
from prunex_mpi.base.files import TOKENIZER
from prunex_mpi.data.text_files import (
    BYTES,
    UNKNOWN,
    Tokenizer,
    decode,
    encode,
    read_tokenizer,
)
from prunex_mpi.models.gpt import ROTARY_BASE, Gpt
from prunex_mpi.models.inputs import Tokens
from prunex_mpi.models.slim import NORM_FEATURES, SlimNorm
from prunex_mpi.models.standalone import Sizes

FLAG, FOLDER = "--transformers", "transformers"
# Of the largest logit, or of 1: what another order of sums makes in float32.
TOLERANCE = 1e-5
PROVED_WINDOWS = 8
# By key of a config: a weight that has as many rows (0) or columns (1), of heads one each.
HEADS = {"num_attention_heads": "q_proj.weight", "num_key_value_heads": "k_proj.weight"}
WIDTHS = {
    "hidden_size": ("embed_tokens.weight", 1),
    "intermediate_size": ("up_proj.weight", 0),
    "n_inner": ("c_fc.weight", 1),
    **{key: (name, 0) for key, name in HEADS.items()},
}
VOCABULARIES = ("embed_tokens.weight", "wte.weight", "lm_head.weight")
# Parts of our names, and of those of transformers.
LLAMA = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "queries": "q_proj",
    "keys": "k_proj",
    "values": "v_proj",
    "out": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def what_differs(sizes: Sizes) -> list[str]:
    """Return a line on norms of a network of these sizes that a plain class does not compute."""
    norms = sum(NORM_FEATURES in stated for stated in sizes.values())
    return [
        f"{norms} norms: they divide by the width before pruning; a plain class of the smaller "
        "widths takes the same weights and computes something else"
    ] * bool(norms)


def write_transformers(
    folder: Path,
    model: nn.Module,
    tokens: Tensor,
    tokenizer: Tokenizer,
    allowed: float,
    origin: str = "",
) -> str:
    """Write a folder that `transformers` loads; return a line: how far its network is off.

    `tokens` int64 [n, context] are windows that it is proved on, `allowed` is what rounding
    explains, `origin` the folder of `transformers` that training began with, "" for none. Raises
    UserError where no class of `transformers` is `model`, and where what was written computes
    something else.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = folder / FOLDER
    convert(model, Tokens(tokenizer.size, tokens.shape[1])).save_pretrained(place)
    _write_tokenizer(place, tokenizer, origin)
    # Read back as whoever loads the folder does.
    found = AutoModelForCausalLM.from_pretrained(place, local_files_only=True).float()
    proof = _prove(model, found, tokens[:PROVED_WINDOWS], allowed)
    text = decode(tokenizer, tokens[0].tolist())
    wanted = encode(tokenizer, text)
    reader = AutoTokenizer.from_pretrained(place, local_files_only=True)
    numbers = reader.encode(text, add_special_tokens=False)
    if numbers != wanted or reader.decode(numbers) != decode(tokenizer, wanted):
        raise _refused(
            f"AutoTokenizer makes other tokens of text beside a {type(found).__name__}, which it "
            "has a tokenizer of its own for: train with that one's tokenizer.json"
        )
    return f"{FOLDER}/: {type(found).__name__}, {proof}"


@torch.no_grad()
def _prove(model: nn.Module, network: nn.Module, tokens: Tensor, allowed: float) -> str:
    """Return how far logits are off, having compared greedy tokens; raise UserError (FAILURE)."""
    wanted = model(tokens).float()
    scale = float(wanted.abs().max())
    limit = max(allowed, TOLERANCE * max(1.0, scale))
    apart = float((network(tokens).logits - wanted).abs().max())
    if not apart <= limit:
        raise UserError(
            f"{FLAG}: the network differs by {apart:.2g} (of {scale:.2g}) from the one exported",
            FAILURE,
        )
    context = tokens.shape[1]
    given = max(1, context // 2)
    # Of a window of one token the one that follows.
    more = max(1, context - given)
    options = {"max_new_tokens": more, "do_sample": False, "pad_token_id": 0}
    prompt = tokens[:1, :given]
    made = network.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    count = made.shape[1] - given
    logits = model(made[:, :-1])[0, given - 1 :].float()
    chosen = logits.gather(1, made[0, given:, None])[:, 0]
    # Where two tokens are as close as rounding, either may be chosen.
    if not bool((logits.amax(dim=1) - chosen <= 2 * limit).all()):
        raise UserError(f"{FLAG}: the network does not generate the same tokens", FAILURE)
    return f"logits differ by at most {apart:.2g} (of {scale:.2g}), {count} greedy tokens by none"


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def convert(model: nn.Module, inputs: Tokens) -> nn.Module:
    """Return a language model as one of `transformers`, float32 on the CPU, in evaluation mode.

    `model` is or wraps a `Gpt` or a PreTrainedModel, of any widths that pruning has left. Rows of
    its vocabulary beyond that of `inputs`, which training leaves out, are cut off. Raises UserError
    where no class of `transformers` is that network.
    """
    source = _language_model(model)
    norms = {name: m for name, m in source.named_modules() if isinstance(m, SlimNorm)}
    if any(norm.centred for norm in norms.values()):
        raise _refused(
            "LayerNorm takes the mean of all channels, those that were removed among them, for "
            "which no weights of a smaller one make up: train a network with RMSNorm (gpt_*-rms-"
            "rotary-swiglu, Llama, Qwen2), or one that is not pruned"
        )
    ours = isinstance(source, Gpt)
    if ours:
        kind, config, tensors = _of_gpt(source, inputs.context)
    else:
        kind, config = type(source), copy.deepcopy(source.config)
        tensors = dict(source.state_dict())
    for name, tensor in tensors.items():
        if name.endswith(VOCABULARIES):
            tensors[name] = tensor[: inputs.vocabulary]
    config.vocab_size = min(config.vocab_size, inputs.vocabulary)
    _set_widths_(config, tensors)
    before = config.hidden_size
    # The width becomes a multiple of the heads: the channels that it is rounded up by are zeros.
    _fold_(config, tensors, {_rename(n, LLAMA if ours else {}): norms[n] for n in norms})
    try:
        network = kind(config)
    # A config checks what it is given, and raises errors of its own.
    except Exception as error:
        raise _refused(f"a {kind.__name__} can't have its widths ({one_line(error)})") from None
    state = network.state_dict()
    for tensor in state.values():
        tensor.zero_()
    for name, tensor in tensors.items():
        place = state[name] if name in state else torch.empty(0)
        fits = [
            n == m or (n, m) == (before, config.hidden_size)
            for n, m in zip(tensor.shape, place.shape, strict=False)
        ]
        if tensor.dim() != place.dim() or not all(fits):
            raise _refused(
                f"a {kind.__name__} has no layers of such widths: {name} is {list(tensor.shape)}, "
                f"not {list(place.shape)}"
            )
        place[tuple(map(slice, tensor.shape))] = tensor
    network.eval()
    return network


def _refused(reason: str) -> UserError:
    return UserError(f"{FLAG}: {reason}")


def _language_model(model: nn.Module) -> nn.Module:
    """Return the `Gpt` or the language model of `transformers` that `model` is or wraps."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, Gpt):
            return module
        if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
            return module
    raise _refused("the network is no gpt_* and no language model of transformers: leave it out")


def _of_gpt(source: Gpt, context: int) -> tuple[type[nn.Module], Any, dict[str, Tensor]]:
    """Return the class that a network of ours is, its config of other widths, and its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    block = source.blocks[0]
    layer_norm = isinstance(source.norm, nn.LayerNorm)
    if layer_norm or source.rotation is None or block.mlp.gate is None:
        raise _refused(
            "of gpt_* transformers has gpt_*-rms-rotary-swiglu alone, which is a Llama, also with "
            "-gqa and -untied: train that one"
        )
    config = LlamaConfig(
        vocab_size=len(source.embedding.weight),
        tie_word_embeddings=source.head.weight is source.embedding.weight,
        num_hidden_layers=len(source.blocks),
        head_dim=block.attention.head_dim,
        max_position_embeddings=context,
        rms_norm_eps=source.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        # Of transformers' defaults some are tokens of other vocabularies.
        bos_token_id=None,
        eos_token_id=None,
    )
    tensors = {_rename(name, LLAMA): tensor for name, tensor in source.state_dict().items()}
    return LlamaForCausalLM, config, tensors


def _rename(name: str, parts: Mapping[str, str]) -> str:
    return ".".join(parts.get(part, part) for part in name.split("."))


def _set_widths_(config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give `config` the widths of `tensors`; raise UserError where a kind of layers has several."""
    # It follows from widths that change here, unless it is stated.
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    for key, (weight, dim) in WIDTHS.items():
        sizes = {t.shape[dim] for name, t in tensors.items() if name.endswith(f".{weight}")}
        if len(sizes) > 1:
            raise _refused(
                f"layers have {enumerated(sorted(map(str, sizes)))} channels in {weight}, and a "
                "config states one number for all: train with --keep-by groups, which keeps as "
                "many in each layer"
            )
        for size in sizes:
            setattr(config, key, size // head_dim if key in HEADS else size)
            if key in HEADS:
                config.head_dim = head_dim


def _fold_(config: Any, tensors: dict[str, Tensor], norms: Mapping[str, SlimNorm]) -> None:
    """Let norms divide by the width in `config`, which becomes a multiple of the heads."""
    widths = {(norm.width, norm.eps) for norm in norms.values()}
    if len(widths) > 1:
        raise _refused("its norms are of several widths, and a config has one for all of them")
    for full, eps in widths:
        heads = config.num_attention_heads
        config.hidden_size = -(-config.hidden_size // heads) * heads
        config.rms_norm_eps = eps * full / config.hidden_size
        for name in norms:
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * math.sqrt(
                full / config.hidden_size
            )


# --------------------------------------------------------------------------------------------------
# Tokenizers
# --------------------------------------------------------------------------------------------------


def as_encoder(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer as one of the package `tokenizers`."""
    if tokenizer.digest:
        return read_tokenizer(tokenizer.name)[1]
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Encoder

    if tokenizer.name == BYTES:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        encoder = Encoder(models.BPE({c: byte for byte, c in bytes_to_unicode().items()}, []))
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoder.decoder = decoders.ByteLevel()
        return encoder
    vocabulary = {character: n for n, character in enumerate(tokenizer.characters)}
    encoder = Encoder(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    encoder.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    encoder.decoder = decoders.Fuse()
    return encoder


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, origin: str) -> None:
    """Write what AutoTokenizer loads: the tokenizer in the folder `origin` if it is that one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = os.path.join(origin, TOKENIZER)
    if origin and os.path.exists(file) and read_tokenizer(file)[0].digest == tokenizer.digest:
        # With names of special tokens, and a template of chats.
        how = {"local_files_only": True, "trust_remote_code": False}
        try:
            found = AutoTokenizer.from_pretrained(origin, **how)
        # Other files beside it may be damaged, or ask for code.
        except Exception as error:
            raise _refused(
                f"AutoTokenizer can't load the tokenizer in {origin} ({one_line(error)}): save it "
                "there again"
            ) from None
        found.save_pretrained(folder)
        return
    encoder = as_encoder(tokenizer)
    options = {"clean_up_tokenization_spaces": False}
    PreTrainedTokenizerFast(tokenizer_object=encoder, **options).save_pretrained(folder)
