"""The MPI program against the oracle (`reference.py`), and the invariants of the algorithm."""

from types import SimpleNamespace

import driving
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from driving import (
    SMALL_BUCKETS,
    assert_alike_on_all_ranks,
    assert_statistics,
    by_name,
    comms_of,
    difference,
    element_masks,
    make_context,
    node_sizes_of,
)
from nets import CoupledNet, Net, RandomStream
from nodes import WORLD, nodes_of
from reference import simulate
from torch import nn

from mpi4py import MPI

from prunex_mpi.comm.agreement import DIGEST_BYTES
from prunex_mpi.config.resolve import make, with_overrides
from prunex_mpi.methods.hsadmm import intra_node_consensus
from prunex_mpi.pruning.masks import unpack_
from prunex_mpi.settings.fields import PAYLOADS

RESIDUALS = {"intra_primal": 0, "intra_dual": 1, "inter_primal": 2, "inter_dual": 3}
STEPS = 2

RECIPE = {"outer_iterations": 6, "warmup_iterations": 1, "keep_ramp_iterations": 2}
RECIPE |= {"freeze_iteration": 4, "lr": 0.05, "lr_schedule": "constant", "warmup_ratio": 0.0}
RECIPE |= {"bn": "average", "rho1": 0.02, "rho2": 0.005}
PAPER = {**RECIPE, "warmup_iterations": 0, "keep_ramp_iterations": 0, "theta_start": "theta"}
PAPER |= {"node_sync": "outer", "mask_agreement": "or", "after_freeze": "admm"}
PAPER |= {"weight_decay_in": "z", "weight_decay": 1e-3, "weight_decay_on": "weights"}
PAPER |= {"penalty": "balance"}
SCENARIOS = {
    "recipe": RECIPE,
    "recipe-admm-filter-channel": dict(
        RECIPE,
        after_freeze="admm",
        groups=("filter", "channel"),
        weight_decay=0.05,
        weight_decay_on="weights",
        clip_grad=0.3,
    ),
    "recipe-shape-outer": {**RECIPE, "groups": ("shape",), "node_sync": "outer"},
    "paper": PAPER,
    "paper-unfrozen-composed": dict(
        PAPER, weight_decay_on="all", freeze_iteration=0, groups=("channel", "filter")
    ),
}

SCENARIOS |= {
    "recipe-kernel-pattern": {**RECIPE, "groups": ("kernel", "pattern"), "keep_ratio": 0.25},
    "paper-pattern": {**PAPER, "groups": ("pattern",)},
    "recipe-coupled": {**RECIPE, "groups": ("coupled",)},
    "paper-coupled": {**PAPER, "groups": ("coupled",), "freeze_iteration": 5},
}
# What AdamW decays is decoupled, the proximal term is not.
ADAMW = {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.05}
SCENARIOS |= {
    "recipe-adamw": {**RECIPE, **ADAMW},
    "admm-adamw": {**PAPER, **ADAMW, "weight_decay_in": "theta", "freeze_iteration": 4},
}
COUPLED = {**RECIPE, "groups": ("coupled",)}
SCENARIOS |= {f"recipe-{p}": {**COUPLED, "payload": p} for p in PAYLOADS if p != "fp32"}
# CoupledNet has a bias whose gradient is nothing but rounding, of which int2 sends the sign.
SCENARIOS["recipe-int2"] = {**RECIPE, "payload": "int2"}
BEHIND = {"evaluate_every": 100, "residuals": "off", "overlap_steps": 1}
UNION = {**PAPER, "penalty": "fixed", "residuals": "off", "eps_abs": 0.0, "eps_rel": 0.0}
SCENARIOS |= {
    "recipe-behind": {**RECIPE, **BEHIND},
    "recipe-admm-int4-behind": {**COUPLED, **BEHIND, "after_freeze": "admm", "payload": "int4"},
    "recipe-int4-all-behind": {**COUPLED, **BEHIND, "payload": "int4", "overlap_steps": STEPS},
    "union-int8": {**UNION, "payload": "int8"},
    "union-int4-behind": {**UNION, **BEHIND, "groups": ("coupled",), "payload": "int4"},
    "union-behind": {**UNION, **BEHIND},
    # The mask changes in the iteration in which it freezes.
    "recipe-int8-pruned-at-once": dict(
        COUPLED, warmup_iterations=3, keep_ramp_iterations=0, payload="int8"
    ),
}
SCENARIOS["gates-outer"] = {**COUPLED, "score": "gates", "node_sync": "outer"}
# Of 4 nodes in racks: 2 + 2, 3 + 1.
SCENARIOS |= {
    "racks-of-2": {**RECIPE, "rack_of": "2"},
    "racks-of-2-int4": {**COUPLED, "rack_of": "2", "payload": "int4"},
    "racks-of-3-int4-behind": {**COUPLED, **BEHIND, "rack_of": "3", "payload": "int4"},
    "racks-of-3-paper": {**PAPER, "rack_of": "3"},
}
CASES = [(name, torch.float64) for name in SCENARIOS]
# The same code with messages of half the size.
CASES += [(name, torch.float32) for name in ("recipe", "paper")]
# What differs from another scenario in little.
RARELY = (
    *("fp16", "bf16", "int8", "int2", "all-behind", "union-behind", "pruned-at-once", "coupled"),
    *("admm-adamw", "paper-pattern", "recipe-behind", "composed"),
)
# What asks nothing of an MPI that others do not.
ARITHMETIC = (
    *("composed", "gates-outer", "admm-int4-behind", "filter-channel"),
    *("shape-outer", "adamw", "gates", "pattern"),
)


def marks_of(ranks: int, scenario: str, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    if scenario.startswith("racks"):
        return [pytest.mark.long] if scenario.endswith("paper") else []
    rarely = scenario.endswith(RARELY) or "union" in scenario or (scenario, dtype) == CASES[-2]
    # Nodes of every shape are seen by one scenario, the others take turns.
    rarely |= ranks != 2 if dtype == torch.float32 else ranks == 2 and scenario != "recipe"
    if rarely:
        return [pytest.mark.long]
    # Of many leaders: one message of numbers, and one of records.
    asks = ranks == 3 or scenario in ("recipe", "recipe-int4")
    arithmetic = scenario.endswith(ARITHMETIC) or dtype == torch.float32
    return [] if asks and not arithmetic else [pytest.mark.any_mpi]


# Arithmetic is seen on nodes of unequal size, racks on as many nodes as there are.
def shapes_of(scenario: str) -> list[int]:
    if scenario.startswith("racks"):
        return [1]
    return [3] if scenario.endswith(ARITHMETIC) else [1, 2, 3]


SHAPED = [
    pytest.param(ranks, *case, marks=marks_of(ranks, *case))
    for case in CASES
    for ranks in shapes_of(case[0])
]
# In float64, of the weights. In float32 times what it costs the oracle, which the processor says.
EXACT, ROUNDINGS = 1e-11, 8


def run_driver(ranks_per_node, model, stream, settings, loss=F.cross_entropy, steps=STEPS):
    """Yield (record, state, topology) after each outer iteration of the real driver."""
    if ranks_per_node > WORLD.size:
        pytest.skip("covered by a smaller node size: the job has fewer ranks")
    with nodes_of(ranks_per_node, settings.rack_of) as topology:
        for record, state in driving.run_driver(topology, settings, model, stream, steps, loss):
            yield record, state, topology


def start_of(scenario, dtype):
    """Return the network with which a scenario begins."""
    torch.manual_seed(7)
    return (CoupledNet() if make(**SCENARIOS[scenario]).groups == ("coupled",) else Net()).to(dtype)


def simulated(ranks_per_node, scenario, dtype, weights):
    """Return the oracle's history in `dtype` from weights of the type `weights`."""
    settings = make(**SCENARIOS[scenario])
    wanted = {**{k: getattr(settings, k) for k in vars(settings)}, "steps": STEPS}
    wanted["sets"] = CoupledNet.SETS
    wanted["bucket_bytes"] = SMALL_BUCKETS.bucket_bytes
    # Of four patterns one is kept.
    wanted["keep_ratio"] = 0.25 if "pattern" in settings.groups else settings.keep_ratio[0]
    streams = [RandomStream(r, dtype) for r in range(WORLD.size)]
    start = start_of(scenario, weights).to(dtype)
    sizes = node_sizes_of(WORLD.size, ranks_per_node)
    return simulate(start, streams, sizes, F.cross_entropy, SimpleNamespace(**wanted))


@pytest.fixture(scope="module")
def histories(request):
    """Return the oracle's history of every case to come.

    It is all ranks in one process: each rank runs a part of the cases, the others have them from
    there.
    """
    asked = [i.callspec.params for i in request.session.items if "histories" in i.fixturenames]
    cases = [tuple(p[k] for k in ("ranks_per_node", "scenario", "dtype")) for p in asked]
    cases = [(*case, case[-1]) for case in cases if case[0] <= WORLD.size]
    cases += [(*case[:2], torch.float64, case[3]) for case in cases if case[2] == torch.float32]
    mine = {case: simulated(*case) for case in cases[WORLD.rank :: WORLD.size]}
    return {case: found for part in WORLD.allgather(mine) for case, found in part.items()}


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks_per_node", "scenario", "dtype"), SHAPED)
def test_program_equals_oracle(ranks_per_node, scenario, dtype, histories):
    # One node alone is that of two ranks.
    if ranks_per_node > WORLD.size:
        pytest.skip("covered by a smaller node size: the job has fewer ranks")
    settings = make(**SCENARIOS[scenario])
    model = start_of(scenario, dtype)
    exactly = histories[ranks_per_node, scenario, torch.float64, dtype]
    history = histories[ranks_per_node, scenario, dtype, dtype]
    stream = RandomStream(WORLD.rank, dtype)
    runs = run_driver(ranks_per_node, model, stream, settings)
    count = 0
    for (record, state, topology), expected, exact in zip(runs, history, exactly, strict=True):
        count += 1
        tolerance = EXACT
        if dtype == torch.float32:
            costs = [difference(expected.z, exact.z)]
            costs += [difference(*pair) for pair in zip(expected.theta, exact.theta, strict=True)]
            tolerance = ROUNDINGS * max(*costs, torch.finfo(dtype).eps)
        # In fewer bits the duals do not cancel there: what was left over goes with the group.
        assert settings.payload != "fp32" or expected.outside < tolerance
        i, r = topology.node_index, WORLD.rank
        for name, mask in element_masks(state).items():
            assert torch.equal(mask, expected.mask[name]), (count, name)
        assert difference(by_name(state.z, state), expected.z) < tolerance, count
        assert difference(by_name(state.z_node, state), expected.z_node[i]) < tolerance, count
        assert difference(by_name(state.theta, state), expected.theta[r]) < tolerance, count
        scale = {n: x for n, x in expected.z.items()}
        for mine, theirs in ((state.u, expected.u[r]), (state.v, expected.v[i])):
            # Duals are differences of near numbers: their error counts against the weights'.
            gap = {n: scale[n] + x - theirs[n] for n, x in by_name(mine, state).items()}
            assert difference(gap, scale) < 10 * tolerance, count
        assert record["train_loss"] == pytest.approx(expected.loss, rel=tolerance)
        # Norms of such differences, and moments of what the weights make of images.
        large = 10 * tolerance
        norm = sum(float((x.double() ** 2).sum()) for x in expected.z.values()) ** 0.5
        retired = state.consensus_sgd or settings.residuals == "off"
        for level, column in RESIDUALS.items():
            if retired:
                assert record["residuals"][level] is None
                continue
            total = sum(x[column] ** 2 for x in expected.residuals.values()) ** 0.5
            assert record["residuals"][level] == pytest.approx(total, rel=large, abs=large * norm)
        assert_statistics(state, expected.statistics[r].values(), rtol=large, atol=large)
    assert count == settings.outer_iterations


CODES = [payload for payload in PAYLOADS if payload != "fp32"]
# One of records; the others differ in arithmetic alone.
SOME = ("fp32", "int4")


def rarely(payloads):
    """Leave payloads that differ in little to their marker."""
    return [p if p in SOME else pytest.param(p, marks=pytest.mark.long) for p in payloads]


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks_per_node", "groups"),
    [(1, ("coupled",)), (3, ("channel", "filter"))],
)
@pytest.mark.parametrize("payload", rarely(CODES))
def test_duals_in_fewer_bits_add_up_to_what_was_left_over(ranks_per_node, payload, groups):
    """sum_i P_i v_i = N (E_k - E_{k-1}) on the mask, E the sum of what rounding left over."""
    changes = {"after_freeze": "admm", "groups": groups, "payload": payload}
    settings = make(**{**RECIPE, **changes})
    torch.manual_seed(3)
    model = CoupledNet().double() if groups == ("coupled",) else Net().double()
    stream = RandomStream(WORLD.rank, torch.float64)
    before, left_over = None, False
    for _, state, _ in run_driver(ranks_per_node, model, stream, settings):
        rest = torch.zeros_like(state.theta)
        unpack_(state.message.residual, state.message.plan, rest)
        kept = (~kept_nowhere(state)).numpy()
        sums = np.stack([rest.numpy(), state.v.numpy()])
        WORLD.Allreduce(MPI.IN_PLACE, sums, op=MPI.SUM)
        now, duals = sums * kept
        earlier = np.zeros_like(now) if before is None else before * kept
        assert np.abs(duals - WORLD.size * (now - earlier)).max() < 1e-12
        before = now
        left_over |= bool(now.any())
    # A node alone sends nothing.
    assert left_over == (ranks_per_node < WORLD.size)


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks_per_node", "overlap_steps"), [(1, 1), (3, 0)])
@pytest.mark.parametrize("payload", rarely(PAYLOADS))
def test_z_is_the_same_bits_on_all_ranks(ranks_per_node, payload, overlap_steps):
    settings = make(**{**COUPLED, **BEHIND, "payload": payload, "overlap_steps": overlap_steps})
    torch.manual_seed(3)
    stream = RandomStream(WORLD.rank, torch.float32)
    for _, state, _ in run_driver(ranks_per_node, CoupledNet(), stream, settings):
        for tensor in (state.z, torch.from_numpy(state.mask.bits.astype(np.uint8))):
            assert_alike_on_all_ranks(tensor)
        assert state.position.in_flight or not state.z[kept_nowhere(state)].any()


def kept_nowhere(state):
    """Return where the mask in force has nothing."""
    kept = torch.ones_like(state.theta)
    state.mask.apply_(kept)
    return kept == 0


class Quadratic:
    """One full batch for ever: f_ij(W) = mean |W x - t|^2 / 2 over this rank's samples."""

    waited = 0.0

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(50 + rank)
        self.x = torch.randn(40, 6, generator=generator, dtype=torch.float64)
        truth = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        noise = torch.randn(40, 4, generator=generator, dtype=torch.float64)
        self.t = self.x @ truth.T + 0.5 * noise

    def next(self):
        return self.x.view(-1, 6, 1, 1), self.t


class Linear1x1(nn.Module):
    """A 1x1 convolution; the fixed layer behind it makes the convolution's filters prunable."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 1, bias=False)
        self.out = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.out.weight.copy_(torch.eye(4))
        self.out.weight.requires_grad_(False)

    def forward(self, x):
        if x.shape[1] != self.conv.in_channels:
            # The blank image by which a network is looked at before it trains.
            x = x.new_zeros(len(x), self.conv.in_channels, 1, 1)
        return self.out(self.conv(x).flatten(1))


CONVEX = {"preset": "paper", "penalty": "fixed", "groups": ("filter",), "lr": 0.5}
CONVEX |= {"momentum": 0.0, "rho1": 0.7, "rho2": 0.7}


def half_squares(outputs, targets):
    return 0.5 * ((outputs - targets) ** 2).sum(dim=1).mean()


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks_per_node", "keep"),
    [
        (3, 0.5),
        *(pytest.param(n, 1.0, marks=pytest.mark.long) for n in (1, 2, 3, 4)),
        *(pytest.param(n, 0.5, marks=pytest.mark.long) for n in (1, 2, 4)),
    ],
)
def test_strongly_convex_optimum(ranks_per_node, keep):
    """The fixed point solves (1/N) sum grad f_ij + lambda z = 0 on the support, for any P_i."""
    decay = 0.1
    changes = {"outer_iterations": 100, "keep_ratio": (keep,), "freeze_iteration": 1}
    settings = make(**CONVEX, **changes, weight_decay=decay, eps_abs=0.0, eps_rel=0.0)
    torch.manual_seed(0)
    model = Linear1x1().double()
    with torch.no_grad():
        model.conv.weight.zero_()
    stream = Quadratic(WORLD.rank)
    runs = run_driver(ranks_per_node, model, stream, settings, loss=half_squares, steps=10)
    state = [state for _, state, _ in runs][-1]
    everyone = [Quadratic(r) for r in range(WORLD.size)]
    gram = sum(q.x.T @ q.x / 40 for q in everyone) / WORLD.size
    cross = sum(q.t.T @ q.x / 40 for q in everyone) / WORLD.size
    optimum = cross @ torch.linalg.inv(gram + decay * torch.eye(6, dtype=torch.float64))
    kept = torch.from_numpy(state.mask.bits)
    assert int(kept.sum()) == round(4 * keep)
    optimum[~kept] = 0
    assert float((state.z.view(4, 6) - optimum).abs().max()) < 1e-8


def converge(**changes):
    """Run the quadratic problem on nodes of one rank until it stops; return records and state."""
    usual = {"outer_iterations": 200, "freeze_drift": -1.0, "eps_abs": 1e-5, "eps_rel": 1e-5}
    settings = make(**{**CONVEX, **usual, **changes})
    torch.manual_seed(0)
    model = Linear1x1().double()
    stream = Quadratic(WORLD.rank)
    steps = list(run_driver(1, model, stream, settings, loss=half_squares, steps=10))
    return [record for record, _, _ in steps], steps[-1][1]


@pytest.mark.any_mpi
@pytest.mark.two_ranks
@pytest.mark.mpi
@pytest.mark.parametrize("agreement", ["or", "vote"])
def test_convergence_before_the_freeze_delivers_voted_masks(agreement):
    """A union is voted on once more; then the run stops with exactly alpha groups."""
    records, state = converge(mask_agreement=agreement, freeze_iteration=0)
    assert records[-1]["status"] == "converged"
    assert 2 < len(records) < 200
    assert not state.frozen
    assert int(state.mask.bits.sum()) == 2
    # Energies are four times eight bytes, packed masks one.
    voted = [r["bytes"]["mask"] > 8 for r in records]
    assert voted[-1] and all(voted) == (agreement == "vote")


@pytest.mark.any_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("freeze", [3, 5])
def test_no_run_stops_before_its_masks_are_those_it_delivers(freeze):
    """Whatever the tolerances; the keep ratio is reached in iteration 3."""
    ramp = {"warmup_iterations": 1, "keep_ramp_iterations": 2}
    records, state = converge(freeze_iteration=freeze, eps_abs=1e9, **ramp)
    assert [record["status"] for record in records] == ["running"] * (freeze - 1) + ["converged"]
    assert state.frozen
    assert int(state.mask.bits.sum()) == 2


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_residuals_that_are_not_asked_for_change_nothing_else():
    found = {}
    for residuals in ("every", "evaluate", "off"):
        torch.manual_seed(5)
        # Nothing is tested here, so that nothing is evaluated either.
        settings = make(**{**PAPER, "penalty": "fixed", "eps_abs": 0.0, "eps_rel": 0.0})
        settings = with_overrides(settings, residuals=residuals)
        stream = RandomStream(WORLD.rank, torch.float64)
        nodes = 2 if WORLD.size > 1 else 1
        steps = list(run_driver(nodes, Net().double(), stream, settings))
        found[residuals] = steps[-1][1].z.clone(), steps[-1][1].rho1.copy()
        asked = residuals == "every"
        for record, _, _ in steps:
            assert all((x is not None) == asked for x in record["residuals"].values())
            assert record["rho1"] > 0
    for z, rho1 in found.values():
        assert torch.equal(z, found["every"][0])
        assert np.array_equal(rho1, found["every"][1])


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_ranks_of_a_node_that_differ_go_on_from_their_leaders_variables():
    """As after sums of gradients that have not the same bits on all ranks."""
    settings = make(**{**RECIPE, "node_sync": "step"})
    torch.manual_seed(3)
    context = make_context(settings, Net().double(), RandomStream(WORLD.rank, torch.float64))
    state = context.state
    state.u.normal_()
    with nodes_of(3) as topology:
        node = comms_of(topology).node
        expected = intra_node_consensus(node, state, settings).clone()
        statistics = 8 * state.stats.numel() if topology.node_size > 1 else 0
        assert node.traffic.intra == statistics
        momentum = state.optimizer.first_moment.fill_(topology.node.rank)
        if topology.node.rank == topology.node_size - 1 and topology.node_size > 1:
            state.theta[5] = torch.nextafter(state.theta[5], torch.tensor(9.0).double())
        found = intra_node_consensus(node, state, settings)
        assert torch.equal(found, expected)
        # Both variables have come over, and what would make them differ at the next step.
        over = 8 * (3 * state.layout.numel + state.stats.numel() + 1)
        three = over if topology.node_size > 1 else 0
        digests = 2 * DIGEST_BYTES if topology.node_size > 1 else 0
        assert node.traffic.intra == 2 * statistics
        assert state.position.traffic.control == digests
        assert node.traffic.control == three
        assert not momentum.any() or not three
        intra_node_consensus(node, state, settings)
        assert node.traffic.control == three


@pytest.mark.any_mpi
@pytest.mark.mpi
def test_masks_freeze_once_they_have_settled():
    records, state = converge(freeze_iteration=0, freeze_drift=0.0, eps_rel=0.0)
    first_frozen = next(r["iteration"] for r in records if r["frozen"])
    quiet = [r["mask_drift"] == 0 for r in records[: first_frozen - 1]]
    assert quiet[-3:] == [True] * 3 and not all(quiet[-4:])
    assert state.frozen
