"""What is evaluated and delivered, and the average of z."""

import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from driving import CPU, SMALL_BUCKETS, assert_alike_on_all_ranks
from nodes import NODE_SHAPES, WORLD, nodes_of
from reference_statistics import of_all_ranks
from small_runs import small_run
from torch import Tensor, nn

from prunex_mpi.base.errors import USAGE, Diverged, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.config.resolve import BY_NAME, make
from prunex_mpi.core.evaluation import (
    BEST,
    EMA,
    EMA_COUNT,
    EMA_STATS,
    RECALIBRATION_BATCHES,
    check_divergence,
    check_errors,
    delivered,
    ema_of,
    estimate_statistics,
    evaluate,
    evaluate_on,
    statistics_of_z,
)
from prunex_mpi.core.loop import finish_average_
from prunex_mpi.core.state import PRUNED, Problem, RunContext, build_state, in_place_of_z
from prunex_mpi.core.task import EVALUATION_BATCH
from prunex_mpi.data.batches import BatchStream, ImageFormat, Shard, evaluation_batches
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.groups import Groups
from prunex_mpi.run.supervision import outer_iterations

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]


BATCH_SIZE = 6
PARTIAL = 5  # images left over, on every rank
MEAN, STD = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.25, 0.3])
LOOK = ImageFormat(MEAN, STD, CPU, torch.float64)


def build_model() -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.Dropout(0.5),
        nn.Conv2d(6, 5, 3),
        # Neither its momentum nor what it remembers counts.
        nn.BatchNorm2d(5, momentum=0.3),
        nn.SiLU(),
        nn.Conv2d(5, 4, 1),
        nn.BatchNorm2d(4, eps=1e-3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(values, 0.5, 2.0)
    return model.double()


def images_of(rank: int, batches: int) -> Tensor:
    """Draw one rank's images, brighter and of more contrast the higher the rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = (batches * BATCH_SIZE + PARTIAL, 3, 7, 7)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Later batches are brighter too: which of them count must show.
    trend = torch.linspace(0, 40, len(noise), dtype=torch.float64).view(-1, 1, 1, 1)
    return (40 + 30 * rank + trend + (10 + 10 * rank) * noise).clamp(0, 255).to(torch.uint8)


def context_of(model: nn.Module, shard: Shard, stream: BatchStream | None = None) -> RunContext:
    """Return what a rank works on with `model`, whose images are those of `shard`."""
    state = build_state(model, build_layout(model), Groups((), (), 0, ()), make())
    feed = stream, shard, shard, partial(evaluation_batches, look=LOOK), 1
    problem = Problem(model, model, F.cross_entropy, *feed, MEAN, STD)
    return RunContext(state, problem, make(), SMALL_BUCKETS, Heartbeat())


# More batches than are taken, and fewer; both with a partial one at the end.
@pytest.mark.parametrize(
    ("ranks_per_node", "batches"), [(3, RECALIBRATION_BATCHES + 2), *((n, 3) for n in NODE_SHAPES)]
)
def test_estimated_statistics_equal_the_oracle(ranks_per_node, batches):
    model = build_model()
    wanted = of_all_ranks(
        copy.deepcopy(list(model)),
        [images_of(rank, batches) for rank in range(WORLD.size)],
        BATCH_SIZE,
        RECALIBRATION_BATCHES,
        MEAN,
        STD,
    )
    images = images_of(WORLD.rank, batches)
    shard = Shard(images, torch.zeros(len(images), dtype=torch.int64))
    stream = BatchStream(
        shard, LOOK, batch_size=BATCH_SIZE, seed=1, rank=WORLD.rank, flip=False, pad=0
    )
    context = context_of(model, shard, stream)
    state = context.state
    # The statistics are z's, whatever a rank's theta is.
    state.theta.add_(torch.rand(len(state.theta), dtype=torch.float64), alpha=1 + WORLD.rank)
    theta = state.theta.clone()
    with nodes_of(ranks_per_node) as topology:
        estimate_statistics(topology, context)
    found = [(m.running_mean, m.running_var) for m in state.bn_modules]
    assert len(found) == len(wanted) == 3
    for (mean, variance), (wanted_mean, wanted_variance) in zip(found, wanted, strict=True):
        torch.testing.assert_close(mean, wanted_mean, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(variance, wanted_variance, rtol=1e-11, atol=1e-11)
        assert_alike_on_all_ranks(mean)
        assert_alike_on_all_ranks(variance)
    assert torch.equal(state.theta, theta)


def test_every_batch_of_an_evaluation_is_progress():
    count = 2 * EVALUATION_BATCH + 1
    shard = Shard(images_of(0, 1)[:1].expand(count, -1, -1, -1), torch.zeros(count).long())
    context = context_of(build_model(), shard)
    with nodes_of(1) as topology:
        evaluate(topology, context)
        assert (context.heartbeat.beats, context.heartbeat.step) == (3, 0)
        # Weights that are finite may be too large for a test, as after a high learning rate.
        context.state.z.fill_(torch.finfo(context.state.z.dtype).max)
        with pytest.raises(Diverged, match="test set is not finite; lower the learning rate"):
            evaluate(topology, context)


class AverageOf:
    """Stand in for what averages gradients, which is late on the last rank alone."""

    late = WORLD.rank == WORLD.size - 1

    def finish_(self) -> None:
        pass


@pytest.mark.parametrize("refuse", [lambda *a: check_divergence(*a, 1.0), check_errors])
def test_all_ranks_raise_what_one_has_met_in_its_local_steps(refuse):
    """A node of one rank averages nothing, and so notices nothing."""
    with nodes_of(1) as topology, small_run(topology, "local sgd") as context:
        finish_average_(context, None)
        refuse(topology, context)
        finish_average_(context, AverageOf())
        assert context.stop.failed == AverageOf.late
        with pytest.raises(UserError, match="use_reentrant=False") as caught:
            refuse(topology, context)
        assert not isinstance(caught.value, Diverged) and caught.value.exit_code == USAGE


@pytest.mark.parametrize("what", ["loss", "weights"])
def test_no_rank_leaves_with_what_diverged_on_one(what):
    with nodes_of(1) as topology, small_run(topology, "local sgd") as context:
        # Of the size of a mean loss a part of the steps says nothing.
        context.state.position.loss_sum, context.state.position.first_loss = 1e9, 1.0
        check_errors(topology, context)
        if WORLD.rank == WORLD.size - 1 and what == "loss":
            context.state.position.loss_sum = float("nan")
        elif WORLD.rank == WORLD.size - 1:
            context.state.theta[0] = float("inf")
        with pytest.raises(Diverged, match="not finite in phase local of outer iteration 1"):
            check_errors(topology, context)


@pytest.mark.parametrize("refuse", [lambda *a: check_divergence(*a, 1.0), check_errors])
def test_gradients_that_the_model_itself_has_detached_are_noticed(refuse):
    """They would be in no message and in no step, and training would stand still in silence."""
    with nodes_of(1) as topology, small_run(topology, "local sgd") as context:
        refuse(topology, context)
        if WORLD.rank == WORLD.size - 1:
            context.problem.model.zero_grad(set_to_none=True)
        with pytest.raises(UserError, match=r"the gradient of .* was replaced, as by zero_grad"):
            refuse(topology, context)


DECAY = 0.7
RUN = {"model": "resnet8-w4", "outer_iterations": 6, "local_steps": 3, "lr": 0.05}
RUN |= {"model_ema_decay": DECAY}
# One of float32 beside one of float64.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
FLAT = "flat consensus"
CHANGES: dict[str, dict[str, Any]] = {
    "recipe": {"freeze_iteration": 4, "keep_ramp_iterations": 3},
    "union": {"freeze_iteration": 4, "keep_ramp_iterations": 3, "mask_agreement": "or"},
    FLAT: {"freeze_iteration": 3, "keep_ramp_iterations": 2},
    "behind": {"freeze_iteration": 5, "keep_ramp_iterations": 2, "evaluate_every": 6},
    "local sgd": {},
    "local sgd behind": {"overlap_steps": 1, "evaluate_every": 4},
    "one-shot": {"one_shot_prune_iteration": 3, "groups": ("coupled",)},
    "diloco": {},
    "sparseloco": {},
    "dense": {},
    "topk": {},
    "pactrain": {"pactrain_prune_iteration": 3},
    "prunetrain": {"prunetrain_reconfigure_every": 3, "prunetrain_threshold": 10.0},
}
BASES = {"union": "recipe", "one-shot": "local sgd", "diloco": "local sgd"}
BASES["local sgd behind"] = "local sgd"
# The others are of kinds that these have too.
OFTEN = [(n, 1) for n in ("recipe", FLAT, "behind", "local sgd", "one-shot", "prunetrain")]
OFTEN += [("recipe", 2), ("dense", 2)]
# Those without a mask that changes after the first outer iteration.
CONSTANT = ("local sgd", "local sgd behind", "diloco", "sparseloco", "dense", "topk")


@dataclass
class Seen:
    """A z, the statistics that went with it, and what said then which weights there are."""

    z: Tensor
    statistics: Tensor
    mask: Tensor


class Watching:
    """Take the place of StopAgreement: note every z there is between two local steps."""

    calls = 1

    def __init__(self, context: RunContext) -> None:
        self.context, self.seen, self.last = context, [], context.state.z.clone()

    def reached(self) -> bool:
        state = self.context.state
        if not same(state.z, self.last):
            # It has just arrived: those of the model have gone on.
            self.note(state.stats)
        return False

    def note_record(self) -> None:
        if not same(self.context.state.z, self.last):
            self.note(statistics_now(self.context))

    def note(self, statistics: Tensor) -> None:
        state = self.context.state
        weights = state.memory[PRUNED] if PRUNED in state.memory else torch.zeros(0)
        mask = torch.cat([torch.from_numpy(state.mask.bits), weights.bool()])
        self.last = state.z.clone()
        self.seen.append(Seen(state.z.double(), statistics.double(), mask.clone()))


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def statistics_now(context: RunContext) -> Tensor:
    modules = context.state.bn_modules
    return torch.cat([b for m in modules for b in (m.running_mean, m.running_var)]).clone()


def settings_of(scenario: str, **changes: Any) -> dict[str, Any]:
    found = {**RUN, **CHANGES[scenario], **changes}
    method = scenario if scenario in ("one-shot", "diloco") else None
    return {**found, "method": method} if method else found


def oracle(seen: list[Seen], decay: float) -> tuple[Tensor, Tensor, int]:
    """Return the average of what was seen, of its statistics, and how often it has begun."""
    begins, first = 0, 0
    for i, one in enumerate(seen):
        if i == 0 or not same(one.mask, seen[i - 1].mask):
            begins, first = begins + 1, i
    rest = seen[first:]
    shares = [decay ** (len(rest) - 1)]
    shares += [(1 - decay) * decay ** (len(rest) - 1 - i) for i in range(1, len(rest))]
    assert sum(shares) == pytest.approx(1)
    z = sum(s * one.z for s, one in zip(shares, rest, strict=True))
    statistics = sum(s * one.statistics for s, one in zip(shares, rest, strict=True))
    return z, statistics, begins


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("scenario", "ranks_per_node"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.long)
        for case in product(CHANGES, (1, 2))
        # Of flat consensus every rank is a node.
        if case != (FLAT, 2)
    ],
)
def test_the_average_is_that_of_every_z_since_the_mask_changed(scenario, ranks_per_node):
    # Statistics that are estimated come below.
    average = {} if scenario in BY_NAME and BY_NAME[scenario].per_step else {"bn": "average"}
    changes = settings_of(scenario, **average)
    with (
        nodes_of(ranks_per_node) as topology,
        small_run(topology, BASES.get(scenario, scenario), **changes) as context,
    ):
        watching = Watching(context)
        context = replace(context, stop=watching)
        changed, different = 0, False
        for record in outer_iterations(topology, context):
            watching.note_record()
            changed += record["iteration"] > 1 and record["mask_drift"] > 0
            memory = context.state.memory
            if int(memory[EMA_COUNT]) == 0:
                # The mask has changed, and the first z that lies on it is under way.
                assert context.state.position.in_flight
                continue
            z, statistics, begins = oracle(watching.seen, DECAY)
            torch.testing.assert_close(memory[EMA].double(), z, **CLOSE)
            gone = watching.seen[-1].z == 0
            assert not memory[EMA][gone].any()
            different |= not torch.equal(memory[EMA], context.state.z)
            torch.testing.assert_close(memory[EMA_STATS].double(), statistics, **CLOSE)
            for tensor in (memory[EMA], memory[EMA_STATS]):
                assert_alike_on_all_ranks(tensor)
        assert len(watching.seen) == 6 and different
        assert begins == 1 + changed
        assert (changed > 0) == (scenario not in CONSTANT)


@pytest.mark.two_ranks
@pytest.mark.parametrize("scenario", ["recipe", pytest.param("dense", marks=pytest.mark.long)])
def test_training_does_not_notice(scenario):
    found = []
    for decay in (0.0, DECAY):
        changes = settings_of(scenario, model_ema_decay=decay)
        base = BASES.get(scenario, scenario)
        with nodes_of(2) as topology, small_run(topology, base, **changes) as context:
            losses = [
                [record["train_loss"], record["density"]]
                for record in outer_iterations(topology, context)
            ]
            state = context.state
            vectors = (state.theta, state.z, state.z_node, state.u, state.v)
            buffers = context.problem.model.buffers()
            found.append((losses, [t.clone() for t in (*vectors, *buffers)]))
            assert (EMA in state.memory) == bool(decay)
    (losses, tensors), (others, also) = found
    assert losses == others
    assert all(torch.equal(a, b) for a, b in zip(tensors, also, strict=True))


@pytest.mark.two_ranks
@pytest.mark.parametrize("scenario", ["recipe", "dense", "diloco"])
def test_what_is_judged_and_delivered_is_the_average(scenario):
    base, changes = BASES.get(scenario, scenario), settings_of(scenario)
    with nodes_of(1) as topology, small_run(topology, base, **changes) as context:
        state, test = context.state, context.problem.test
        # Before the first outer iteration there is nothing but the weights that it begins with.
        assert evaluate(topology, context) == evaluate_on(topology, context, test)
        recalibrates = scenario != "dense"
        for record in outer_iterations(topology, context):
            average, statistics = state.memory[EMA].clone(), state.memory[EMA_STATS].clone()
            last = [t.clone() for t in (state.z, *context.problem.model.buffers())]
            of_z = evaluate_on(topology, context, test)
            estimated = recalibrates and not record["frozen"]
            with in_place_of_z(state, average, statistics):
                if estimated and scenario != "recipe":
                    # Also those that are delivered.
                    with statistics_of_z(topology, context):
                        of_average = evaluate_on(topology, context, test)
                        if record["status"] != "running":
                            assert torch.equal(statistics_now(context), statistics)
                elif estimated:
                    continue
                else:
                    of_average = evaluate_on(topology, context, test)
            assert {key: record[f"test_{key}"] for key in ("loss", "accuracy")} == of_average
            if record["iteration"] in (2, 6) and scenario != "recipe":
                assert of_average["loss"] != of_z["loss"]
        with delivered(context):
            assert torch.equal(state.z, average)
            assert torch.equal(statistics_now(context), statistics)
        assert not torch.equal(state.z, average)
        now = [state.z, *context.problem.model.buffers()]
        assert all(torch.equal(a, b) for a, b in zip(last, now, strict=True))


@pytest.mark.two_ranks
def test_statistics_of_a_support_that_stays_are_estimated_on_the_average():
    """Where z's are for good at the freeze, on a mask that was the same before."""
    changes = settings_of("recipe", freeze_iteration=6, keep_ratio=(1.0,))
    with nodes_of(1) as topology, small_run(topology, "recipe", **changes) as context:
        records = list(outer_iterations(topology, context))
        assert records[-1]["frozen"] and records[-1]["mask_drift"] == 0
        with ema_of(context.state), statistics_of_z(topology, context):
            assert torch.equal(statistics_now(context), context.state.memory[EMA_STATS])
            found = evaluate_on(topology, context, context.problem.test)
        assert {key: records[-1][f"test_{key}"] for key in ("loss", "accuracy")} == found


@pytest.mark.two_ranks
@pytest.mark.parametrize("scenario", ["dense", "recipe"])
def test_the_best_is_the_best_average(scenario):
    changes = settings_of(scenario, val_split=0.25, train_samples=80)
    averages: dict[int, Tensor] = {}
    with nodes_of(2) as topology, small_run(topology, scenario, **changes) as context:
        for record in outer_iterations(topology, context):
            averages[record["iteration"]] = context.state.memory[EMA].clone()
        best = int(context.state.position.best[0])
        assert torch.equal(context.state.memory[BEST], averages[best])
        with delivered(context):
            assert torch.equal(context.state.z, averages[best])


def test_an_average_of_what_is_not_finite_is_forgotten_with_it():
    with nodes_of(1) as topology, small_run(topology, "dense", **RUN) as context:
        iterations = outer_iterations(topology, context)
        next(iterations)
        context.state.memory[EMA].fill_(np.nan)
        context.state.memory[EMA_COUNT].zero_()
        next(iterations)
        assert torch.equal(context.state.memory[EMA], context.state.z)
