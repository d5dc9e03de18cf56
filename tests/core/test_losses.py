"""Losses of the user's own are tried before they are trained with."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pretended import CPU, GPU, pretended_gpu

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.core.losses import check_single_output, find_losses


def scalar(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels)


def vector(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels)[None]


def test_a_loss_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"scalar": scalar, "vector": vector}
    monkeypatch.setattr(
        "prunex_mpi.core.losses.import_function", lambda _, name, *__: own[name[4:]]
    )
    settings = make(dataset="synthetic", train_samples=64, test_samples=16, loss="own:scalar")
    assert find_losses(settings, 3, CPU) == (scalar, scalar)
    settings = make(dataset="synthetic", train_samples=64, test_samples=16, loss="own:vector")
    with pytest.raises(UserError, match=r"must return one number .*a tensor \[1\]"):
        find_losses(settings, 3, CPU)


def test_a_loss_is_tried_where_it_will_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose weights of classes stay on the CPU is no loss on a GPU."""
    by_class = torch.ones(3)

    def weighted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (outputs * by_class).sum()

    monkeypatch.setattr("prunex_mpi.core.losses.import_function", lambda *_: weighted)
    settings = make(loss="own:weighted")
    assert find_losses(settings, 3, CPU) == (weighted, weighted)
    with pretended_gpu(), pytest.raises(UserError, match=r"labels \[2\] on cuda:0"):
        find_losses(settings, 3, GPU)


def test_several_outputs_are_for_a_loss_of_one_s_own() -> None:
    outputs = torch.zeros(2, 3), torch.zeros(2, 3)
    smoothed = partial(F.cross_entropy, label_smoothing=0.1)
    for loss in (F.cross_entropy, smoothed):
        check_single_output(outputs[0], loss)
        with pytest.raises(UserError, match="returns tuple while it trains"):
            check_single_output(outputs, loss)
    check_single_output(outputs, lambda pair, labels: F.cross_entropy(pair[0], labels))
