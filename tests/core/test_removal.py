"""A run whose network becomes smaller, beside the same with zeros in place of what has gone."""

import json
import pickle

import numpy as np
import pytest
import torch
from coupled_nets import dropping_attention
from driving import run_driver
from jobs import run_folder, run_job_here
from nets import CoupledNet, RandomStream
from nodes import WORLD, nodes_of
from small_runs import COMMON as RUN_COMMON
from torch import nn
from torchvision.models import VisionTransformer

from prunex_mpi import export
from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.core.mask_choice import try_removal
from prunex_mpi.models import batchnorm
from prunex_mpi.models.inputs import Images
from prunex_mpi.models.slim import CallsCorrected
from prunex_mpi.models.standalone import load
from prunex_mpi.pruning.shrink import cut
from prunex_mpi.run.finished_run import read_finished_run

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

COMMON = {
    "groups": ("coupled",),
    "outer_iterations": 5,
    "lr": 0.05,
    "lr_schedule": "constant",
    "warmup_ratio": 0.0,
    "bn": "average",
}
PRUNEX = {
    **{"method": "prunex", "warmup_iterations": 1, "keep_ramp_iterations": 2},
    **{"freeze_iteration": 3, "rho1": 0.02, "rho2": 0.005, "residuals": "off"},
}
ONE_SHOT = {"method": "one-shot", "one_shot_prune_iteration": 3}
SCENARIOS = {
    "prunex": PRUNEX,
    "outer": {**PRUNEX, "node_sync": "outer", "clip_grad": 0.5},
    "adamw int4": {**PRUNEX, "optimizer": "adamw", "lr": 0.002, "payload": "int4"},
    "behind": {**PRUNEX, "overlap_steps": 1, "evaluate_every": 5, "payload": "int4"},
    "one-shot": {**ONE_SHOT, "score": "gates", "payload": "bf16"},
}
COMPILED = {**PRUNEX, "compile": True}


class Attention(nn.Module):
    """A vision transformer of two heads: LayerNorm, attention and added positions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = VisionTransformer(6, 3, 1, 2, 8, 12, num_classes=5)

    def forward(self, images):
        return self.net(images)


def run(settings, ranks_per_node, make_model):
    """Return (mask, z, momentum, statistics, bytes, loss) of each outer iteration, and the end."""
    torch.manual_seed(2)
    found = []
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        model = make_model().double()
        for record, state in run_driver(topology, settings, model, stream):
            momentum = state.optimizer.first_moment
            statistics = torch.empty_like(state.stats)
            batchnorm.read_plain_(state.bn_modules, statistics)
            kept = state.message.stats_kept
            vectors = [state.z.clone(), momentum.clone(), statistics[kept]]
            found.append((state.mask.bits, vectors, record["bytes"], record["train_loss"]))
    return found, state


def marks_of(shape: int, often: int) -> list[pytest.MarkDecorator]:
    """Two ranks are two nodes of one."""
    marks = [pytest.mark.two_ranks] if shape == 1 else []
    return marks if shape == often else [*marks, pytest.mark.long]


@pytest.mark.parametrize(
    ("scenario", "ranks_per_node", "make_model"),
    [
        # Of what a scenario does and what a shape does, one beside the other is enough.
        *(
            pytest.param(name, shape, CoupledNet, marks=marks_of(shape, often))
            for name, often in zip(SCENARIOS, (3, 2, 1, 2, 1), strict=True)
            for shape in sorted({1, 2, often})
        ),
        pytest.param("compiled", 1, CoupledNet, marks=pytest.mark.long),
        ("prunex", 2, Attention),
    ],
)
def test_it_goes_on_as_with_zeros(scenario, ranks_per_node, make_model):
    settings = {**COMMON, **SCENARIOS.get(scenario, COMPILED)}
    whole, state = run(make(**{**settings, "compile": False}), ranks_per_node, make_model)
    small, smaller = run(make(**settings, remove_dropped=True), ranks_per_node, make_model)
    assert smaller.theta.numel() < 0.8 * state.theta.numel()
    assert smaller.removes and smaller.scratch.numel() == smaller.theta.numel()
    # As it computes in float64, int4 rounds alike but where a value is between two levels.
    near = {"rtol": 1e-9, "atol": 1e-11}
    for k, (masked, removed) in enumerate(zip(whole, small, strict=True), 1):
        assert np.array_equal(masked[0], removed[0])
        inside = masked[2].pop("intra"), removed[2].pop("intra")
        # Of the smaller plan the leaders agree anew.
        agreed = masked[2].pop("control"), removed[2].pop("control")
        assert agreed[0] == agreed[1] or k == 4
        # Gradients are averaged in the node: of what is left.
        assert inside[1] < inside[0] if k > 3 and inside[0] else inside[0] == inside[1]
        assert masked[2] == removed[2], k
        assert masked[3] == pytest.approx(removed[3], rel=1e-9)
        for flat, left in zip(masked[1], removed[1], strict=True):
            if k > 3 and flat.numel() == state.theta.numel():
                flat = cut(flat, state.layout, state.groups.coupling, ~masked[0])
            torch.testing.assert_close(left, flat, **near)


RUN = {
    **RUN_COMMON,
    **{"model": "resnet8-w4", "groups": ("coupled",), "outer_iterations": 6, "local_steps": 3},
    **{"freeze_iteration": 3, "warmup_iterations": 0, "keep_ramp_iterations": 2, "lr": 0.05},
    **{"progress": "off", "val_split": 0.25, "model_ema_decay": 0.5},
}


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    "model",
    [
        "resnet8-w4",
        *(
            pytest.param(f"coupled_nets:{model}", marks=pytest.mark.long)
            for model in ("swin_v2", "own_attention")
        ),
    ],
)
def test_what_is_delivered_is_the_smaller_network(model):
    logits, parts, tests = [], [], []
    settings = {**RUN, "model": model, "image_size": 16 if "coupled_nets" in model else 8}
    with run_folder() as folder:
        for remove in (False, True):
            run = folder / str(remove)
            assert run_job_here(make(**settings, run_dir=str(run), remove_dropped=remove)) == 0
            WORLD.Barrier()
            summary = json.loads((run / "summary.json").read_text())
            logits.append(summary["delivered"]["probe"])
            assert ("layers" in summary["delivered"]) == remove
            parts.append([summary[key] for key in ("parameters", "parameters_kept", "density")])
            tests.append(summary["test_loss"])
            network = read_finished_run(run, with_data=False, given=(model,)).model
            size = sum(p.numel() for p in network.parameters())
            assert size == summary["parameters_kept" if remove else "parameters"]
        if WORLD.rank == 0:
            assert export.main([str(run), "--repeat", "0", "--model", model]) == 0
            found = load(run / "model")
            # More goes where a channel that is left is constant.
            assert sum(p.numel() for p in found.parameters()) <= size
            images = torch.randn(3, 3, settings["image_size"], settings["image_size"])
            with torch.no_grad():
                apart = found.double()(images.double()) - network.double()(images.double())
            assert float(apart.abs().max()) < 1e-9
    assert parts[0] == parts[1]
    assert tests[1] == pytest.approx(tests[0], rel=1e-4)
    assert logits[1] == pytest.approx(logits[0], rel=1e-3, abs=1e-3)


@pytest.mark.two_ranks
def test_what_drops_out_goes_on_to_after_the_removal():
    made = []

    def make_model():
        made.append(dropping_attention(5, 6))
        return made[0]

    _, state = run(make(**{**COMMON, **PRUNEX}, remove_dropped=True), 2, make_model)
    assert state.theta.numel() < state.whole.layout.numel
    (model,) = made
    assert all(isinstance(attention, CallsCorrected) for attention in model.attentions)
    images = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    assert not torch.equal(model.train()(images), model(images))
    assert torch.equal(model.eval()(images), model(images))
    # As `torch.save` and other processes do.
    again = pickle.loads(pickle.dumps(model))
    assert all(isinstance(attention, CallsCorrected) for attention in again.attentions)
    assert torch.equal(again(images), model(images))


class AuxiliaryHead(nn.Module):
    """A second head, whose outputs count while the network trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head, self.other = nn.BatchNorm2d(8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        found = self.head(torch.relu(self.second(x)).mean((2, 3)))
        return found + 0.3 * self.other(x.mean((2, 3))) if self.training else found


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"groups": ("coupled",), "remove_dropped": True}, "leave remove-dropped away"),
        ({"method": "prunetrain"}, "method prunetrain: .* choose another method"),
    ],
    ids=["remove-dropped", "prunetrain"],
)
def test_channels_that_training_alone_reads_are_refused_at_the_beginning(settings, says):
    model = AuxiliaryHead()
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=says) as caught:
        try_removal(make(**settings), model, Images(8))
    assert "in training alone (RuntimeError: mat1 and mat2 shapes cannot" in str(caught.value)
    assert model.training and not model.norm.num_batches_tracked
    assert torch.equal(torch.get_rng_state(), before)
    # With zeros in their place they stay, and by evaluation alone all is well.
    try_removal(make(groups=("coupled",)), model, Images(8))
