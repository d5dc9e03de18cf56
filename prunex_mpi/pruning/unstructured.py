"""Unstructured sparsity: keep single weights by gradient flow or by magnitude.

Weights with two or more dimensions are prunable; biases and the parameters of BatchNorm are kept,
since they are few and every output needs its own. `pruned` is a bool vector over the flat
parameters, true where a weight is removed.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from prunex_mpi.base.errors import UserError, one_line
from prunex_mpi.models.layout import Layout, matrices, trained_parameters
from prunex_mpi.pruning.projection import kept_count

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Iterable[tuple[Tensor, Tensor]]


def kept_weights(layout: Layout, ratio: float, by: str) -> int:
    """Return the number of prunable weights kept at a keep ratio, by the score `by`."""
    sizes = [segment.numel for segment in matrices(layout)]
    if by == "magnitude":
        return sum(kept_count(size, ratio) for size in sizes)
    return kept_count(sum(sizes), ratio) if sizes else 0


def prune_by_magnitude(theta: Tensor, layout: Layout, ratio: float) -> Tensor:
    """Return `pruned`, which keeps the share `ratio` of largest magnitude of each layer."""
    pruned = torch.zeros_like(theta, dtype=torch.bool)
    for segment in matrices(layout):
        magnitudes, kept = theta[segment.place].abs(), kept_count(segment.numel, ratio)
        pruned[segment.place] = all_but_lowest(-magnitudes, kept)
    return pruned


def prune_by_gradient_flow(theta: Tensor, product: Tensor, layout: Layout, ratio: float) -> Tensor:
    """Return `pruned`, which keeps the share `ratio` of lowest score -w ⊙ (H ∇L) of all layers.

    GraSP (Wang et al. 2020, Eq. 8): the score is half the change of ∇L^T ∇L when w is removed.
    `product` is H ∇L. Raises UserError where a score is not finite.
    """
    segments = matrices(layout)
    scores = torch.cat([(theta[s.place] * product[s.place]).neg_() for s in segments])
    if not bool(torch.isfinite(scores).all()):
        raise UserError("the scores of grasp are not finite; lower the rate or check the data")
    removed = all_but_lowest(scores, kept_weights(layout, ratio, "grasp"))
    pruned = torch.zeros_like(theta, dtype=torch.bool)
    for segment, part in zip(segments, removed.split([s.numel for s in segments]), strict=True):
        pruned[segment.place] = part
    return pruned


def all_but_lowest(scores: Tensor, count: int) -> Tensor:
    """Return a bool vector that is false at exactly `count` of the lowest scores."""
    removed = torch.ones_like(scores, dtype=torch.bool)
    removed[torch.topk(scores, count, largest=False, sorted=False).indices] = False
    return removed


def add_gradients_(
    total: Tensor, layout: Layout, model: nn.Module, loss: Loss, batches: Batches
) -> None:
    """Add ∇L of each batch to `total`; the parameters' own gradients are left alone."""
    parameters = list(trained_parameters(model).values())
    for images, labels in batches:
        value = loss(model(images), labels)
        _add_(total, layout, torch.autograd.grad(value, parameters, allow_unused=True))


def add_hessian_products_(
    total: Tensor, direction: Tensor, layout: Layout, model: nn.Module, loss: Loss, batches: Batches
) -> None:
    """Add H d of each batch to `total`, d = `direction`, by differentiating ∇L^T d.

    Raises UserError for a model that cannot be differentiated twice.
    """
    parameters = list(trained_parameters(model).values())
    for images, labels in batches:
        try:
            # Only the plain kernel of attention has a second derivative.
            with sdpa_kernel(SDPBackend.MATH):
                value = loss(model(images), labels)
            slopes = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
            pairs = zip(slopes, layout.views(direction), strict=True)
            along = sum((slope * d).sum() for slope, d in pairs if slope is not None)
            products = torch.autograd.grad(along, parameters, allow_unused=True)
        except RuntimeError as error:
            raise UserError(
                f"the model cannot be differentiated twice ({one_line(error)}); "
                "use --pactrain-score magnitude"
            ) from None
        _add_(total, layout, products)


def _add_(total: Tensor, layout: Layout, parts: Iterable[Tensor | None]) -> None:
    """Add one tensor per segment, None for parameters that the loss does not depend on."""
    for view, part in zip(layout.views(total), parts, strict=True):
        if part is not None:
            view.add_(part)
