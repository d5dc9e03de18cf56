"""AdaCGD: which level a worker chooses."""

import math

import pytest
import torch
from driving import exchange_alone
from torch import nn

from prunex_mpi.methods import adacgd


@pytest.fixture
def chosen(monkeypatch):
    """Return how many elements go of a difference, of levels that are so many."""

    def choose(difference: list[float], counts: list[int], bound: float) -> int:
        monkeypatch.setattr(adacgd, "counts_of", lambda _: counts)
        model = nn.Linear(len(difference), 1, bias=False)
        exchange = exchange_alone(model, torch.float32, method="adacgd")
        count = exchange.choose_(torch.tensor(difference), torch.tensor(bound))
        sent, largest = exchange.sent.values[:count].abs(), exchange.largest[:count]
        torch.testing.assert_close(sent, largest, rtol=0, atol=0, equal_nan=True)
        return count

    return choose


@pytest.mark.parametrize(
    ("bound", "count"),
    # Squares 100, 16, 9, 4, 1: of 130 there are left 30 after one, 5 after three, 1 after four.
    [(130, 0), (129, 1), (30, 1), (29, 3), (5, 3), (4, 4), (1, 4), (0.5, 4), (0, 4)],
)
def test_the_coarsest_that_is_good_enough(bound, count, chosen):
    """Makarenko et al. 2022, the definition of their adaptive compressor."""
    assert chosen([2.0, -10.0, 0.0, 3.0, -4.0, 1.0], [1, 3, 4], float(bound)) == count


def test_what_is_not_a_number_is_sent_at_the_finest_level(chosen):
    assert chosen([math.nan, 1.0], [1, 2], 5.0) == 2
    assert chosen([1.0, 1.0], [1, 2], math.nan) == 2
