"""By how much the clocks of ranks differ."""

import time

import pytest
from nodes import WORLD

from prunex_mpi.comm.agreement import seconds_ahead

pytestmark = pytest.mark.mpi


def test_clocks_of_one_machine_are_one() -> None:
    assert seconds_ahead(WORLD) == 0.0


@pytest.mark.parametrize("apart", [-5e3, 0.5, 1e6])
def test_clocks_that_began_at_other_times_are_told_apart(
    apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + apart * WORLD.rank)
    # Half of the shortest of several round trips, on a machine that has other things to do.
    assert seconds_ahead(WORLD) == pytest.approx(apart * WORLD.rank, rel=1e-9, abs=0.02)
