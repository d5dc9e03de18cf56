"""The arithmetic of the phases: updates, residuals, penalties, and groups that z has dropped."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunex_mpi.config.resolve import make
from prunex_mpi.core.admm import (
    NormSums,
    add_pull_,
    balanced,
    compute_residuals,
    decay_of_layers,
    find_anchor,
    update_duals,
    weigh_candidate,
)
from prunex_mpi.core.state import State, build_state
from prunex_mpi.models import layout as layouts
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.groups import Groups

LENGTHS = (1, 7, 40, 10**6)
EVEN, UNEVEN = np.full(4, 0.5), np.array([0.5, 0.25, 3.0, 0.5])


@pytest.fixture(params=LENGTHS)
def state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> State:
    """Return variables of noise, in float64, cut into tiles of one length."""
    monkeypatch.setattr(layouts, "CPU_TILE", request.param)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7)).double()
    state = build_state(model, build_layout(model), Groups((), (), 0, ()), make())
    for flat in (state.theta, state.u, state.v, state.z_node, state.z, state.scratch):
        flat.normal_()
    return state


def spread(state: State, values: np.ndarray) -> Tensor:
    numels = [segment.numel for segment in state.layout.segments]
    return torch.from_numpy(np.repeat(values, numels))


@pytest.mark.parametrize("rho", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(("rate", "on"), [(0.0, "all"), (0.1, "all"), (0.1, "weights")])
def test_the_candidate_weighs_mean_and_consensus(state, rho, rate, on):
    decays = decay_of_layers(make(weight_decay=rate, weight_decay_on=on), state.layout)
    # Weights and biases by turns.
    assert decays.tolist() == [rate, rate * (on == "all")] * 2
    decay = spread(state, decays)
    state.rho1, state.rho2 = rho, 0.3 * rho
    rho1, rho2 = spread(state, rho), spread(state, 0.3 * rho)
    inertia = rho2 * (state.z - state.v)
    total = 3 * (state.theta + state.u)
    expected = (rho1 * (state.theta + state.u) + inertia) / (decay + rho1 + rho2)
    found = weigh_candidate(state, decays, 1)
    assert found is state.scratch
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    state.scratch.copy_(total)
    found = weigh_candidate(state, decays, 3, state.scratch)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("rho", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_the_pull_is_that_of_equation_8_and_exactly_zero_where_theta_is_there(state, rho):
    """AdamW makes whole steps of the rounding that rho theta - rho (z_i - u) would leave."""
    state.rho1 = rho
    state.grad.zero_()
    add_pull_(state, find_anchor(state))
    per_parameter = np.repeat(rho, [s.numel for s in state.layout.segments])
    wanted = torch.from_numpy(per_parameter) * (state.theta - state.z_node + state.u)
    torch.testing.assert_close(state.grad, wanted, rtol=1e-12, atol=1e-14)
    state.theta.copy_(state.z_node)
    state.u.zero_()
    state.grad.zero_()
    add_pull_(state, find_anchor(state))
    assert not state.grad.any()


def test_duals_take_over_the_gaps_and_norms_are_of_the_new_ones(state):
    gaps = state.theta - state.z_node, state.z_node - state.z
    u, v = state.u + gaps[0], state.v + gaps[1]
    old = state.u.clone(), state.v.clone()
    moved_node, moved = np.ones(4), np.zeros(4)
    norms = update_duals(state, moved_node, moved)
    assert torch.equal(state.u, u) and torch.equal(state.v, v)
    assert norms.z_node_step is moved_node and norms.z_step is moved
    rest = [row for row in norms if row is not moved_node and row is not moved]
    measured = (gaps[0], state.theta, state.z_node, u, gaps[1], state.z, v)
    for row, flat in zip(rest, measured, strict=True):
        expected = [float(view.square().sum()) for view in state.layout.views(flat)]
        np.testing.assert_allclose(row, expected, rtol=1e-13)

    state.u.copy_(old[0])
    state.v.copy_(old[1])
    assert update_duals(state, None, None) is None
    assert torch.equal(state.u, u) and torch.equal(state.v, v)


RANKS = 4
SETTINGS = make()


@pytest.mark.parametrize(
    ("gap", "scale", "against", "threshold"),
    [
        ("theta_minus_z_node", 1.0, {"theta": 9.0, "z_node": 4.0}, 3.0),
        ("theta_minus_z_node", 1.0, {"theta": 4.0, "z_node": 9.0}, 3.0),
        ("z_node_step", 0.5, {"u": 16.0}, 0.5 * 4.0),
        ("z_node_minus_z", 1.0, {"z_node": 25.0, "z": 4.0}, 5.0),
        ("z_node_minus_z", 1.0, {"z_node": 4.0, "z": 25.0}, 5.0),
        ("z_step", 0.25, {"v": 36.0}, 0.25 * 6.0),
        # The root of 4 ranks times 4 elements, and as much by the absolute tolerance.
        ("z_step", 0.25, {}, 4.0),
    ],
)
def test_thresholds_are_those_of_the_variables_and_scaled_duals(gap, scale, against, threshold):
    others = {name: np.array([square]) for name, square in against.items()}
    sums = NormSums(*np.zeros((9, 1)))._replace(**others)
    for factor, expected in ((0.99, True), (1.01, False)):
        # The residual is `scale` times the gap, and a tenth of the threshold is allowed.
        square = (factor * 0.1 * threshold / scale) ** 2
        found = compute_residuals(
            sums._replace(**{gap: np.array([square])}),
            np.array([4.0]),
            RANKS,
            np.array([0.5]),
            np.array([0.25]),
            replace(SETTINGS, eps_abs=0.0 if against else 0.1, eps_rel=0.1),
        )
        assert found.converged is expected


PRIMAL = np.array([100.0, 10.0, 1.0, 1.0, 0.0, 0.0])
DUAL = np.array([1.0, 1.0, 10.0, 100.0, 0.0, 1.0])


def penalty(rho: float):
    return balanced(np.full(6, rho), PRIMAL, DUAL)


def test_balance_moves_only_beyond_a_ratio_of_ten():
    assert penalty(1.0).tolist() == [2.0, 1.0, 1.0, 0.5, 1.0, 0.5]


def test_balance_is_clamped_to_both_limits():
    assert penalty(8.0).tolist() == [10.0, 8.0, 8.0, 4.0, 8.0, 4.0]
    assert penalty(1.5e-6).min() == 1e-6
