"""Ternary quantisation: signs or nothing, right on average, and sums that fit."""

import pytest
import torch

from prunex_mpi.compress.quantise import integer_type, ternarise_


def ternarise(values: torch.Tensor, scale: float, dtype=torch.int8) -> torch.Tensor:
    out = torch.full(values.shape, 99, dtype=dtype)
    spare = torch.empty(values.shape, dtype=torch.bool), torch.empty(values.shape, dtype=torch.bool)
    ternarise_(values, values.new_tensor(scale), torch.empty_like(values), spare, out)
    return out


@pytest.mark.parametrize(
    ("workers", "dtype"),
    [
        (1, torch.int8),
        (127, torch.int8),
        (128, torch.int16),
        (32_767, torch.int16),
        (32_768, torch.int32),
    ],
)
def test_sums_of_all_workers_fit(workers: int, dtype: torch.dtype) -> None:
    assert integer_type(workers) == dtype
    assert workers <= torch.iinfo(dtype).max


@pytest.mark.parametrize("integers", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_over_many_draws_is_the_value(dtype, integers) -> None:
    torch.manual_seed(0)
    values = torch.tensor([-2.0, -0.7, -1e-3, 0.0, 0.3, 1.9], dtype=dtype)
    draws = 20_000
    many = ternarise(values.repeat(draws), 2.0, integers).view(draws, -1)
    assert many.dtype == integers
    assert set(many.flatten().tolist()) == {-1, 0, 1}
    assert torch.all(many * values.sign() >= 0)
    assert torch.all(many[:, 0] == -1)
    assert torch.all(many[:, 3] == 0)
    # Five standard errors of the mean of s b, b a Bernoulli variable with p = |g| / s.
    share = values.abs() / 2
    error = 5 * 2 * (share * (1 - share) / draws).sqrt()
    assert torch.all((2.0 * many.to(dtype).mean(dim=0) - values).abs() <= error)


def test_without_a_scale_there_is_nothing() -> None:
    assert not ternarise(torch.zeros(100), 0.0).any()
