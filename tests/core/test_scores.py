"""When squared gate gradients are summed for the scores of groups."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prunex_mpi.config.resolve import BY_NAME
from prunex_mpi.core.mask_choice import SENSITIVITY, watch_
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.coupling import find_coupling
from prunex_mpi.pruning.groups import find_groups


def totals(method: str, once: int = 0, warmup: int = 0) -> list[float]:
    """Return how many steps are in the sums after each of 8 outer iterations of 2 steps.

    An epoch has 7 steps. Each adds 3^2 to both groups: 3 weights read a channel.
    """
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Conv2d(2, 3, 1))
    layout = build_layout(model)
    groups = find_groups(
        model, layout, ("coupled",), (0.5,), coupling=find_coupling(model, Images(2))
    )
    ones = torch.ones(layout.numel)
    state = SimpleNamespace(memory={SENSITIVITY: torch.zeros(2)}, frozen=False, groups=groups)
    state.grad, state.theta, state.layout = ones, ones, layout
    state.position = SimpleNamespace(iteration=0, step=0)
    context = SimpleNamespace(
        state=state,
        settings=SimpleNamespace(
            method=BY_NAME[method],
            score="gates",
            warmup_iterations=warmup,
            options=SimpleNamespace(prune_iteration=once),
        ),
        problem=SimpleNamespace(train=SimpleNamespace(steps_per_epoch=7), steps=2),
    )
    found = []
    for state.position.iteration in range(1, 9):
        for state.position.step in range(2):
            watch_(context)
        first, second = (state.memory[SENSITIVITY] / 9).tolist()
        assert first == second
        found.append(first)
    return found


@pytest.mark.parametrize(
    ("once", "wanted"), [(6, [0, 0, 2, 4, 6, 8, 8, 8]), (2, [2, 4, 4, 4, 4, 4, 4, 4]), (1, [2] * 8)]
)
def test_a_single_choice_is_made_by_the_epoch_before_it(once, wanted):
    assert totals("one-shot", once=once) == wanted


def test_each_choice_is_made_by_its_own_outer_iteration():
    assert totals("prunex", warmup=3) == [0, 0, 0, 2, 2, 2, 2, 2]
