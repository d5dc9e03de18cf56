"""The bytes by which ranks agree, against what MPI is handed over all ranks."""

from dataclasses import replace

import pytest
from counting import Counting
from nodes import nodes_of
from small_runs import small_run

from prunex_mpi.comm.agreement import alike_bytes
from prunex_mpi.run.supervision import outer_iterations

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("scenario", ["recipe", "int4", "local sgd", "sparseloco"])
def test_losses_norms_and_digests_are_counted_apart(scenario):
    with nodes_of(1) as topology, small_run(topology, scenario) as context:
        world, leader = Counting(topology.world), Counting(topology.leader)
        counted = replace(topology, world=world, leader=leader)
        records = list(outer_iterations(counted, replace(context, stop=None)))
    told = [record["bytes"] for record in records]
    evaluated = sum(record["test_loss"] is not None for record in records)
    # Three float64: loss, those that are right, all.
    assert sum(each["evaluate"] for each in told) == evaluated * alike_bytes(3) > 0
    control = sum(each["control"] for each in told)
    assert control + evaluated * alike_bytes(3) == world.operands + leader.digests > 0
