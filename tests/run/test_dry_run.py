"""The dry run tells what each family of methods hands over."""

import pytest
from nodes import nodes_of

from prunex_mpi.run.dry_run import dry_run
from prunex_mpi.settings.resolve import make

pytestmark = pytest.mark.mpi

# resnet8 on digits: 75,290 parameters, 480 statistics, 36,864 weights less at a keep ratio of 1/2.
DENSE = 4 * (75_290 + 480)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"method": "dense"}, [4 * 75_290, 4 * 480]),
        ({"method": "topk", "compress_ratio": 1.0, "aggregation": "hierarchical"}, [8 * 75_290]),
        # Half of the 74,800 weights and 490 other parameters; one flag, or a scale and a flag.
        ({"method": "pactrain"}, [4 * 75_290, 4 * (37_400 + 490 + 1)]),
        (
            {"method": "pactrain", "prune_by": "magnitude", "ternary": True},
            [4 * 75_290, 37_400 + 490 + 4 * 2],
        ),
        ({"method": "dgc", "compress_ratio": 1.0}, [8 * 75_290 + 8]),
        # 8 matrices of 250 rows and 1,675 columns together, and 490 other parameters.
        ({"method": "powersgd"}, [4 * (2 * (250 + 1_675) + 490)]),
        # 295 blocks of 256 elements.
        ({"method": "omnireduce"}, [4 * 75_290, 37]),
        ({"method": "local-sgd"}, [DENSE, 64 * DENSE]),
        ({"method": "prunex-flat"}, [DENSE, 64 * DENSE]),
        # Pruned in iteration 16 of 64, whose payload is the first to be smaller.
        (
            {"method": "one-shot", "prune_iteration": 16},
            [DENSE, DENSE - 4 * 36_864, 64 * DENSE - 49 * 4 * 36_864],
        ),
    ],
    ids=lambda x: x["method"] if isinstance(x, dict) else None,
)
def test_bytes_are_those_counted_by_hand(changes: dict, counts: list[int]) -> None:
    with nodes_of(2) as topology:
        text = dry_run(make(model="resnet8", **changes), topology)
        assert f"{topology.num_nodes} nodes" in text
    assert "75,290 parameters, 480 statistics" in text
    for count in counts:
        assert f"{count:,} B" in text
