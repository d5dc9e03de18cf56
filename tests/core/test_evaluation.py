"""Statistics that are estimated again on z, against an oracle of their own."""

import copy
from functools import partial

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
from prunex_mpi.comm.topology import Topology
from prunex_mpi.config.resolve import make
from prunex_mpi.core.evaluation import (
    EVALUATION_BATCH,
    RECALIBRATION_BATCHES,
    average_other_buffers_,
    check_divergence,
    check_errors,
    estimate_statistics,
    evaluate,
)
from prunex_mpi.core.state import Problem, RunContext, State, build_state
from prunex_mpi.core.steps import finish_average_
from prunex_mpi.data.batches import BatchStream, Look, Shard, evaluation_batches
from prunex_mpi.models.layout import build_layout
from prunex_mpi.pruning.groups import Groups

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

BATCH_SIZE = 6
PARTIAL = 5  # images left over, on every rank
MEAN, STD = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.25, 0.3])


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


def statistics_left(topology: Topology, state: State, problem: Problem) -> list[tuple]:
    """Estimate; return (mean, variance) of each BatchNorm that this leaves."""
    estimate_statistics(topology, RunContext(state, problem, make(), SMALL_BUCKETS, Heartbeat()))
    return [(m.running_mean, m.running_var) for m in state.bn_modules]


# More batches than are taken, and fewer; both with a partial one at the end.
@pytest.mark.parametrize("batches", [RECALIBRATION_BATCHES + 2, 3])
@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_estimated_statistics_equal_the_oracle(ranks_per_node: int, batches: int) -> None:
    model = build_model()
    state = build_state(model, build_layout(model), Groups((), (), 0, ()), make())
    # The statistics are z's, whatever a rank's theta is.
    wanted = of_all_ranks(
        copy.deepcopy(list(model)),
        [images_of(rank, batches) for rank in range(WORLD.size)],
        BATCH_SIZE,
        RECALIBRATION_BATCHES,
        MEAN,
        STD,
    )
    state.theta.add_(torch.rand(len(state.theta), dtype=torch.float64), alpha=1 + WORLD.rank)
    theta = state.theta.clone()

    images = images_of(WORLD.rank, batches)
    shard = Shard(images, torch.zeros(len(images), dtype=torch.int64))
    look = Look(MEAN, STD, CPU, torch.float64)
    stream = BatchStream(
        shard, look, batch_size=BATCH_SIZE, seed=1, rank=WORLD.rank, flip=False, pad=0
    )
    batches_of = partial(evaluation_batches, look=look)
    problem = Problem(model, model, F.cross_entropy, stream, shard, None, batches_of, 1, MEAN, STD)
    with nodes_of(ranks_per_node) as topology:
        found = statistics_left(topology, state, problem)
    assert len(found) == len(wanted) == 3
    for (mean, variance), (wanted_mean, wanted_variance) in zip(found, wanted, strict=True):
        torch.testing.assert_close(mean, wanted_mean, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(variance, wanted_variance, rtol=1e-11, atol=1e-11)
        assert_alike_on_all_ranks(mean)
        assert_alike_on_all_ranks(variance)
    assert torch.equal(state.theta, theta)


class OwnNorm(nn.Module):
    """Keep a running mean that is no BatchNorm's, and a constant."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((), mean))
        self.register_buffer("third", torch.full((2, 2), 1 / 3))
        self.used: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.used.append(float(self.mean))
        return x - self.mean


@pytest.mark.parametrize("ranks_per_node", NODE_SHAPES)
def test_an_evaluation_averages_statistics_of_other_norms_and_puts_them_back(
    ranks_per_node: int,
) -> None:
    mine, wanted = float(WORLD.rank**2), sum(r**2 for r in range(WORLD.size)) / WORLD.size
    model = nn.Sequential(OwnNorm(mine), *build_model())
    state = build_state(model, build_layout(model), Groups((), (), 0, ()), make())
    shard = Shard(images_of(0, 1), torch.zeros(BATCH_SIZE + PARTIAL).long())
    batches_of = partial(evaluation_batches, look=Look(MEAN, STD, CPU, torch.float64))
    problem = Problem(model, model, F.cross_entropy, None, shard, shard, batches_of, 1, MEAN, STD)
    with nodes_of(ranks_per_node) as topology:
        context = RunContext(state, problem, make(), SMALL_BUCKETS, Heartbeat())
        evaluate(topology, context)
        assert model[0].used == [pytest.approx(wanted)]
        assert float(model[0].mean) == mine
        average_other_buffers_(topology, context)
    assert float(model[0].mean) == pytest.approx(wanted)
    assert_alike_on_all_ranks(model[0].mean.double().view(1))
    # Not even rounded where all hold the same.
    assert torch.equal(model[0].third, torch.full((2, 2), 1 / 3))


def test_every_batch_of_an_evaluation_is_progress() -> None:
    model = build_model()
    state = build_state(model, build_layout(model), Groups((), (), 0, ()), make())
    count = 2 * EVALUATION_BATCH + 1
    shard = Shard(images_of(0, 1)[:1].expand(count, -1, -1, -1), torch.zeros(count).long())
    look = Look(MEAN, STD, CPU, torch.float64)
    batches_of = partial(evaluation_batches, look=look)
    problem = Problem(model, model, F.cross_entropy, None, shard, shard, batches_of, 1, MEAN, STD)
    heartbeat = Heartbeat()
    with nodes_of(1) as topology:
        evaluate(topology, RunContext(state, problem, make(), SMALL_BUCKETS, heartbeat))
        # Weights that are finite may be too large for a test, as after a high learning rate.
        state.z.fill_(torch.finfo(state.z.dtype).max)
        with pytest.raises(Diverged, match="test set is not finite; lower --lr"):
            evaluate(topology, RunContext(state, problem, make(), SMALL_BUCKETS, Heartbeat()))
    assert (heartbeat.beats, heartbeat.step) == (3, 0)


class AverageOf:
    """Stand in for what averages gradients, which is late on the last rank alone."""

    late = WORLD.rank == WORLD.size - 1

    def finish_(self) -> None:
        pass


@pytest.mark.parametrize("refuse", [lambda *a: check_divergence(*a, 1.0), check_errors])
def test_all_ranks_raise_what_one_has_met_in_its_local_steps(refuse) -> None:
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
def test_no_rank_leaves_with_what_diverged_on_one(what: str) -> None:
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
def test_gradients_that_the_model_itself_has_detached_are_noticed(refuse) -> None:
    """They would be in no message and in no step, and training would stand still in silence."""
    with nodes_of(1) as topology, small_run(topology, "local sgd") as context:
        refuse(topology, context)
        if WORLD.rank == WORLD.size - 1:
            context.problem.model.zero_grad(set_to_none=True)
        with pytest.raises(UserError, match=r"the gradient of .* was replaced, as by zero_grad"):
            refuse(topology, context)
