"""Losses of the user's own are tried before they are trained with; the loss of a learner."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pretended import CPU, GPU, pretended_gpu
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.core.task import IMAGES, Teacher, distilled, find_losses, next_token


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


@pytest.mark.parametrize("task", [IMAGES, next_token(4, 1.0)])
def test_a_model_that_returns_more_while_it_trains_is_refused_with_any_loss(task):
    for loss in (F.cross_entropy, lambda outputs, labels: outputs[0].sum()):
        with pytest.raises(UserError, match="returns tuple while it trains; let it return one"):
            task.losses(loss)((torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)), torch.zeros(2, 4))


CLASSES, SIDE, BATCH = 5, 4, 6


def linear(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, CLASSES)).to(dtype)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("share", "temperature"), [(0.5, 4.0), (1.0, 1.0), (0.2, 0.5)])
def test_loss_and_gradient_are_those_of_the_formula(share, temperature):
    images = torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.float64)
    network, learner = linear(1), linear(2)
    outputs = learner(images).detach().requires_grad_()
    labels_loss = (outputs**2).mean()
    teacher = Teacher(network, share, temperature)
    loss = distilled(teacher, images, outputs, labels_loss)
    loss.backward()
    found = float(loss.detach())

    p = softmax(network(images).detach().numpy() / temperature)
    q = softmax(outputs.detach().numpy() / temperature)
    apart = (p * (np.log(p) - np.log(q))).sum(axis=1).mean()
    mean_square = (outputs.detach().numpy() ** 2).mean()
    assert found == pytest.approx((1 - share) * mean_square + share * temperature**2 * apart)
    # The gradient of T^2 KL with respect to the logits is T (q - p), whatever the labels ask for.
    wanted = share * temperature * (q - p) / BATCH
    wanted = wanted + (1 - share) * 2 * outputs.detach().numpy() / outputs.numel()
    assert np.allclose(outputs.grad.numpy(), wanted, rtol=1e-9, atol=1e-12)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_images_reach_the_teacher_as_it_was_trained_on_them():
    network = linear(1)
    raw = torch.rand(BATCH, 3, SIDE, SIDE, dtype=torch.float64)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    its_mean, its_std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.4])

    def look(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        return (images - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)

    outputs = network(look(raw, its_mean, its_std)).detach()
    affine = [t.view(1, 3, 1, 1) for t in (std / its_std, (mean - its_mean) / its_std)]
    teacher = Teacher(network, 1.0, 2.0, *affine)
    same = distilled(teacher, look(raw, mean, std), outputs, torch.zeros(()))
    assert float(same) == pytest.approx(0, abs=1e-9)
    assert float(distilled(teacher, raw, outputs, torch.zeros(()))) > 1e-3


def test_half_precision_is_compared_in_float32():
    network = linear(1, torch.bfloat16)
    images = torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.bfloat16)
    loss = distilled(Teacher(network, 1.0, 4.0), images, linear(2, torch.bfloat16)(images), 0.0)
    assert loss.dtype == torch.float32
