"""TernGrad against its paper and code: scales by hand."""

import pytest
import torch

from prunex_mpi.methods import terngrad

pytestmark = pytest.mark.two_ranks


def test_sums_of_so_many_numbers_up_to_2_fit():
    # 8 workers make up to 16, 128 up to 256.
    bits = [terngrad.bits_down(workers) for workers in (1, 7, 8, 127, 128)]
    assert bits == [4, 4, 8, 8, 16]


def test_scales_by_hand(monkeypatch):
    """clip_gradients_by_stddev: the standard deviation of all elements, the mean taken out."""
    # Mean 2, squares of 4 + 4 + 4 + 36: sigma is the root of 12; one element has none.
    pieces = [torch.tensor([0.0, 0.0, 0.0, -8.0]), torch.tensor([3.0]), torch.zeros(2)]
    scales = torch.empty(3)
    terngrad.find_scales_(pieces, scales)
    assert scales.tolist() == [8.0, 3.0, 0.0]
    monkeypatch.setattr(terngrad, "CLIP_SIGMA", 1.0)
    terngrad.find_scales_(pieces, scales)
    assert scales.tolist() == pytest.approx([12**0.5, 3.0, 0.0])
    terngrad.find_scales_([torch.tensor([1.0, float("nan")])] * 3, scales)
    assert torch.isinf(scales).all()
