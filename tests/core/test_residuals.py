"""Residuals against sums written out rank by rank, and the rules of the penalties."""

import numpy as np
import pytest

from prunex_mpi.core.admm import NormSums, Residuals, compute_residuals, update_penalty

NODES = (3, 1)  # P_i
LAYERS = (4, 9, 1)  # elements of each layer
WORLD = sum(NODES)
EPS_ABS, EPS_REL = 1e-3, 1e-2


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
        s2 = np.sqrt(WORLD) * rho2 * norm(self.z - self.z_old)
        floor = np.sqrt(WORLD * self.elements) * EPS_ABS
        z_nodes = norm(*[w * z for w, z in zip(weights, self.z_node, strict=True)])
        z_all = np.sqrt(WORLD) * norm(self.z)
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
    return compute_residuals(NormSums(*sums), numels, WORLD, rho1, rho2, EPS_ABS, EPS_REL)


def test_residuals_are_those_of_a_naive_computation() -> None:
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


def test_stopping_test_turns_where_the_naive_one_does() -> None:
    rho1, rho2 = np.full(1, 0.7), np.full(1, 0.3)
    answers = []
    for spread in np.geomspace(1e-4, 1e1, 60):
        example = Example(9, float(spread), seed=3)
        _, expected = example.naive(0.7, 0.3)
        assert bool(compute([example], rho1, rho2).converged[0]) == expected
        answers.append(expected)
    assert True in answers
    assert False in answers


@pytest.mark.parametrize("violated", ["intra_primal", "intra_dual", "inter_primal", "inter_dual"])
def test_each_of_the_four_conditions_can_stop_convergence(violated: str) -> None:
    calm = NormSums(*np.zeros((9, 1)))
    gap = {
        "intra_primal": "theta_minus_z_node",
        "intra_dual": "z_node_step",
        "inter_primal": "z_node_minus_z",
        "inter_dual": "z_step",
    }[violated]
    rho = np.ones(1)
    for value, expected in ((4.0 * WORLD, True), (4.1 * WORLD, False)):
        sums = calm._replace(**{gap: np.array([value])})
        # The floor is sqrt(N n) eps_abs with n = 4 and eps_abs = 1.
        found = compute_residuals(sums, np.array([4.0]), WORLD, rho, rho, 1.0, 0.0)
        assert bool(found.converged[0]) is expected


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
    gap: str, scale: float, against: dict[str, float], threshold: float
) -> None:
    others = {name: np.array([square]) for name, square in against.items()}
    sums = NormSums(*np.zeros((9, 1)))._replace(**others)
    for factor, expected in ((0.99, True), (1.01, False)):
        # The residual is `scale` times the gap, and a tenth of the threshold is allowed.
        square = (factor * 0.1 * threshold / scale) ** 2
        found = compute_residuals(
            sums._replace(**{gap: np.array([square])}),
            np.array([4.0]),
            WORLD,
            np.array([0.5]),
            np.array([0.25]),
            0.0,
            0.1,
        )
        assert bool(found.converged[0]) is expected


PRIMAL = np.array([100.0, 10.0, 1.0, 1.0, 0.0, 0.0])
DUAL = np.array([1.0, 1.0, 10.0, 100.0, 0.0, 1.0])


def penalty(rho: float, rule: str, *, factor: float = 2.0, low: float = 1e-6, high: float = 10.0):
    return update_penalty(np.full(6, rho), PRIMAL, DUAL, rule, factor, low, high)


def test_fixed_penalties_stay_even_outside_the_limits() -> None:
    assert np.array_equal(penalty(100.0, "fixed"), np.full(6, 100.0))


def test_balance_moves_only_beyond_a_ratio_of_ten() -> None:
    assert penalty(1.0, "balance").tolist() == [2.0, 1.0, 1.0, 0.5, 1.0, 0.5]
    assert penalty(1.0, "balance", factor=4.0).tolist() == [4.0, 1.0, 1.0, 0.25, 1.0, 0.25]


def test_balance_is_clamped_to_both_limits() -> None:
    found = penalty(1.0, "balance", low=0.75, high=1.25)
    assert found.tolist() == [1.25, 1.0, 1.0, 0.75, 1.0, 0.75]


def test_ramp_grows_up_to_the_limit_whatever_the_residuals() -> None:
    rho, seen = np.full(6, 1.5), []
    for _ in range(4):
        rho = update_penalty(rho, PRIMAL, DUAL, "ramp", 2.0, 1e-6, 10.0)
        assert np.all(rho == rho[0])
        seen.append(float(rho[0]))
    assert seen == [3.0, 6.0, 10.0, 10.0]


@pytest.mark.parametrize("rule", ["fixed", "ramp", "balance"])
def test_the_old_penalties_are_left_alone(rule: str) -> None:
    rho = np.full(6, 1.0)
    update_penalty(rho, PRIMAL, DUAL, rule, 2.0, 1e-6, 10.0)
    assert np.array_equal(rho, np.full(6, 1.0))
