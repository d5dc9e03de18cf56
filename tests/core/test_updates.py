"""The arithmetic of phases 2 and 5, over tiles of any length, against its formulas."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunex_mpi.config.resolve import make
from prunex_mpi.core.admm import decay_of_layers, step_duals_, sum_candidate, weigh_candidate
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
def test_the_candidate_weighs_mean_and_consensus(
    state: State, rho: np.ndarray, rate: float, on: str
) -> None:
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


def test_without_duals_the_candidate_is_theta(state: State) -> None:
    assert torch.equal(sum_candidate(state), state.theta + state.u)
    state.consensus_sgd = True
    assert torch.equal(sum_candidate(state), state.theta)


def test_duals_take_over_the_gaps_and_norms_are_of_the_new_ones(state: State) -> None:
    gaps = state.theta - state.z_node, state.z_node - state.z
    u, v = state.u + gaps[0], state.v + gaps[1]
    old = state.u.clone(), state.v.clone()
    norms = step_duals_(state, True)
    assert torch.equal(state.u, u) and torch.equal(state.v, v)
    measured = (gaps[0], state.theta, state.z_node, u, gaps[1], state.z, v)
    for row, flat in zip(norms, measured, strict=True):
        expected = [float(view.square().sum()) for view in state.layout.views(flat)]
        np.testing.assert_allclose(row, expected, rtol=1e-13)

    state.u.copy_(old[0])
    state.v.copy_(old[1])
    assert step_duals_(state, False) is None
    assert torch.equal(state.u, u) and torch.equal(state.v, v)
