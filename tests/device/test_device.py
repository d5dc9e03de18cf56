"""The device path on a GPU that several ranks share, in device memory and in pinned host memory.

`batch/gpu.sh` runs these, and the oracles of all methods with PRUNEX_TEST_DEVICE=cuda.
"""

import json
from functools import cache

import pytest
import torch
from driving import wire_of
from jobs import run_folder, run_job_here
from nodes import NODE_SHAPES, WORLD, nodes_of, numbers, total
from places import BUFFERS, DEVICE
from safetensors.torch import load_file
from small_runs import COMMON
from torch import nn

from mpi4py import MPI

from prunex_mpi.comm import gradients
from prunex_mpi.comm.async_exchange import exchanging_asynchronously
from prunex_mpi.comm.collectives import (
    MPI_TYPES,
    allreduce_,
    allreduce_then_bcast_,
    bcast_,
    build_transport,
    reduce_,
)
from prunex_mpi.config.cli import parse
from prunex_mpi.config.resolve import make
from prunex_mpi.diagnosis import devices
from prunex_mpi.models.layout import build_layout, flatten_

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.cuda,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="PRUNEX_TEST_DEVICE is not cuda"),
]

SIZES = (0, 1, 13, 27, 1000, 1 << 18)
BUCKET_MIB = 2**-8
# Sums of a device's atomics and of MPI may be in another order each time.
CLOSE = {"rel": 1e-4, "abs": 1e-5}


@pytest.fixture(autouse=True, scope="module")
def _settled():
    """Let each run find what the first one has found of MPI, and add up in the same order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "probe", cache(devices.probe))
        patch.setattr(torch.backends.cudnn, "deterministic", True)
        yield


def transport(bucket_mib=BUCKET_MIB):
    return build_transport(DEVICE, bucket_mib, BUFFERS)


@pytest.mark.parametrize("dtype", MPI_TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_collectives_are_those_of_the_cpu(size, dtype):
    mine, everyone = numbers(WORLD.rank, size, dtype), total(size, dtype)
    flat = mine.to(DEVICE, copy=True)
    allreduce_(WORLD, flat, transport())
    assert torch.equal(flat.cpu(), everyone)
    flat = mine.to(DEVICE, copy=True)
    reduce_(WORLD, flat, transport())
    assert torch.equal(flat.cpu(), everyone if WORLD.rank == 0 else mine)
    flat = mine.to(DEVICE, copy=True)
    bcast_(WORLD, flat, transport())
    assert torch.equal(flat.cpu(), numbers(0, size, dtype))


def test_a_union_of_bits_is_that_of_the_cpu():
    bits = torch.full((1000,), 1 << WORLD.rank % 8, dtype=torch.uint8, device=DEVICE)
    allreduce_(WORLD, bits, transport(), MPI.BOR)
    assert bits.cpu().unique().tolist() == [(1 << min(WORLD.size, 8)) - 1]


@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_sums_between_nodes_are_those_of_the_cpu(size, ranks_per_node):
    with nodes_of(ranks_per_node) as topology:
        flat = numbers(topology.node_index, size, torch.float32).to(DEVICE, copy=True)
        allreduce_then_bcast_(topology.leader, topology.node, flat, transport())
        nodes = [numbers(node, size, torch.float32) for node in range(topology.num_nodes)]
        assert torch.equal(flat.cpu(), torch.stack(nodes).sum(0))


def test_a_helper_thread_sends_what_lies_on_the_device():
    # As in a job, not on the default stream (`choose_device`).
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        nodes_of(1) as topology,
        exchanging_asynchronously(topology, True, transport(1.0)) as helper,
    ):
        flat = numbers(WORLD.rank, 1 << 18, torch.float32).to(DEVICE, copy=True)
        helper.begin(lambda: allreduce_(helper.between, flat, helper.transport))
        # The device goes on with other work, for seconds.
        torch.cuda._sleep(1 << 33)
        helper.finish()
        assert not torch.cuda.current_stream().query(), "the helper has waited for the main thread"
        assert torch.equal(flat.cpu(), total(1 << 18, torch.float32))


def test_a_helper_thread_sends_what_was_queued_before():
    flat = torch.zeros(1 << 18, device=DEVICE)
    with (
        nodes_of(1) as topology,
        exchanging_asynchronously(topology, True, transport()) as helper,
    ):
        torch.cuda._sleep(1 << 30)
        flat.copy_(numbers(WORLD.rank, 1 << 18, torch.float32).to(DEVICE))
        helper.begin(lambda: allreduce_(helper.between, flat, helper.transport))
        helper.finish()
        flat.mul_(2)
        assert torch.equal(flat.cpu(), 2 * total(1 << 18, torch.float32))


def test_gradients_are_averaged_while_the_device_computes_others(monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1 << 20)
    found = {}
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).to(device)
        layout = build_layout(model)
        _, grad = flatten_(model, layout)
        link = wire_of(WORLD, build_transport(device, BUCKET_MIB, BUFFERS), "intra")
        averager = gradients.GradientAverager(link, model, layout, grad)
        images = torch.randn(64, 512, generator=torch.Generator().manual_seed(WORLD.rank))
        for step in range(3):
            grad.zero_()
            averager.begin()
            model((step + 1) * images.to(device)).square().mean().backward()
            averager.finish_()
            found.setdefault(device.type, []).append(grad.cpu().clone())
        averager.close()
    for mine, cpu in zip(found[DEVICE.type], found["cpu"], strict=True):
        torch.testing.assert_close(mine, cpu, rtol=1e-3, atol=1e-4 * cpu.abs().max().item())


RUN = {
    **COMMON,
    # Codes travel between nodes alone.
    "ranks_per_node": 1,
    **{"groups": ("coupled",), "freeze_iteration": 3, "warmup_iterations": 0},
    **{"keep_ramp_iterations": 2, "outer_iterations": 5, "progress": "off", "model": "resnet8-w4"},
}
RUNS = {
    "recipe": {},
    "int4": {"payload": "int4", "remove_dropped": True},
    "behind": {"overlap_steps": 1, "residuals": "off", "evaluate_every": 5},
    "fp16": {"amp": "fp16"},
    "bf16, NHWC": {"amp": "bf16", "channels_last": True},
    "dense": {"method": "dense"},
}


def trained(folder, name, **changes):
    """Train into a folder of all ranks; return the losses, and the weights that are delivered."""
    run = folder / name
    own = changes.pop("method", "prunex")
    settings = {k: v for k, v in RUN.items() if own == "prunex" or k in {*COMMON, "progress"}}
    wanted = {**settings, "method": own, **changes, "run_dir": str(run), "checkpoint_every": "2"}
    assert run_job_here(make(**wanted)) == 0
    WORLD.Barrier()
    return losses_of(run), load_file(run / "state.safetensors")


def losses_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train_loss"] for line in lines]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_device_is_that_of_the_cpu(name):
    with run_folder() as folder:
        on_cpu, _ = trained(folder, "cpu", device="cpu", **{**RUNS[name], "amp": "off"})
        where = {"device": DEVICE.type, "mpi_buffers": BUFFERS}
        found, weights = trained(folder, "cuda", **where, **RUNS[name])
        again, _ = trained(folder, "again", **where, **RUNS[name])
        assert again == pytest.approx(found, **CLOSE)
        exact = "amp" not in RUNS[name]
        assert found == pytest.approx(on_cpu, rel=0.01 if exact else 0.1)
        assert all(torch.isfinite(w).all() for w in weights.values())


def test_an_interrupted_run_on_the_device_goes_on():
    with run_folder() as folder:
        where = {"device": DEVICE.type, "mpi_buffers": BUFFERS}
        losses, _ = trained(folder, "run", **where)
        run = folder / "run"
        if WORLD.rank == 0:
            newest = sorted((run / "checkpoints").iterdir())[-1]
            newest.rename(newest.with_name(f"{newest.name}.partial"))
            (run / "summary.json").unlink()
        WORLD.Barrier()
        assert run_job_here(parse(["--resume", "--run-dir", str(run)])) == 0
        WORLD.Barrier()
        assert losses_of(run) == pytest.approx(losses, **CLOSE)
