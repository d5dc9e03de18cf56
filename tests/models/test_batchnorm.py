"""Consensus of running statistics, and their estimation on other weights."""

import pytest
import torch
from torch import Tensor, nn

from prunex_mpi.models import batchnorm

# Sums in another order, in float64.
EXACTLY = {"rtol": 1e-12, "atol": 1e-12}


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(4, 2, 3),
        nn.BatchNorm2d(2, momentum=0.3),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.GroupNorm(1, 2),
    )


def test_find_takes_only_modules_that_keep_statistics_and_each_once():
    model = small_model()
    shared = nn.Sequential(model, model[1])
    assert batchnorm.find(shared) == [model[1], model[5]]
    assert batchnorm.numel(batchnorm.find(shared)) == 2 * 4 + 2 * 2
    assert batchnorm.find(nn.Conv2d(1, 1, 1)) == []


def test_writing_what_was_read_changes_nothing():
    modules = batchnorm.find(small_model().double())
    for module in modules:
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2)
    before = [(m.running_mean.clone(), m.running_var.clone()) for m in modules]
    flat = torch.full((batchnorm.numel(modules),), torch.nan, dtype=torch.float64)
    reference = torch.rand_like(flat)
    batchnorm.read_(modules, flat, reference)
    assert torch.equal(flat[:4], modules[0].running_mean - reference[:4])
    assert torch.equal(flat[8:10], modules[1].running_mean - reference[8:10])
    for module in modules:
        module.reset_running_stats()
    batchnorm.as_plain_(modules, flat, reference)
    batchnorm.write_plain(modules, flat)
    for module, (mean, variance) in zip(modules, before, strict=True):
        torch.testing.assert_close(module.running_mean, mean, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(module.running_var, variance, rtol=1e-12, atol=0)


def test_rounding_never_makes_a_variance_negative():
    module = nn.BatchNorm2d(1)
    flat = torch.tensor([3.0, 9.0 - 1e-6])
    batchnorm.as_plain_([module], flat, torch.tensor([1.0, 1.0]))
    assert flat.tolist() == [4, 0]


@pytest.mark.parametrize("training", [True, False])
def test_estimate_restores_momentum_and_mode_and_leaves_weights_alone(training):
    model = small_model().train(training)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batchnorm.estimate(model, batchnorm.find(model), [torch.randn(4, 3, 10, 10)])
    assert [model[1].momentum, model[5].momentum] == [0.1, 0.3]
    assert all(module.training is training for module in model.modules())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


class Frozen(nn.BatchNorm2d):
    """What users make of BatchNorm that is not to move when they train on."""

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


class Fork(nn.Sequential):
    """Leave the last module out in evaluation, as early exits do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self[:-1](x)


def test_estimating_leaves_what_is_frozen_and_what_no_image_reaches():
    torch.manual_seed(2)
    model = Fork(nn.BatchNorm2d(3), Frozen(3), nn.BatchNorm2d(3)).train()
    modules = batchnorm.find(model)
    for module in modules:
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2)
        module.num_batches_tracked.fill_(7)
    before = [[b.clone() for b in m.buffers()] for m in modules]
    batchnorm.estimate(model, modules, [torch.randn(8, 3, 4, 4)])
    same = [
        all(torch.equal(a, b) for a, b in zip(m.buffers(), kept, strict=True))
        for m, kept in zip(modules, before, strict=True)
    ]
    assert same == [False, True, True]
    assert [m.training for m in modules] == [True, False, True]
    assert modules[0].momentum == modules[2].momentum == 0.1


class Unused(nn.Module):
    """Hold a BatchNorm that no image reaches, and one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.BatchNorm2d(3, momentum=0.25), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_the_first_running_averages_are_plain_means():
    torch.manual_seed(2)
    model = nn.Sequential(Unused(), Frozen(3), nn.BatchNorm2d(3, momentum=None)).double().train()
    modules = batchnorm.find(model)
    assert batchnorm.are_fresh(modules)
    known, means = torch.zeros(3).double(), []
    for update in range(1, 9):
        images = torch.randn(4, 3, 5, 5).double() + update
        with batchnorm.warmed_up(modules, update) as warming:
            model(images)
        means.append(images.transpose(0, 1).flatten(1).mean(dim=1))
        known = 0.75 * known + 0.25 * means[-1]
        if update <= 4:
            # A quarter of the fourth batch is the plain mean as well.
            known = sum(means) / update
        assert warming == (update < 10)
        assert [m.momentum for m in modules] == [0.25, 0.1, 0.1, None]
        torch.testing.assert_close(model[0].used.running_mean, known, **EXACTLY)
    assert batchnorm.are_fresh([model[0].unused, model[1]])
    assert not batchnorm.are_fresh(modules)
    with batchnorm.warmed_up(modules, 10) as warming:
        assert not warming


def test_a_small_variance_beside_a_large_mean_survives_about_a_reference():
    module = nn.BatchNorm2d(2)
    module.running_mean.copy_(torch.tensor([100.0, -3e4]))
    module.running_var.copy_(torch.tensor([1e-4, 1.0]))
    expected = module.running_var.clone()
    reference = torch.tensor([100.02, -3e4 - 1, 1.0, 1.0])
    flat = torch.empty(batchnorm.numel([module]))
    batchnorm.read_([module], flat, reference)
    batchnorm.as_plain_([module], flat, reference)
    torch.testing.assert_close(flat[2:], expected, rtol=1e-3, atol=0)
    # Float64 holds it about 0.
    flat, zero = torch.zeros(2, 4, dtype=torch.float64)
    batchnorm.read_([module], flat, zero)
    batchnorm.as_plain_([module], flat, zero)
    torch.testing.assert_close(flat[2:].float(), expected, rtol=1e-6, atol=0)
