"""The bytes by which ranks agree, against what MPI is handed over all ranks."""

from dataclasses import replace

import pytest
from counting import Counting
from nodes import nodes_of
from small_runs import small_run

from prunex_mpi.run.supervision import driver_of

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("scenario", ["recipe", "int4", "local sgd", "sparseloco"])
def test_losses_norms_and_digests_are_counted_apart(scenario):
    with nodes_of(1) as topology, small_run(topology, scenario) as context:
        world, leader = Counting(topology.world), Counting(topology.leader)
        counted = replace(topology, world=world, leader=leader)
        records = driver_of(context.settings).outer_iterations(counted, replace(context, stop=None))
        told = [record["bytes"] for record in records]
    assert all(each["control"] > 0 for each in told)
    control = sum(each["control"] + each["evaluate"] for each in told)
    assert control == world.operands + leader.digests > 0
