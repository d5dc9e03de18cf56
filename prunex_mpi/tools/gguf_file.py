"""Write a language model of `transformers` as one GGUF file, which llama.cpp and its kin run.

Weights stay float32. Names come from the package `gguf`. What llama.cpp's converter does beyond
names is done here: in llama.cpp a Llama turns channels 2i and 2i + 1 of a head together, where one
of `transformers` turns i and i + d/2, and a vocabulary is a list of tokens and one of merges.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from prunex_mpi.base.errors import FAILURE, UserError
from prunex_mpi.data.text_files import BYTES, Tokenizer
from prunex_mpi.tools.huggingface import FOLDER, as_encoder

FLAG, NAME = "--gguf", "model.gguf"
# By model_type of a config: whether the rows of queries and keys take the other order.
PERMUTED = {"llama": True, "qwen2": False}
# llama.cpp's names of how text is cut before it becomes tokens, by the patterns of tokenizer files.
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {LETTERS + OTHERS: "qwen2", LETTERS + "{1,3}" + OTHERS: "llama-bpe"}
GPT2_PATTERN = "gpt-2"
# llama.cpp asks for merges where there are none: this one is of no two tokens.
NO_MERGE = "<none> <none>"
# The byte that ends text where it has no token for that.
NUL = 0


def write_gguf(folder: Path, tokenizer: Tokenizer) -> str:
    """Write model.gguf of the network in its folder of `transformers`; return a line about it.

    Weights are float32, and read back. Raises UserError for what llama.cpp computes otherwise or
    has no vocabulary for.
    """
    import gguf
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder / FOLDER, local_files_only=True).float()
    config, path = network.config, folder / NAME
    kind = config.model_type
    if kind not in PERMUTED:
        reason = ", whose GELU llama.cpp approximates" if kind == "gpt2" else ""
        raise _refused(f"it takes Llama and Qwen2, and this is {type(network).__name__}{reason}")
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" or getattr(config, "sliding_window", None):
        raise _refused("its rotary positions are scaled, or its windows slide: export without it")
    writer = gguf.GGUFWriter(path, kind)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config.head_dim)
    _add_vocabulary(writer, tokenizer, config)
    tensors = _tensors(network)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    same = {name: np.array_equal(found.get(name), tensor) for name, tensor in tensors.items()}
    if found.keys() != tensors.keys() or not all(same.values()):
        raise UserError(f"{path} reads back otherwise than it was written", FAILURE)
    return f"{NAME}: {kind}, {len(found)} tensors, read back equal"


def _refused(reason: str) -> UserError:
    return UserError(f"{FLAG}: {reason}")


def _tensors(network: nn.Module) -> dict[str, np.ndarray]:
    """Return the weights by llama.cpp's names."""
    import gguf

    config = network.config
    (arch,) = (a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for key, tensor in network.state_dict().items():
        layer = key.split(".")[-2]
        # llama.cpp takes the embedding where there is no output layer.
        if layer == "lm_head" and config.tie_word_embeddings:
            continue
        if layer in heads and PERMUTED[config.model_type]:
            tensor = _in_pairs(tensor, heads[layer])
        tensors[names.get_name(key, (".weight", ".bias"))] = tensor.contiguous().numpy()
    return tensors


def _in_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Return rows of heads, channels i and i + d/2 of each one after the other."""
    halves = tensor.view(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _add_vocabulary(writer: Any, tokenizer: Tokenizer, config: Any) -> None:
    """Add tokens, merges, and the token that ends text; raise UserError where llama.cpp can't."""
    import gguf

    if not (tokenizer.digest or tokenizer.name == BYTES):
        raise _refused(
            "llama.cpp has no vocabulary of characters that takes any other: train with "
            "--tokenizer bytes, or a tokenizer.json"
        )
    encoder = as_encoder(tokenizer)
    stated = json.loads(encoder.to_str())
    merges = [m if isinstance(m, str) else " ".join(m) for m in stated["model"].get("merges", [])]
    tokens = [f"[PAD{number}]" for number in range(config.vocab_size)]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, number in encoder.get_vocab(with_added_tokens=True).items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    ends = config.eos_token_id if tokenizer.digest else NUL
    for added in stated["added_tokens"]:
        special = added["special"]
        types[added["id"]] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        ends = added["id"] if special and ends is None else ends
    if type(ends) is not int:
        raise _refused("llama.cpp asks which token ends text: give its config an eos_token_id")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(GPT2_PATTERN if tokenizer.name == BYTES else _pattern(stated))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges or [NO_MERGE])
    writer.add_bos_token_id(ends)
    writer.add_eos_token_id(ends)
    writer.add_add_bos_token(False)


def _pattern(stated: dict[str, Any]) -> str:
    """Return llama.cpp's name of how a tokenizer file cuts text; raise UserError for others."""
    cuts = stated["pre_tokenizer"] or {}
    first, *rest = cuts.get("pretokenizers", [cuts])
    last = rest[-1] if rest else first
    byte_level = last.get("type") == "ByteLevel" and not last["add_prefix_space"]
    if byte_level and stated["model"]["type"] == "BPE":
        if not rest and last["use_regex"]:
            return GPT2_PATTERN
        pattern = first.get("pattern", {}).get("Regex")
        if len(rest) == 1 and not last["use_regex"] and pattern in PATTERNS:
            return PATTERNS[pattern]
    raise _refused(
        "of tokenizer files it takes byte-level BPE that cuts text as GPT-2, Llama 3 or Qwen2 do"
    )
