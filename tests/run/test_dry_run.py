"""The dry run tells what each family of methods hands over."""

import re
import sys
from contextlib import nullcontext

import own_data
import pytest
from driving import CPU, SMALL_BUCKETS
from nodes import WORLD, nodes_of
from safetensors.torch import save_file

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm import topology as comm
from prunex_mpi.config.resolve import make, with_overrides
from prunex_mpi.data.request import NOTHING_KNOWN
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images
from prunex_mpi.run.dry_run import differing_settings, dry_run, forecast
from prunex_mpi.run.start import set_up
from prunex_mpi.run.supervision import outer_iterations

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

# resnet8 on digits: 75,290 parameters, 480 statistics, 36,864 weights less at a keep ratio of 1/2.
DENSE = 4 * (75_290 + 480)
# Four levels per tensor, statistics in 2 bytes each, positions of 12 bits and values of 2.
SPARSE = 8 * -(-(23 * 16 + 480 * 2 + 23 * 64 * 12 // 8 + (23 * 64 + 490 + 3) // 4) // 8)


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"method": "dense"}, [4 * 75_290]),
        ({"method": "topk", "topk_ratio": 1.0, "aggregation": "hierarchical"}, [8 * 75_290]),
        # Half of the 74,800 weights and 490 other parameters; one flag, or a scale and a flag.
        ({"method": "pactrain"}, [4 * 75_290, 4 * (37_400 + 490 + 1)]),
        (
            {"method": "pactrain", "pactrain_score": "magnitude", "pactrain_ternary": True},
            [4 * 75_290, 37_400 + 490 + 4 * 2],
        ),
        # 44 + 231 + 231 + 461 + 922 + 1,844 + 3,687 + 64, and what is no kernel or matrix.
        ({"method": "dgc", "dgc_ratio": 0.1}, [8 * 7_484 + 8 + 4 * 490]),
        ({"method": "dgc", "dgc_ratio": 1.0}, [4 * 75_290]),
        # 8 matrices of 250 rows and 1,675 columns together, and 490 other parameters.
        ({"method": "powersgd"}, [4 * (2 * (250 + 1_675) + 490)]),
        # 295 blocks of 256 elements.
        ({"method": "omnireduce", "omnireduce_block_ratio": 1.0}, [4 * 75_290, 37]),
        # 3 of them.
        ({"method": "omnireduce"}, [3 * (4 * 256 + 4)]),
        # A tenth of a block for each worker: 7,529, 2 * 3,765 or 4 * 1,883.
        (
            {"method": "spardl", "spardl_ratio": 0.1},
            [8 * {1: 7_529, 2: 7_530, 4: 7_532}.get(WORLD.size, 0)],
        ),
        ({"method": "fp16"}, [2 * 75_290]),
        # The finest level, a tenth.
        ({"method": "adacgd"}, [8 * 7_529 + 8]),
        # 23 scales, and 2 bits for 75,296 numbers; of 4 workers also 4 bits for a share.
        ({"method": "terngrad"}, [4 * 23 + 18_824 + (9_412 if WORLD.size == 4 else 0)]),
        # A bit for each, and 2 for a share.
        ({"method": "lion"}, [9_412 + (4_706 if WORLD.size == 4 else 0)]),
        ({"method": "local-sgd"}, [DENSE, 64 * DENSE]),
        # Rounds of (0.4 / 0.2)^2 = 4 steps in place of 2.
        (
            {"method": "qsr", "local_steps": 2, "lr_schedule": "constant", "qsr_alpha": 0.4},
            [DENSE, 32 * DENSE],
        ),
        # 23 chunks send 64 values each, 490 others travel without.
        ({"method": "sparseloco"}, [DENSE, SPARSE, 64 * SPARSE, 64 * DENSE]),
        ({"method": "prunex-flat"}, [DENSE, 64 * DENSE]),
        # Pruned in iteration 16 of 64, whose payload is the first to be smaller.
        (
            {"method": "one-shot", "one_shot_prune_iteration": 16},
            [DENSE, DENSE - 4 * 36_864, 64 * DENSE - 49 * 4 * 36_864],
        ),
    ],
    ids=lambda x: x["method"] if isinstance(x, dict) else None,
)
def test_bytes_are_those_counted_by_hand(changes, counts):
    with nodes_of(2) as topology:
        text = dry_run(make(model="resnet8", **changes), topology)
        assert f"{topology.num_nodes} nodes" in text
    assert "75,290 parameters, 480 statistics" in text
    for count in counts:
        assert f"{count:,} B" in text


@pytest.mark.parametrize("world", [MPI.COMM_SELF, WORLD], ids=["alone", "together"])
def test_a_rank_alone_hands_over_no_statistics(world):
    with comm.nodes_of(world) as topology:
        text = dry_run(make(model="resnet8", method="dense"), topology)
    assert (f"statistics per outer iteration  {4 * 480:,} B" in text) == (world.size > 1)


@pytest.mark.two_ranks
def test_data_sets_of_ones_own_are_looked_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "cifar_of_mine", own_data)
    with nodes_of(2) as topology:
        settings = make(model="resnet8", method="dense", dataset="cifar_of_mine:digits_again")
        assert f"{4 * 75_290:,} B" in dry_run(settings, topology)


SHORT = {"model": "resnet8-w4", "dataset": "synthetic", "image_size": 8, "train_samples": 16}
SHORT |= {"test_samples": 8, "batch_size": 2, "local_steps": 1, "outer_iterations": 3}
SHORT |= {"evaluate_every": 3, "device": "cpu"}
PRUNED = {"groups": ("coupled",), "warmup_iterations": 1, "keep_ramp_iterations": 2}
PRUNED |= {"freeze_iteration": 3}


# In fewer bits each fragment has whole blocks of its own.
IN_PARTS = {"payload": "int4", "local_steps": 3, "fragments": 3, "outer_iterations": 4}
IN_PARTS |= {"evaluate_every": 4}


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    "changes",
    [
        *({"payload": p, **PRUNED} for p in ("fp32", "bf16", "int4")),
        {"payload": "int4", "method": "local-sgd"},
        {**IN_PARTS, "method": "local-sgd", "payload": "fp32"},
        {**IN_PARTS, **PRUNED, "residuals": "off", "outer_iterations": 5, "evaluate_every": 5},
        {**IN_PARTS, "method": "one-shot", "one_shot_prune_iteration": 2},
    ],
    ids=lambda c: " ".join(str(c.get(k, "")) for k in ("payload", "method", "fragments")).strip(),
)
def test_bytes_are_those_that_a_run_counts(changes):
    settings = make(**{**SHORT, **changes})
    with nodes_of(1) as topology:
        text = forecast(settings, topology, NOTHING_KNOWN)
        context = set_up(topology, settings, CPU, SMALL_BUCKETS, Heartbeat())
        records = list(outer_iterations(topology, context))
    if WORLD.size == 1:
        # One node has nobody to save bytes for.
        return
    payloads = [record["bytes"]["payload"] for record in records]
    dense, whole = records[0]["bytes"]["dense"], len(records) * records[0]["bytes"]["dense"]
    lines = dict(re.split("  +", line) for line in text.splitlines())
    assert lines["dense payload per outer iteration"].startswith(f"{dense:,} B")
    over = lines[f"payload over {len(records)} outer iterations"]
    assert over.startswith(f"{sum(payloads):,} B")
    if settings.fragments > 1:
        return
    assert f"{whole:,} B" in over
    assert f"{100 * sum(payloads) / whole:.1f} % of dense" in over
    if settings.payload != "fp32":
        first = lines[f"payload per outer iteration, {settings.payload}"]
        assert first.startswith(f"{payloads[0]:,} B")
    if "groups" in changes:
        final = lines["payload per outer iteration at the keep ratio"]
        assert final.startswith(f"{payloads[-1]:,} B")
        assert f"{100 * payloads[-1] / dense:.1f} % of dense" in final
        assert payloads[0] > payloads[1] > payloads[2]


@pytest.mark.mpi(min_size=4)
def test_what_leaves_a_rack_is_told_before():
    settings = make(**SHORT, method="local-sgd", payload="int4", rack_of="3")
    with nodes_of(1, settings.rack_of) as topology:
        text = forecast(settings, topology, NOTHING_KNOWN)
        context = set_up(topology, settings, CPU, SMALL_BUCKETS, Heartbeat())
        *_, record = outer_iterations(topology, context)
        sizes = list(topology.racks.sizes)
    assert f"racks of {sizes} nodes" in text
    told = re.search(r"sent by a rack per outer iteration +([\d,]+) B", text)[1]
    assert int(told.replace(",", "")) == record["bytes"]["racks"]


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"init_from": "none.safetensors"}, "cannot read weights none.safetensors"),
        ({"init_from": "other.safetensors"}, "does not fit the model: conv1.weight"),
        ({"init_from": "whole.safetensors", "init_digest": "0" * 64}, "is not the file of before"),
        ({"loss": "json:none"}, "has no function 'none'"),
    ],
)
def test_first_weights_and_loss_are_looked_at(tmp_path, monkeypatch, changes, words):
    monkeypatch.chdir(tmp_path)
    for name, model in (("whole", "resnet8"), ("other", "resnet8-w4")):
        save_file(build_model(model, Images(32, 10)).state_dict(), f"{name}.safetensors")
    settings = make(model="resnet8", dataset="cifar10", method="dense")
    with nodes_of(1) as topology:
        dry_run(with_overrides(settings, init_from="whole.safetensors"), topology)
        # One rank reads the file.
        refused = WORLD.rank == 0 or "loss" in changes
        with pytest.raises(UserError, match=words) if refused else nullcontext():
            dry_run(with_overrides(settings, **changes), topology)


def test_what_differs_from_the_preset_is_told_as_resolved():
    text = differing_settings(make("thin", epochs=8, keep_ratio=0.25, dry_run=True))
    title, *lines = text.splitlines()
    assert title == "Settings beside those of preset thin for method prunex:"
    found = dict(line.split(maxsplit=1) for line in lines)
    assert found["outer-iterations"] == "32" and found["freeze-iteration"] == "20"
    assert "payload" not in found and "dry-run" not in found
    assert differing_settings(make(method="dgc")).endswith("for method dgc: none.")
    assert "dgc.ratio" in differing_settings(make(method="dgc", dgc_ratio=0.01))
