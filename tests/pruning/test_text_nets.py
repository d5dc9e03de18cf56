"""Coupled groups of networks that read tokens: heads, MLP units, and the width of the stream."""

from functools import cache

import numpy as np
import pytest
import torch
from masking import draw, exported, mask_, plan_of
from odd_models import randomise_
from text_nets import FACTORIES, OURS, TOKENS, Logits
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from prunex_mpi.models import standalone
from prunex_mpi.models.build import build_model, describe
from prunex_mpi.models.layout import build_layout
from prunex_mpi.models.slim import SlimNorm, as_rms_norm, doubled
from prunex_mpi.pruning.coupling import Coupling, find_coupling
from prunex_mpi.pruning.groups import find_groups
from prunex_mpi.pruning.projection import group_squared_norms, select, with_budget
from prunex_mpi.pruning.removable import find_removable, find_tried
from prunex_mpi.pruning.shrink import shrink, sizes_in_all, smaller_sizes

EXACT = 1e-9
# Of what travels at keep 0.5: the vocabulary stays, where a matrix of both its sides keeps 0.25.
MOST_LEFT = 0.3


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name, TOKENS).eval()


@cache
def coupling_of(name: str) -> Coupling:
    """Return which channels of a network go together, found once for all tests."""
    return find_tried(build(name), TOKENS)


NAMES = [
    *(pytest.param(name, marks=pytest.mark.long) for name in OURS[:-1]),
    *OURS[-1:],
    *FACTORIES,
]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_computes_the_same(name, tmp_path):
    coupling, model = coupling_of(name), build(name)
    randomise_(model)
    removed = draw(coupling)
    mask_(model, coupling, removed)
    tokens = TOKENS.draw(3, torch.float32)
    verdict = find_removable(model, coupling, tokens)
    assert np.array_equal(verdict.removed, removed)
    wanted = doubled(model)(tokens)
    assert float((wanted[0] - wanted[1]).abs().max()) > 1e-3
    sizes = smaller_sizes(model, coupling, removed)
    smaller = exported(tmp_path, model, coupling, removed, model=describe(name, TOKENS))
    found = doubled(smaller)(tokens)
    limit = EXACT * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit)
    # What was shared still is, and shorter windows do as well.
    assert len(list(smaller.parameters())) == len(list(model.parameters()))
    short = tokens[:, :5]
    torch.testing.assert_close(doubled(smaller)(short), doubled(model)(short), rtol=0, atol=limit)
    # In training it becomes smaller once more.
    again = find_tried(smaller, TOKENS)
    second = draw(again)
    mask_(smaller, again, second)
    last = shrink(smaller, again, second)
    torch.testing.assert_close(doubled(last)(tokens), doubled(smaller)(tokens), rtol=0, atol=limit)
    whole = build(name)
    standalone.resize_(whole, sizes_in_all(smaller, sizes, again, second))
    assert [p.shape for p in whole.parameters()] == [p.shape for p in last.parameters()]


@pytest.mark.parametrize("name", [*OURS, *FACTORIES])
def test_half_of_the_groups_leave_little_more_than_a_quarter(name):
    model = build(name)
    coupling = find_coupling(model, TOKENS)
    layout = build_layout(model)
    groups = find_groups(model, layout, ("coupled",), (0.5,), coupling=coupling)
    assert all("the network's" in reason for reason in groups.excluded)
    scores = group_squared_norms(torch.randn(layout.numel), layout, groups, groups.kinds[0]).numpy()
    plan = plan_of(layout, groups, select(scores, groups.kinds[0], 1.0), torch.device("cpu"))
    assert plan.numel <= MOST_LEFT * layout.numel
    budget = with_budget(groups, layout, "parameters", 0.0)
    mask = select(scores, budget.kinds[0], 1.0)
    plan = plan_of(layout, budget, mask, torch.device("cpu"))
    assert plan.numel < layout.numel


class Reentrant(nn.Module):
    """A block of transformers whose activations are computed again, whatever the mode."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, **options: object) -> torch.Tensor:
        return checkpoint(lambda x: self.block(x, **options), x, use_reentrant=True)


class Caching(Logits):
    """A model that keeps keys and values for tokens that never come, as is its default."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).logits


@torch.no_grad()
@pytest.mark.parametrize(("kind", "block"), [(Caching, checkpoint_wrapper), (Logits, Reentrant)])
def test_a_cache_and_checkpoints_of_activations_cost_no_channels(kind, block):
    """Torch wraps blocks under other names, but not those of the state dict."""
    model = kind(build("text_nets:llama").model)
    layers = model.model.model.layers
    model.model.model.layers = nn.ModuleList(map(block, layers))
    coupling = find_tried(model, TOKENS)
    assert coupling.total == coupling_of("text_nets:llama").total
    removed = draw(coupling)
    mask_(model, coupling, removed)
    smaller = shrink(model, coupling, removed)
    tokens = TOKENS.draw(2, torch.float32)
    torch.testing.assert_close(doubled(smaller)(tokens), doubled(model)(tokens))


def test_queries_go_with_the_keys_and_values_that_they_share():
    model = build("gpt_nano-gqa-rotary")
    coupling = find_coupling(model, TOKENS)
    heads = next(s for s in coupling.sets if s.name.endswith("0.attention.queries.weight"))
    assert (heads.count, heads.unit) == (2, 64)
    rows = [coupling.rows[f"blocks.0.attention.{n}.weight"] for n in ("queries", "keys", "values")]
    starts = [np.unique(ids, return_counts=True)[1].tolist() for ids in rows]
    assert starts == [[64, 64], [32, 32], [32, 32]]


def test_norms_are_recognised_by_what_they_compute():
    class Centred(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(-1, keepdim=True))

    for eps in (None, 1e-5, 1e-6):
        norm = as_rms_norm(nn.RMSNorm(6, eps=eps))
        assert norm.eps == eps
    assert as_rms_norm(nn.LayerNorm(6, bias=False)) is None
    assert as_rms_norm(Centred(6)) is None
    assert as_rms_norm(nn.PReLU(6)) is None
    x = torch.randn(2, 6) * 1e-3
    half = nn.RMSNorm(6, eps=1e-5).bfloat16()
    for norm, given in ((nn.RMSNorm(6), x), (half, x.bfloat16())):
        torch.testing.assert_close(as_rms_norm(norm)(given), norm(given))
    slim = SlimNorm.fitting(nn.RMSNorm(6), 4)
    torch.testing.assert_close(slim(x[:, :4]), nn.RMSNorm(6)(padded(x[:, :4]))[:, :4])


def padded(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x, torch.zeros(len(x), 2)), dim=1)
