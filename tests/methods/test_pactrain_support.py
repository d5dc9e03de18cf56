"""The mask tracker on one rank: what is counted, what grows, what a new mask does."""

import torch
from torch import nn

from prunex_mpi.core.state import PRUNED
from prunex_mpi.methods.pactrain_support import (
    CLOCK,
    DIGESTS,
    STABLE,
    SUPPORT,
    UNCHANGED,
    bucket_numel,
    build_tracker,
    observe_,
    outside_,
    read_digests,
    restart_,
    stable_positions,
)
from prunex_mpi.models.layout import build_layout, flatten_

BUCKET = 4


def new_tracker():
    """Return memory, theta and layout of six weights and two biases; weight 1 is zero."""
    model = nn.Linear(3, 2)
    layout = build_layout(model)
    theta, _ = flatten_(model, layout)
    theta.copy_(torch.tensor([1.0, 0.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]))
    memory = build_tracker(theta, BUCKET)
    pruned = torch.tensor([False, False, True, False, True, True, False, False])
    theta.masked_fill_(pruned, 0.0)
    restart_(memory, pruned, theta, layout)
    return memory, theta, layout


def observe(memory, *places: int) -> None:
    grad = torch.zeros(8)
    grad[list(places)] = 1e-30
    observe_(grad, memory, torch.empty(8, dtype=torch.bool), BUCKET)


def test_support_begins_with_the_weights_that_are_kept_and_all_biases() -> None:
    memory, _, _ = new_tracker()
    assert memory[SUPPORT].nonzero().view(-1).tolist() == [0, 3, 6, 7]
    assert not memory[STABLE].any()


def test_only_growth_starts_the_count_again() -> None:
    memory, _, _ = new_tracker()
    observe(memory, 0, 6)
    observe(memory, 3)
    assert memory[UNCHANGED].tolist() == [2, 2]
    before = read_digests(memory, BUCKET).copy()
    observe(memory, 1, 7)
    assert memory[UNCHANGED].tolist() == [0, 3]
    assert memory[SUPPORT].nonzero().view(-1).tolist() == [0, 1, 3, 6, 7]
    after = read_digests(memory, BUCKET)
    assert before[0] != after[0]
    assert before[1] == after[1]
    assert int(memory[CLOCK]) == 3


def test_the_support_of_a_stable_bucket_is_fixed() -> None:
    memory, _, _ = new_tracker()
    digests = read_digests(memory, BUCKET).copy()
    memory[STABLE].fill_(True)
    observe(memory, 1)
    assert memory[UNCHANGED].tolist() == [0, 1]
    assert memory[SUPPORT].nonzero().view(-1).tolist() == [0, 3, 6, 7]
    assert (read_digests(memory, BUCKET) == digests).all()


def test_a_new_mask_makes_all_buckets_unstable() -> None:
    memory, theta, layout = new_tracker()
    observe(memory, 0)
    read_digests(memory, BUCKET)
    memory[STABLE].fill_(True)
    pruned = torch.zeros(8, dtype=torch.bool)
    pruned[0] = True
    restart_(memory, pruned, theta, layout)
    assert memory[SUPPORT].nonzero().view(-1).tolist() == [3, 6, 7]
    assert torch.equal(memory[PRUNED], pruned)
    for key in (STABLE, UNCHANGED, DIGESTS, CLOCK):
        assert not memory[key].any(), key


def test_outside_is_told_per_bucket() -> None:
    support = torch.tensor([True, False, False, False, True])
    fresh = torch.empty(5, dtype=torch.bool)
    grad = torch.tensor([1.0, 0.0, -0.0, 0.0, torch.nan])
    assert outside_(grad, support, fresh, 4).tolist() == [False, False]
    grad[2] = -1e-30
    assert outside_(grad, support, fresh, 4).tolist() == [True, False]
    assert fresh.tolist() == [False, False, True, False, False]


def test_positions_are_those_of_stable_buckets() -> None:
    memory, _, _ = new_tracker()
    assert stable_positions(memory, BUCKET)[1] == []
    memory[STABLE][1] = True
    positions, counts = stable_positions(memory, BUCKET)
    assert (positions.tolist(), counts) == ([6, 7], [2])
    memory[STABLE][0] = True
    positions, counts = stable_positions(memory, BUCKET)
    assert (positions.tolist(), counts) == ([0, 3, 6, 7], [2, 2])


def test_buckets_are_as_large_as_asked() -> None:
    assert bucket_numel(2**-10, torch.empty(1)) == 256
    assert bucket_numel(2**-10, torch.empty(1, dtype=torch.float64)) == 128
    assert bucket_numel(1e-9, torch.empty(1)) == 1
