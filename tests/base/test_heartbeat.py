"""The heartbeat: it counts, and says in words where a rank is."""

from prunex_mpi.base.heartbeat import PHASES, Heartbeat


def test_it_counts_and_tells_where_the_rank_is():
    heartbeat = Heartbeat()
    assert heartbeat.phase in PHASES
    assert heartbeat.describe() == "phase start"
    heartbeat.enter("local", 4)
    heartbeat.beat(17)
    assert heartbeat.describe() == "phase local of outer iteration 4, step 17"
    heartbeat.enter("intra")
    assert heartbeat.describe() == "phase intra of outer iteration 4"
    assert heartbeat.beats == 3
