"""Gates: the loss's derivative by a factor on each channel, and what a channel costs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.groups import Groups, find_groups
from prunex_mpi.pruning.masks import kept_numel
from prunex_mpi.pruning.projection import (
    cost,
    gate_gradients,
    select,
    shares_of_budget,
    with_budget,
)

SIDE = 8


class Depthwise(nn.Module):
    """Channels that only a convolution in groups and a linear layer behind it read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.fc(F.relu(self.deep(x)).mean(dim=(2, 3)))


class Turned(nn.Module):
    """A weight whose rows are what it reads and whose columns are what it makes, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, bias=False)
        self.middle = nn.Parameter(torch.randn(6, 5))
        self.fc = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(F.relu(self.conv(x)).mean(dim=(2, 3)) @ self.middle))


def network(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "turned":
        return Turned().double()
    if name == "depthwise":
        return Depthwise().double()
    return build_model(name, Images(SIDE, 4)).double()


def grouped(model: nn.Module, budget: str = "", ratio: float = 0.5):
    layout = build_layout(model)
    coupling = find_coupling(model, Images(SIDE))
    groups = find_groups(model, layout, ("coupled",), (ratio,), coupling=coupling)
    if budget:
        groups = with_budget(groups, layout, budget, 0.0)
    return layout, replace(groups, by_gate=True), coupling


def gates_by_autograd(model: nn.Module, groups: Groups, images: Tensor, labels: Tensor) -> Tensor:
    """Return the derivative by factors that stand before the weights which read a channel."""
    factors = torch.ones(groups.total, dtype=torch.float64, requires_grad=True)
    values = dict(model.named_parameters())
    names = [name for name, p in model.named_parameters()]
    for entry in groups.coupled:
        name = names[groups.layers[entry.layer].segment]
        padded = torch.cat([factors, torch.ones(1, dtype=torch.float64)])
        if name == "middle":
            values[name] = values[name] * padded[torch.from_numpy(entry.rows)][:, None]
        elif (entry.columns >= 0).any():
            before = padded[torch.from_numpy(entry.columns)].view(values[name].shape[1:])
            values[name] = values[name] * before
    outputs = torch.func.functional_call(model, values, (images,))
    return torch.autograd.grad(F.cross_entropy(outputs, labels), factors)[0]


@pytest.mark.parametrize("name", ["resnet8", "depthwise", "vit_tiny", "turned"])
def test_gates_are_derivatives_by_factors_on_what_reads_a_channel(name):
    model = network(name)
    layout, groups, _ = grouped(model)
    images, labels = torch.randn(5, 3, SIDE, SIDE).double(), torch.tensor([0, 1, 2, 3, 0])
    expected = gates_by_autograd(model, groups, images, labels)
    F.cross_entropy(model(images), labels).backward()
    grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    found = gate_gradients(grad, weights, layout, groups)
    assert [by_row for _, by_row, _ in groups.gates].count(True) == (name == "turned")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_channel_that_no_weight_reads_has_its_gate_on_its_rows():
    model = network("depthwise")
    layout, groups, _ = grouped(model)
    # Without the linear layer's columns nothing reads the channels.
    blind = [replace(entry, columns=np.full_like(entry.columns, -1)) for entry in groups.coupled]
    groups = replace(groups, coupled=tuple(blind))
    grad, weights = torch.randn(2, layout.numel, dtype=torch.float64)
    found = gate_gradients(grad, weights, layout, groups)
    expected = torch.zeros(groups.total, dtype=torch.float64)
    for entry in groups.coupled:
        if entry.scored:
            segment = layout.segments[groups.layers[entry.layer].segment]
            piece = slice(segment.offset, segment.offset + segment.numel)
            products = (grad[piece] * weights[piece]).view(len(entry.rows), -1).sum(1)
            inside = entry.rows >= 0
            expected.index_add_(0, torch.from_numpy(entry.rows[inside]), products[inside])
    torch.testing.assert_close(found, expected)
    assert all(by_row for _, by_row, _ in groups.gates)


@pytest.mark.parametrize("what", ["parameters", "multiply-adds"])
def test_a_group_costs_what_the_budget_has_more_without_it(what):
    model = network("resnet8")
    _, groups, _ = grouped(model, what)
    everything = np.ones(groups.total, dtype=bool)
    found = shares_of_budget(groups)
    for g in (0, 17, 40, 100, groups.total - 1):
        without = everything.copy()
        without[g] = False
        assert cost(everything, groups) - cost(without, groups) == pytest.approx(found[g])


def test_a_budget_buys_the_groups_that_are_worth_most_for_what_they_cost():
    model = network("resnet8")
    _, groups, _ = grouped(model, "parameters", ratio=0.3)
    price = shares_of_budget(groups)
    rng = np.random.default_rng(5)
    worth = rng.permutation(groups.total) + 1.0
    kept = select(worth * price, groups.kinds[0], 1.0, groups)
    assert sum(kept_numel(kept, groups)) <= 0.3 * sum(p.numel() for p in model.parameters())
    # But for the one channel that each set has at least, nothing dropped is worth more.
    spare = np.zeros(groups.total, dtype=bool)
    for s in groups.kinds[0]:
        spare[s.start + int(np.argmax(worth[s.start : s.stop]))] = True
    assert worth[kept & ~spare].min() > worth[~kept].max()
