"""Methods that communicate at each step, against a simulation in one process."""

import copy
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from driving import (
    COMMON,
    SHAPES,
    STEPS,
    STEPS_PER_EPOCH,
    assert_alike_on_all_ranks,
    assert_like_oracle,
    by_name,
    difference,
    make_context,
    run_driver,
    simulated,
)
from nets import CoupledNet, RandomStream, new_net
from nodes import WORLD, nodes_of
from places import DEVICE
from reference_rivals import CONSTANTS, simulate_per_step
from torch import nn

from prunex_mpi.base.errors import Diverged, log
from prunex_mpi.comm.agreement import VERDICT_BYTES
from prunex_mpi.config.resolve import make
from prunex_mpi.core.memory import shared
from prunex_mpi.methods import declared
from prunex_mpi.run.supervision import outer_iterations

pytestmark = pytest.mark.mpi

OF_WEIGHTS = {"weight_decay": 0.05, "weight_decay_on": "weights"}
METHODS = {
    "dense": OF_WEIGHTS,
    "topk": {"topk_ratio": 0.05},
    # Two steps of warm-up, and beyond; every ninth element of the large layers is drawn.
    "dgc": {"dgc_ratio": 0.1, "dgc_warmup_epochs": 1, **OF_WEIGHTS},
    "dgc, no warm-up": {"dgc_ratio": 0.1, "dgc_warmup_epochs": 0},
    "powersgd": {},
    "omnireduce": {"omnireduce_block_size": 16, "omnireduce_block_ratio": 0.2},
    "omnireduce, all": {"omnireduce_block_size": 16, "omnireduce_block_ratio": 1.0},
    "spardl": {"spardl_ratio": 0.05},
    "fp16": {},
    "bf16": {},
    "terngrad": {},
    # The learning rate is that of all here, a hundredth of it on the scale of SGD.
    "adacgd": {},
    "adacgd, averaged": {"adacgd_average": 0.3},
    "lion": {"weight_decay": 0.1, "lr": 0.0005},
}
# What suits a small network in place of the authors' constants.
SMALL = {"dgc": {"SAMPLE": 0.05}, "adacgd": {"LEVELS": (0.1, 0.3, 0.6), "ZETA": 0.5}}
# All others as they are by default; what prunes or drifts has a file of its own.
COVERED = {"pactrain", "prunetrain", "clicktrain", "gossip"}
COVERED |= {name.partition(",")[0] for name in METHODS}
PER_STEP = [method for method in declared.METHODS if method.per_step]
METHODS |= {m.name: {} for m in PER_STEP if m.name not in COVERED}
AGGREGATIONS = ("flat", "hierarchical")


def once_for_nodes():
    """Yield aggregation, ranks per node and method.

    Leaders call among themselves what all ranks do in "flat": once for both MPIs, on one shape, and
    of each method in one way.
    """
    for shape, name in product(SHAPES, METHODS):
        marks = [pytest.mark.any_mpi] if shape[0] == "hierarchical" else []
        if shape == SHAPES[1] or (marks and "," in name):
            marks.append(pytest.mark.long)
        yield pytest.param(*shape, name, marks=marks)


@pytest.fixture(autouse=True)
def small_constants(monkeypatch):
    """Let program and oracle have constants that suit a small network."""
    for name, constants in SMALL.items():
        for key, value in constants.items():
            monkeypatch.setattr(f"prunex_mpi.methods.{name}.{key}", value)
            monkeypatch.setitem(CONSTANTS[name], key, value)


def settings_of(name, aggregation, **changes):
    """Return the settings of an entry of METHODS; skip the test where they are refused."""
    if name == "parallax" and aggregation == "flat":
        pytest.skip("its leaders speak for nodes")
    return make(**{**changes_of(name), "aggregation": aggregation, **changes})


def changes_of(name):
    """Return the settings of an entry of METHODS, which begins with its method."""
    return {**COMMON, "method": name.partition(",")[0], **METHODS[name]}


@pytest.mark.parametrize(("aggregation", "ranks_per_node", "method"), [*once_for_nodes()])
def test_program_equals_oracle(aggregation, ranks_per_node, method):
    settings = settings_of(method, aggregation)
    wanted = {**vars(settings), "steps": STEPS, "steps_per_epoch": STEPS_PER_EPOCH}
    model = new_net(method=method)
    history = simulated(simulate_per_step, model, wanted, ranks_per_node)
    with nodes_of(ranks_per_node) as topology:
        stream = RandomStream(WORLD.rank, torch.float64)
        runs = run_driver(topology, settings, model, stream)
        for (record, state), expected in zip(runs, history, strict=True):
            assert_like_oracle(record, state, expected)
            assert record["density"] == 1.0
    assert record["status"] == "completed"


class Shares:
    """A rank's part of batches that one process sees whole; unlike the ranks' own streams."""

    waited = 0.0

    def __init__(self, rank, size, dtype):
        self.stream, self.rank, self.size = RandomStream(99, dtype), rank, size

    def next(self):
        images, labels = self.stream.next()
        return images[self.rank :: self.size], labels[self.rank :: self.size]


@pytest.mark.any_mpi
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_dense_is_the_optimizer_on_the_large_batch(aggregation, optimizer):
    """Without BatchNorm, the mean of the ranks' gradients is that of the whole batch."""
    torch.manual_seed(3)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 5)
    # In float64: gradients of the whole batch and means of its parts are sums in another order.
    model = nn.Sequential(*layers).double()
    alone = copy.deepcopy(model)
    changes = {**COMMON, "method": "dense", "aggregation": aggregation, "optimizer": optimizer}
    changes |= {"beta2": 0.99} if optimizer == "adamw" else {}
    settings = make(**changes, **OF_WEIGHTS, clip_grad=0.1)
    with nodes_of(3) as topology:
        stream = Shares(WORLD.rank, WORLD.size, torch.float64)
        for _, state in run_driver(topology, settings, model, stream):
            found = by_name(state.z, state)
    whole = RandomStream(99, torch.float64)
    kinds = {
        "sgd": partial(torch.optim.SGD, momentum=0.9),
        "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.99)),
    }
    matrices = [p for p in alone.parameters() if p.dim() > 1]
    vectors = [p for p in alone.parameters() if p.dim() == 1]
    decays = {"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}
    steps = kinds[optimizer](decays, lr=0.05)
    for _ in range(2 * STEPS):
        images, labels = whole.next()
        steps.zero_grad()
        F.cross_entropy(alone(images), labels).backward()
        assert nn.utils.clip_grad_norm_(alone.parameters(), 0.1) > 0.1
        steps.step()
    assert difference(found, {n: p.detach() for n, p in alone.named_parameters()}) < 1e-11


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("method", "amp"), [("dense", "fp16"), ("pactrain", "bf16"), ("prunetrain", "fp16")]
)
def test_with_mixed_precision_all_ranks_stay_alike(method, amp):
    changes = {
        "pactrain": {"pactrain_score": "magnitude", "keep_ratio": (0.3,)},
        "prunetrain": {
            **{"prunetrain_reconfigure_every": 2, "prunetrain_lasso_ratio": 0.6},
            **{"prunetrain_threshold": 0.25, "outer_iterations": 5},
        },
    }
    wanted = {**COMMON, "aggregation": "hierarchical", **changes.get(method, {})}
    settings = make(method=method, amp=amp, **wanted)
    model = CoupledNet() if method == "prunetrain" else new_net(torch.float32)
    with nodes_of(2) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        for record, state in run_driver(topology, settings, model, stream):
            assert_alike_on_all_ranks(state.theta)
            assert np.isfinite(record["train_loss"])
    assert (record["density"] < 1) == (method != "dense")


@pytest.mark.any_mpi
@pytest.mark.parametrize("method", ["dense", "powersgd"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_ranks_whose_weights_differ_go_on_from_those_of_the_first(
    method, aggregation, caplog, monkeypatch
):
    """As after sums of gradients that have not the same bits on all ranks."""
    changes = {**COMMON, **METHODS.get(method, {}), "method": method, "outer_iterations": 4}
    settings = make(**changes, aggregation=aggregation, evaluate_every=2)
    last = WORLD.rank == WORLD.size - 1 and WORLD.size > 1
    monkeypatch.setattr(log, "propagate", True)
    with nodes_of(2) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        control = []
        for record, state in run_driver(topology, settings, new_net(torch.float32), stream):
            control.append(record["bytes"]["control"])
            if record["iteration"] == 1:
                # MPI has no buffers of bool.
                kept = torch.tensor([WORLD.rank == 0, True], device=DEVICE)
                state.memory.declare({"kept": shared(kept)})
            if record["iteration"] == 2 and last:
                state.theta.mul_(1 + 1e-6)
    assert state.memory["kept"].all()
    for tensor in (state.theta, state.z, *state.optimizer.tensors().values()):
        assert_alike_on_all_ranks(tensor)
    # A digest where it is evaluated; then what has come over.
    # Of the first one all have agreed that its first batch can be learnt from.
    assert control[1] - control[0] == 16 * (WORLD.size > 1) - VERDICT_BYTES
    assert control[3] - control[2] >= (16 + 4 * state.layout.numel) * (WORLD.size > 1)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (WORLD.size > 1 and WORLD.rank == 0)
    assert all("weights differed between ranks of the run, by up to" in line for line in said)


@pytest.mark.any_mpi
def test_a_gradient_beyond_float16_is_named_with_the_method_that_can_send_it():
    settings = make(method="fp16", **COMMON)
    with nodes_of(1) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        model = new_net(torch.float32)
        # On the last rank its gradients are so many times as large.
        factor = 1e9 if WORLD.rank == WORLD.size - 1 else 1.0
        loss = lambda outputs, labels: factor * F.cross_entropy(outputs, labels)  # noqa: E731
        stream.steps_per_epoch = STEPS_PER_EPOCH
        context = make_context(settings, model, stream, loss=loss)
        with pytest.raises(Diverged, match=r"beyond 65504, the largest that float16 holds: .*bf16"):
            list(outer_iterations(topology, context))
