"""The loss of a learner, against the formula in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.core.task import Teacher, distilled

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


def test_of_several_outputs_the_teacher_looks_at_the_first():
    images = torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.float64)
    teacher, outputs = Teacher(linear(1), 0.5, 4.0), linear(2)(images)
    alone, among = (distilled(teacher, images, o, 0.0) for o in (outputs, (outputs, images)))
    assert torch.equal(alone, among)
    with pytest.raises(UserError, match="--teacher needs logits"):
        distilled(teacher, images, (images, outputs), 0.0)
