"""When residuals are computed."""

from types import SimpleNamespace

import numpy as np
import pytest

from prunex_mpi.config.resolve import make
from prunex_mpi.core.loop import Round, measures_residuals
from prunex_mpi.core.state import Position


@pytest.mark.parametrize(
    ("wanted", "iteration", "vote_next", "measured"),
    [
        ("every", 1, False, True),
        ("evaluate", 1, False, False),
        ("evaluate", 3, False, True),
        # Small residuals of a union ask for a vote, and its own decide whether the run stops.
        ("evaluate", 4, True, True),
        ("off", 3, True, False),
    ],
)
def test_residuals_are_computed_when_asked_and_before_a_stop(
    wanted, iteration, vote_next, measured
):
    settings = make(residuals=wanted, evaluate_every=3)
    this = Round(iteration, False, 0.0, np.ones(0, dtype=bool))
    for duals in (True, False):
        state = SimpleNamespace(position=Position(vote_next=vote_next), consensus_sgd=not duals)
        context = SimpleNamespace(state=state, settings=settings, problem=SimpleNamespace(test=()))
        assert measures_residuals(context, this) == (measured and duals)
