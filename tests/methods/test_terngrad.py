"""TernGrad against its paper and code: scales by hand, expectations, draws that repeat."""

import pytest
import torch
from driving import COMMON, make_context, wire_of
from nets import RandomStream, new_net
from nodes import WORLD

from prunex_mpi.config.resolve import make
from prunex_mpi.methods import terngrad

pytestmark = pytest.mark.two_ranks


def test_scales_by_hand():
    """clip_gradients_by_stddev: the standard deviation of all elements, the mean taken out."""
    # Mean 2, squares of 4 + 4 + 4 + 36: sigma is the root of 12; one element has none.
    pieces = [torch.tensor([0.0, 0.0, 0.0, -8.0]), torch.tensor([3.0]), torch.zeros(2)]
    scales = torch.empty(3)
    terngrad.find_scales_(pieces, 1.0, scales)
    assert scales.tolist() == pytest.approx([12**0.5, 3.0, 0.0])
    terngrad.find_scales_(pieces, 2.5, scales)
    assert scales.tolist() == [8.0, 3.0, 0.0]
    terngrad.find_scales_([torch.tensor([1.0, float("nan")])] * 3, 0.0, scales)
    assert torch.isinf(scales).all()


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_a_gradient_is_right_on_average_and_draws_depend_on_the_step():
    """Of many steps with the same gradients, the mean is that of the workers, clipped."""
    settings = make(method="terngrad", **COMMON)
    context = make_context(settings, new_net(), RandomStream(0, torch.float64))
    wire = wire_of(WORLD)
    space = terngrad.allocate(wire, context)
    state, segment = context.state, context.state.layout.segments[0]
    place = slice(segment.offset, segment.offset + segment.numel)
    every = [
        torch.randn(state.grad.numel(), generator=torch.Generator().manual_seed(r)).double()
        for r in range(WORLD.size)
    ]
    scale = max(2.5 * float(g[place].std(unbiased=False)) for g in every)
    wanted = sum(g[place].clamp(-scale, scale) for g in every)
    steps, total, seen = 600, torch.zeros(segment.numel, dtype=torch.float64), []
    for step in range(steps):
        state.position.step = step % 599
        state.grad.copy_(every[WORLD.rank])
        terngrad.exchange_(wire, space, context)
        levels = state.grad[place] / scale
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-9)
        total += state.grad[place]
        seen.append(state.grad.clone())
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[599])
    # Five standard errors of a sum of as many draws of variance scale^2 / 4 at most.
    error = 5 * scale * (WORLD.size / 4 / steps) ** 0.5
    assert (total / steps - wanted).abs().max() < error
