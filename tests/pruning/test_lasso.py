"""The group lasso in flat form against autograd, and what it says is empty."""

import numpy as np
import pytest
import torch
from nets import CoupledNet
from torch import nn
from torchvision.models import VisionTransformer

from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout, flatten_
from prunex_mpi.pruning.coupling import Coupling, find_coupling
from prunex_mpi.pruning.groups import find_groups
from prunex_mpi.pruning.lasso import (
    build_lasso,
    emptied,
    group_norms,
    write_subgradient_,
)

CPU = torch.device("cpu")
SIDE = 8


def flat_net():
    """A channel is 16 columns of the classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 5),
    )


def attention_net():
    """A head is many rows and columns of its weights."""
    return VisionTransformer(8, 4, 1, 4, 16, 24, num_classes=5)


def uneven(model, side):
    """Return made-up groups of unequal numbers of slices; some slices are in none."""
    rows = {"0.weight": np.array([0, 1, 0, 0, -1, 2])}
    columns = {"0.weight": np.array([-1, 3, 2]), "4.weight": np.arange(96) % 4}
    return Coupling(rows, columns, (), 4, {}, ())


def traced(model, side):
    return find_coupling(model, Images(side), layers=True)


@pytest.mark.parametrize(
    ("make", "find"),
    [(flat_net, traced), (flat_net, uneven), (attention_net, traced), (CoupledNet, traced)],
)
def test_groups_of_each_layer_are_rows_and_columns_of_its_weight(make, find):
    """Against autograd through the penalty as the authors' code writes it, per channel."""
    torch.manual_seed(0)
    model = make().double()
    layout, side = build_layout(model), 6 if make is CoupledNet else SIDE
    coupling = find(model, side)
    with torch.no_grad():
        # A group of norm zero.
        for dim, known in enumerate((coupling.rows, coupling.columns)):
            for name, ids in known.items():
                gone = torch.from_numpy(np.flatnonzero(ids == 1))
                model.get_parameter(name).index_fill_(dim, gone, 0.0)
    by_hand, count = 0.0, 0
    for name, p in model.named_parameters():
        found = [(0, coupling.rows.get(name)), (1, coupling.columns.get(name))]
        depthwise = p.dim() == 4 and p.shape[1] == 1
        for dim, ids in found if p.dim() > 1 and not depthwise else ():
            for g in np.unique(ids[ids >= 0]) if ids is not None else ():
                piece = p.index_select(dim, torch.from_numpy(np.flatnonzero(ids == g)))
                by_hand = by_hand + (piece.pow(2).sum() + 1e-8).sqrt()
                count += 1
    assert make is not CoupledNet or "conv4.weight" in coupling.rows
    theta, grad = flatten_(model, layout)
    lasso = build_lasso(layout, coupling, CPU)
    norms = group_norms(theta, lasso, torch.empty_like(theta))
    assert norms.numel() == lasso.total == count
    assert float(norms.sum()) == pytest.approx(float(by_hand.detach()), rel=1e-12)
    write_subgradient_(theta, lasso, norms, torch.tensor([0.3], dtype=torch.float64), grad)
    found = grad.clone()
    grad.zero_()
    (0.3 * by_hand).backward()
    torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-15)


def test_what_is_emptied_and_what_stays():
    model = flat_net()
    layout = build_layout(model)
    coupling = find_coupling(model, Images(SIDE), layers=True)
    groups = find_groups(model, layout, ("coupled",), (1.0,), coupling=coupling)
    theta, _ = flatten_(model, layout)
    mask = np.array([True, True, True, True, True, False])
    lasso = build_lasso(layout, coupling, CPU)
    with torch.no_grad():
        theta.fill_(0.01)
        # Gamma and bias do not keep a channel; one weight anywhere in it does.
        model[0].bias.fill_(9.0)
        model[1].weight.fill_(9.0)
        model[0].weight[2, 1, 0, 0] = -0.5
        model[4].weight[3, 16 * 4 + 7] = 0.5
    removed = emptied(theta, lasso, groups, mask, 0.1)
    assert removed.tolist() == [True, True, False, True, False, False]
    with torch.no_grad():
        model[4].weight[3, 16 * 4 + 7] = -0.6
    # All below: the one of the largest weight stays, of those that are still there.
    removed = emptied(theta, lasso, groups, mask, 1.0)
    assert removed.tolist() == [True, True, True, True, False, False]
    assert not emptied(theta, lasso, groups, mask, 1e-3).any()
