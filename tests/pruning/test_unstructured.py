"""Unstructured masks: counts by magnitude, attention, and what cannot be scored."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.layout import build_layout, flatten_
from prunex_mpi.pruning.unstructured import (
    add_gradients_,
    add_hessian_products_,
    kept_weights,
    prune_by_gradient_flow,
    prune_by_magnitude,
)


def new_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ).double()


def new_batches(count: int = 2) -> list:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(5, 1, 3, 3, generator=generator, dtype=torch.float64),
            torch.randint(3, (5,), generator=generator),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5, 1.0])
def test_magnitude_keeps_the_largest_of_each_layer(ratio):
    model = new_net()
    layout = build_layout(model)
    theta, _ = flatten_(model, layout)
    pruned = prune_by_magnitude(theta, layout, ratio)
    kept = 0
    for segment, value, gone in zip(
        layout.segments, layout.views(theta), layout.views(pruned), strict=True
    ):
        if len(segment.shape) == 1:
            assert not gone.any()
            continue
        count = int((~gone).sum())
        assert count == max(1, -(-round(1000 * ratio) * segment.numel // 1000))
        kept += count
        if gone.any():
            assert value[~gone].abs().min() >= value[gone].abs().max()
    assert kept == kept_weights(layout, ratio, "magnitude")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(1).unsqueeze(-1).expand(-1, -1, 4) + torch.arange(4)
        found, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.fc(found.mean(dim=1))


class FlashAttention(Attention):
    """Insists on a kernel that has no second derivative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return super().forward(x)


def test_a_model_without_second_derivatives_is_refused():
    model = FlashAttention()
    layout = build_layout(model)
    theta, _ = flatten_(model, layout)
    total = torch.zeros_like(theta)
    batches = [(images.float(), labels) for images, labels in new_batches()]
    with pytest.raises(UserError, match=r"twice.*use --pactrain-score magnitude"):
        add_hessian_products_(total, theta, layout, model, F.cross_entropy, batches)


def test_attention_is_differentiated_twice():
    model = Attention()
    layout = build_layout(model)
    theta, _ = flatten_(model, layout)
    batches = [(images.float(), labels) for images, labels in new_batches()]
    slope, product, near = (torch.zeros_like(theta) for _ in range(3))
    add_gradients_(slope, layout, model, F.cross_entropy, batches)
    add_hessian_products_(product, slope, layout, model, F.cross_entropy, batches)
    theta.add_(slope, alpha=1e-2)
    add_gradients_(near, layout, model, F.cross_entropy, batches)
    assert product.any()
    error = torch.linalg.vector_norm((near - slope) / 1e-2 - product)
    assert error < 0.05 * torch.linalg.vector_norm(product)


def test_scores_that_are_not_finite_are_refused():
    layout = build_layout(new_net())
    theta = torch.ones(layout.numel)
    product = torch.full_like(theta, torch.nan)
    with pytest.raises(UserError, match="not finite"):
        prune_by_gradient_flow(theta, product, layout, 0.5)
