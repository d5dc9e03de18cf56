"""Losses of the user's own are tried before they are trained with."""

import math

import pytest
import torch
import torch.nn.functional as F
from pretended import CPU, GPU, pretended_gpu

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.core.task import by_position, cross_entropy, find_losses, logits_of, softened


def scalar(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels)


def vector(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels)[None]


# Torch warns where a loss becomes a number with its graph, once on each rank.
@pytest.mark.filterwarnings("error")
def test_a_loss_must_be_a_number(monkeypatch):
    own = {"scalar": scalar, "vector": vector}
    monkeypatch.setattr("prunex_mpi.core.task.import_function", lambda _, name, *__: own[name[4:]])
    settings = make(dataset="synthetic", train_samples=64, test_samples=16, loss="own:scalar")
    assert find_losses(settings, 3, CPU) == (scalar, pytest.approx(math.log(3)))
    settings = make(dataset="synthetic", train_samples=64, test_samples=16, loss="own:vector")
    with pytest.raises(UserError, match=r"must return one number .*a tensor \[1\]"):
        find_losses(settings, 3, CPU)


def test_a_loss_is_tried_where_it_will_be_used(monkeypatch):
    """One whose weights of classes stay on the CPU is no loss on a GPU."""
    by_class = torch.ones(3)

    def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (outputs * by_class).sum()

    monkeypatch.setattr("prunex_mpi.core.task.import_function", lambda *_: weighted)
    settings = make(loss="own:weighted")
    assert find_losses(settings, 3, CPU) == (weighted, 0.0)
    with pretended_gpu(), pytest.raises(UserError, match=r"labels \[2\] on cuda:0"):
        find_losses(settings, 3, GPU)


def test_several_outputs_are_for_a_loss_of_one_s_own():
    outputs = torch.zeros(2, 3), torch.zeros(2, 3)
    labels = torch.zeros(2, dtype=torch.int64)
    cross_entropy(outputs[0], labels)
    with pytest.raises(UserError, match="returns tuple while it trains"):
        cross_entropy(outputs, labels)


def test_of_several_outputs_of_text_a_loss_gets_each_by_position():
    logits, share = torch.randn(2, 4, 3), torch.tensor(0.5)
    targets = torch.tensor([[0, 1, 2, 0], [2, 2, 1, 0]])

    def both(outputs: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs[0], labels) + outputs[1]

    found = by_position(both, (logits, share), targets)
    assert found == F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + share
    with pytest.raises(UserError, match="returns tuple while it trains"):
        by_position(cross_entropy, (logits, share), targets)


def test_of_several_outputs_the_first_are_the_logits():
    logits, features = torch.randn(2, 3), torch.randn(2, 8)
    assert logits_of([logits, features], logits.shape) is logits
    for outputs in ((features, logits), {"logits": logits}, (), (None, logits)):
        with pytest.raises(UserError, match=r"--teacher needs logits \[2, 3\].* the model returns"):
            logits_of(outputs, logits.shape)
    first, second, third = softened((logits, features, 2 * logits), 4.0)
    assert torch.equal(first, logits / 4) and torch.equal(third, logits / 2)
    assert second is features
