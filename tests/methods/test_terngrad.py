"""TernGrad against its paper and code: scales by hand."""

import pytest
import torch

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
