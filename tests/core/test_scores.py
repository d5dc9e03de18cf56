"""When gradients are added up for the scores of groups."""

from types import SimpleNamespace

import pytest
import torch

from prunex_mpi.core.scores import SENSITIVITY, watch_
from prunex_mpi.settings.resolve import BY_NAME


def totals(method: str, once: int = 0, warmup: int = 0) -> list[float]:
    """Return the sum of squares after each of 8 outer iterations of 2 steps; an epoch has 7."""
    state = SimpleNamespace(memory={SENSITIVITY: torch.zeros(1)}, frozen=False, grad=torch.ones(1))
    state.position = SimpleNamespace(iteration=0, step=0)
    work = SimpleNamespace(
        state=state,
        settings=SimpleNamespace(
            method=BY_NAME[method],
            score="fisher",
            warmup_iterations=warmup,
            options=SimpleNamespace(prune_iteration=once),
        ),
        problem=SimpleNamespace(train=SimpleNamespace(steps_per_epoch=7), steps=2),
    )
    found = []
    for state.position.iteration in range(1, 9):
        for state.position.step in range(2):
            watch_(work)
        found.append(state.memory[SENSITIVITY].item())
    return found


@pytest.mark.parametrize(
    ("once", "wanted"),
    [(6, [0, 0, 2, 4, 6, 8, 8, 8]), (2, [2, 4, 4, 4, 4, 4, 4, 4]), (1, [2] * 8)],
)
def test_a_single_choice_is_made_by_the_epoch_before_it(once: int, wanted: list[float]) -> None:
    assert totals("one-shot", once=once) == wanted


def test_each_choice_is_made_by_its_own_outer_iteration() -> None:
    assert totals("prunex", warmup=3) == [0, 0, 0, 2, 2, 2, 2, 2]
