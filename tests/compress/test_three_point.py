"""The choice of AdaCGD's level, by hand."""

import math

import pytest
import torch

from prunex_mpi.compress.sparse import choose_count


@pytest.mark.parametrize(
    ("bound", "count"),
    # Squares 100, 16, 9, 4, 1: of 130 there are left 30 after one, 5 after three, 1 after four.
    [(130, 0), (129, 1), (30, 1), (29, 3), (5, 3), (4, 4), (1, 4), (0.5, 4), (0, 4)],
)
def test_the_coarsest_that_is_good_enough(bound: float, count: int) -> None:
    """Makarenko et al. 2022, the definition of their adaptive compressor."""
    difference = torch.tensor([2.0, -10.0, 0.0, 3.0, -4.0, 1.0])
    largest = torch.tensor([10.0, 4.0, 3.0, 2.0])
    counts = [1, 3, 4]
    assert choose_count(difference, largest, counts, torch.tensor(float(bound))) == count


def test_what_is_not_a_number_is_sent_at_the_finest_level() -> None:
    difference = torch.tensor([math.nan, 1.0])
    assert choose_count(difference, difference, [1, 2], torch.tensor(5.0)) == 2
    assert choose_count(torch.ones(2), torch.ones(2), [1, 2], torch.tensor(math.nan)) == 2
