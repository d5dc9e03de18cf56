"""Flat consensus against a simulation in one process, and what it leaves alone."""

import itertools

import pytest
import torch
from driving import by_name, difference, element_masks, run_driver, simulated
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of
from reference_flat import simulate_flat

from prunex_mpi.config.resolve import make

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

STEPS = 2
RECIPE = {"method": "prunex-flat", "outer_iterations": 5, "warmup_iterations": 1}
RECIPE |= {"keep_ramp_iterations": 2, "freeze_iteration": 4, "lr": 0.05}
RECIPE |= {"lr_schedule": "constant", "warmup_ratio": 0.0, "bn": "average", "rho1": 0.02}
PAPER = {**RECIPE, "warmup_iterations": 0, "keep_ramp_iterations": 0, "theta_start": "theta"}
PAPER |= {"after_freeze": "admm", "weight_decay_in": "z", "weight_decay": 0.01}
PAPER |= {"weight_decay_on": "weights", "penalty": "balance"}
SCENARIOS = {
    "recipe": RECIPE,
    "paper": PAPER,
    "unfrozen-composed": {**PAPER, "freeze_iteration": 0, "groups": ("channel", "filter")},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_program_equals_oracle(scenario):
    settings = make(**SCENARIOS[scenario])
    model = new_net()
    history = simulated(simulate_flat, model, {**vars(settings), "steps": STEPS})
    with nodes_of(1) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        runs = list_of(run_driver(topology, settings, model, stream, STEPS))
    for (record, values, masks), expected in zip(runs, history, strict=True):
        for name, mask in masks.items():
            assert torch.equal(mask, expected.mask.get(name, torch.ones_like(mask))), name
        assert difference(values["z"], expected.z) < 1e-11
        assert difference(values["z_node"], expected.z) < 1e-11
        assert difference(values["theta"], expected.theta[WORLD.rank]) < 1e-11
        gap = {n: expected.z[n] + x - expected.u[WORLD.rank][n] for n, x in values["u"].items()}
        assert difference(gap, expected.z) < 1e-10
        assert not any(x.any() for x in values["v"].values())
        assert record["train_loss"] == pytest.approx(expected.loss, rel=1e-11)
        assert record["bytes"]["payload"] == record["bytes"]["dense"]
        # There are no duals then.
        frozen = 0 < settings.freeze_iteration <= record["iteration"]
        retired = frozen and settings.after_freeze == "local-sgd"
        for column, level in enumerate(("intra_primal", "intra_dual")):
            found = record["residuals"][level]
            total = sum(x[column] ** 2 for x in expected.residuals.values()) ** 0.5
            wanted = None if retired else pytest.approx(total, rel=1e-9, abs=1e-11)
            assert found == wanted
            assert record["residuals"][level.replace("intra", "inter")] == (None if retired else 0)
    assert any(not mask.all() for mask in masks.values())


def list_of(runs):
    """Return (record, {vector: {name: tensor}}, masks) of each outer iteration."""
    found = []
    for record, state in runs:
        vectors = ("z", "z_node", "theta", "u", "v")
        values = {v: by_name(getattr(state, v).clone(), state) for v in vectors}
        found.append((record, values, element_masks(state)))
    return found


@pytest.mark.parametrize("payload", ["fp32", "int4"])
def test_a_group_that_was_pruned_may_come_back_until_the_freeze(payload):
    """The candidate is dense: its projection is that of all weights, not of those kept before."""
    settings = make(**{**PAPER, "lr": 0.5, "freeze_iteration": 0}, payload=payload)
    with nodes_of(1) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        runs = list_of(run_driver(topology, settings, new_net(), stream, STEPS))
    back = [
        bool((later[name] & ~earlier[name]).any())
        for (*_, earlier), (*_, later) in itertools.pairwise(runs)
        for name in earlier
    ]
    assert any(back)
    for _, values, masks in runs:
        assert all(torch.all(values["z"][name][~mask] == 0) for name, mask in masks.items())
