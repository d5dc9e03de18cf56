"""Ranks that take as many steps end well, however late one of them is."""

import time

import pytest
from nodes import WORLD

from prunex_mpi.comm.lockstep import Lockstep


@pytest.mark.mpi(min_size=2)
@pytest.mark.any_mpi
def test_who_leaves_after_the_same_step_is_no_reason_to_end():
    """The late rank finds its neighbour gone before it has begun the last step."""
    lockstep = Lockstep(WORLD)
    lockstep.enter()
    ends = time.monotonic() + 10
    while WORLD.rank == WORLD.size - 1 and not lockstep.gone:
        assert time.monotonic() < ends
        lockstep._listen()
    lockstep.enter()
    lockstep.leave()
    assert lockstep.theirs == lockstep.step == 2
    lockstep.close()
