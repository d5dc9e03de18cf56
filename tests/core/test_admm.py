"""The arithmetic of the phases: updates, residuals, penalties, and groups that z has dropped."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prunex_mpi.config.resolve import make
from prunex_mpi.core.admm import (
    NormSums,
    Residuals,
    add_pull_,
    compute_residuals,
    decay_of_layers,
    find_anchor,
    step_duals_,
    update_penalty,
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


NODES = (3, 1)  # P_i
LAYERS = (4, 9, 1)  # elements of each layer
RANKS = sum(NODES)
EPS_ABS, EPS_REL = 1e-3, 1e-2
SETTINGS = replace(make(), eps_abs=EPS_ABS, eps_rel=EPS_REL)


def norm(*arrays: np.ndarray) -> float:
    return float(np.sqrt(sum(np.sum(a * a) for a in arrays)))


class Example:
    """Random variables of one layer on all ranks; the gaps between them scale with `spread`."""

    def __init__(self, elements: int, spread: float, seed: int) -> None:
        draw = np.random.default_rng(seed).standard_normal
        self.elements = elements
        self.z, self.z_old = draw(elements), draw(elements)
        self.z_old = self.z + spread * self.z_old
        self.z_node = [self.z + spread * draw(elements) for _ in NODES]
        self.z_node_old = [z + spread * draw(elements) for z in self.z_node]
        self.v = [draw(elements) for _ in NODES]
        self.theta = [
            [z + spread * draw(elements) for _ in range(p)]
            for p, z in zip(NODES, self.z_node, strict=True)
        ]
        self.u = [[draw(elements) for _ in range(p)] for p in NODES]

    def rank_norms(self, node: int, rank: int) -> list[float]:
        """What one rank contributes, in the order of NormSums."""
        vectors = (
            self.theta[node][rank] - self.z_node[node],
            self.z_node[node] - self.z_node_old[node],
            self.theta[node][rank],
            self.z_node[node],
            self.u[node][rank],
            self.z_node[node] - self.z,
            self.z - self.z_old,
            self.z,
            self.v[node],
        )
        return [float(np.sum(v * v)) for v in vectors]

    def naive(self, rho1: float, rho2: float) -> tuple[list[float], bool]:
        """The four residuals and the stopping test, as algorithm.md writes them."""
        weights = [np.sqrt(p) for p in NODES]
        pairs = [(t, z) for ts, z in zip(self.theta, self.z_node, strict=True) for t in ts]
        r1 = norm(*[t - z for t, z in pairs])
        steps = zip(weights, self.z_node, self.z_node_old, strict=True)
        s1 = rho1 * norm(*[w * (new - old) for w, new, old in steps])
        r2 = norm(*[w * (z - self.z) for w, z in zip(weights, self.z_node, strict=True)])
        s2 = np.sqrt(RANKS) * rho2 * norm(self.z - self.z_old)
        floor = np.sqrt(RANKS * self.elements) * EPS_ABS
        z_nodes = norm(*[w * z for w, z in zip(weights, self.z_node, strict=True)])
        z_all = np.sqrt(RANKS) * norm(self.z)
        v_all = norm(*[w * v for w, v in zip(weights, self.v, strict=True)])
        thetas = norm(*[t for ts in self.theta for t in ts])
        us = norm(*[u for many in self.u for u in many])
        converged = (
            r1 <= floor + EPS_REL * max(thetas, z_nodes)
            and s1 <= floor + EPS_REL * rho1 * us
            and r2 <= floor + EPS_REL * max(z_nodes, z_all)
            and s2 <= floor + EPS_REL * rho2 * v_all
        )
        return [r1, s1, r2, s2], converged


def compute(examples: list[Example], rho1: np.ndarray, rho2: np.ndarray) -> Residuals:
    sums = np.zeros((len(NormSums._fields), len(examples)))
    for number, example in enumerate(examples):
        for node, size in enumerate(NODES):
            for rank in range(size):
                sums[:, number] += example.rank_norms(node, rank)
    numels = np.array([e.elements for e in examples], dtype=np.float64)
    return compute_residuals(NormSums(*sums), numels, RANKS, rho1, rho2, SETTINGS)


def test_residuals_are_those_of_a_naive_computation():
    examples = [Example(n, 1.0, seed) for seed, n in enumerate(LAYERS)]
    rho1, rho2 = np.array([1.5e-3, 0.2, 3.0]), np.array([1.5e-4, 0.1, 7.0])
    found = compute(examples, rho1, rho2)
    for i, example in enumerate(examples):
        expected, converged = example.naive(rho1[i], rho2[i])
        actual = [found.intra_primal, found.intra_dual, found.inter_primal, found.inter_dual]
        np.testing.assert_allclose([a[i] for a in actual], expected, rtol=1e-12)
        assert found.converged[i] == converged
    totals = found.totals()
    assert list(totals) == ["intra_primal", "intra_dual", "inter_primal", "inter_dual"]
    assert totals["inter_dual"] == pytest.approx(norm(found.inter_dual))


def test_stopping_test_turns_where_the_naive_one_does():
    rho1, rho2 = np.full(1, 0.7), np.full(1, 0.3)
    answers = []
    for spread in np.geomspace(1e-4, 1e1, 60):
        example = Example(9, float(spread), seed=3)
        _, expected = example.naive(0.7, 0.3)
        assert bool(compute([example], rho1, rho2).converged[0]) == expected
        answers.append(expected)
    assert True in answers
    assert False in answers


@pytest.mark.parametrize(
    ("gap", "scale", "against", "threshold"),
    [
        ("theta_minus_z_node", 1.0, {"theta": 9.0, "z_node": 4.0}, 3.0),
        ("theta_minus_z_node", 1.0, {"theta": 4.0, "z_node": 9.0}, 3.0),
        ("z_node_step", 0.5, {"u": 16.0}, 0.5 * 4.0),
        ("z_node_minus_z", 1.0, {"z_node": 25.0, "z": 4.0}, 5.0),
        ("z_node_minus_z", 1.0, {"z_node": 4.0, "z": 25.0}, 5.0),
        ("z_step", 0.25, {"v": 36.0}, 0.25 * 6.0),
    ],
)
def test_relative_thresholds_are_those_of_the_variables_and_scaled_duals(
    gap, scale, against, threshold
):
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
            replace(SETTINGS, eps_abs=0.0, eps_rel=0.1),
        )
        assert bool(found.converged[0]) is expected


PRIMAL = np.array([100.0, 10.0, 1.0, 1.0, 0.0, 0.0])
DUAL = np.array([1.0, 1.0, 10.0, 100.0, 0.0, 1.0])


def penalty(rho: float, rule: str):
    return update_penalty(np.full(6, rho), replace(SETTINGS, penalty=rule), (PRIMAL, DUAL))


def test_fixed_penalties_stay_even_outside_the_limits():
    assert np.array_equal(penalty(100.0, "fixed"), np.full(6, 100.0))


def test_balance_moves_only_beyond_a_ratio_of_ten():
    assert penalty(1.0, "balance").tolist() == [2.0, 1.0, 1.0, 0.5, 1.0, 0.5]


def test_balance_is_clamped_to_both_limits():
    assert penalty(8.0, "balance").tolist() == [10.0, 8.0, 8.0, 4.0, 8.0, 4.0]
    assert penalty(1.5e-6, "balance").min() == 1e-6


def test_ramp_grows_up_to_the_limit_whatever_the_residuals():
    rho, seen = np.full(6, 1.5), []
    settings = replace(SETTINGS, penalty="ramp")
    for _ in range(4):
        rho = update_penalty(rho, settings, None)
        assert np.all(rho == rho[0])
        seen.append(float(rho[0]))
    assert seen == [3.0, 6.0, 10.0, 10.0]
