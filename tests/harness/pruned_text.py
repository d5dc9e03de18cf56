"""Networks that read tokens, pruned by drawn masks of one keep ratio, and tokenizers for them."""

import numpy as np
import torch
from masking import mask_
from odd_models import randomise_
from text_nets import TOKENS
from torch import nn

from prunex_mpi.data.text_files import UNKNOWN, Tokenizer
from prunex_mpi.models.build import build_model
from prunex_mpi.models.standalone import Sizes
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.shrink import shrink, smaller_sizes

CHARS = Tokenizer("chars", TOKENS.vocabulary, "\n abcdefghijklmnoé" + UNKNOWN)
BYTES = Tokenizer("bytes", 256)
WINDOWS = TOKENS.draw(3, torch.float32)


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(f"text_nets:{name}", TOKENS).eval()
    randomise_(model)
    return model


def pruned(model: nn.Module, keep: float = 0.5, layer: str = "") -> tuple[nn.Module, Sizes]:
    """Return a network that keeps as many groups of each set, or fewer of one, and its sizes."""
    coupling = find_coupling(model, TOKENS)
    removed, rng = np.ones(coupling.total, dtype=bool), np.random.default_rng(0)
    for s in coupling.sets:
        left = 1 if s.name == layer else int(np.ceil(keep * s.count))
        removed[s.start + rng.permutation(s.count)[:left]] = False
    mask_(model, coupling, removed)
    return shrink(model, coupling, removed), smaller_sizes(model, coupling, removed)
