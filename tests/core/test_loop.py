"""When residuals are computed; the gradient of a step, and what an overflow leaves: nothing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from driving import COMMON, CPU, STEPS, assert_alike_on_all_ranks, make_context, run_driver
from nets import RandomStream, new_net
from nodes import WORLD, nodes_of
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.core.loop import Round, begin_step_, clip_, measures_residuals
from prunex_mpi.core.state import Position
from prunex_mpi.core.task import find_losses
from prunex_mpi.run.supervision import learn


@pytest.mark.parametrize(
    ("wanted", "iteration", "vote_next", "measured"),
    [
        ("every", 1, False, True),
        ("evaluate", 1, False, False),
        ("evaluate", 3, False, True),
        # Small residuals of a union ask for a vote, and its own decide whether the run stops.
        ("evaluate", 4, True, True),
        ("off", 3, True, False),
    ],
)
def test_residuals_are_computed_when_asked_and_before_a_stop(
    wanted, iteration, vote_next, measured
):
    settings = make(residuals=wanted, evaluate_every=3)
    this = Round(iteration, False, 0.0, np.ones(0, dtype=bool))
    for duals in (True, False):
        state = SimpleNamespace(position=Position(vote_next=vote_next), consensus_sgd=not duals)
        context = SimpleNamespace(state=state, settings=settings, problem=SimpleNamespace(test=()))
        assert measures_residuals(context, this) == (measured and duals)


BATCH, CLASSES, SIDE = 8, 5, 6


class Batches:
    """The same batch at every step."""

    waited = 0.0

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.images = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator).double()
        self.labels = torch.randint(CLASSES, (BATCH,), generator=generator)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images, self.labels


def forward_backward(context, averager):
    """Leave the gradient of the next batch in `grad`; return its loss."""
    begin_step_(context.state)
    return learn(context, averager)


def plain_net() -> nn.Module:
    """Return a network without statistics."""
    torch.manual_seed(5)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (SIDE - 2) ** 2, CLASSES))
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("trained", [False, True])
def test_running_averages_are_means_of_all_batches_so_far(trained):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * SIDE**2, CLASSES)).double()
    if trained:
        model[0].running_mean.fill_(0.5)
    settings = make(method="dense", batch_size=BATCH)
    context = make_context(settings, model, Batches(WORLD.rank))
    seen, known = [], model[0].running_mean.clone()
    for step in range(3):
        context.state.position.step = step
        context.problem.train.images = context.problem.train.images + 1
        forward_backward(context, None)
        seen.append(context.problem.train.images.mean(dim=(0, 2, 3)))
        known = 0.9 * known + 0.1 * seen[-1]
    wanted = known if trained else sum(seen) / len(seen)
    torch.testing.assert_close(model[0].running_mean, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limit", [0.0, 0.01, 1e6])
def test_clipping_is_that_of_torch(limit):
    settings = make(method="dense", batch_size=BATCH, clip_grad=limit)
    context = make_context(settings, plain_net(), Batches(0))
    forward_backward(context, None)
    parameters = [p.detach().clone().requires_grad_() for p in context.problem.model.parameters()]
    for copy, parameter in zip(parameters, context.problem.model.parameters(), strict=True):
        copy.grad = parameter.grad.clone()
    if limit:
        nn.utils.clip_grad_norm_(parameters, limit)
    clip_(context)
    for copy, parameter in zip(parameters, context.problem.model.parameters(), strict=True):
        assert torch.allclose(copy.grad, parameter.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module_at_all:f", "cannot import"),
        ("math:nothing", "has no function 'nothing' of outputs and labels"),
        ("math:sqrt", "can't be called with outputs"),
        ("builtins:max", "can't be called with outputs"),
        ("builtins:print", "it returns NoneType"),
        ("torch:add", "it returns a tensor"),
    ],
)
def test_what_is_no_loss_is_refused_in_a_line(name, why):
    with pytest.raises(UserError) as caught:
        find_losses(make(loss=name), 2, CPU)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_an_own_loss_is_trained_on_and_measured_by():
    loss, _ = find_losses(make(loss="torch.nn.functional:multi_margin_loss"), CLASSES, CPU)
    assert loss is F.multi_margin_loss


# The largest number of float16 is 65,504.
TOO_LARGE = 1e7


class Flare:
    """Batches of which one rank's last of the first outer iteration does not fit into float16."""

    waited = 0.0

    def __init__(self, rank, step):
        self.stream = RandomStream(rank, torch.float32)
        self.step, self.drawn = step, 0

    def next(self):
        images, labels = self.stream.next()
        self.drawn += 1
        return (images * TOO_LARGE if self.drawn == self.step else images), labels


@pytest.mark.mpi
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "dense", "aggregation": "hierarchical"},
        {"method": "local-sgd"},
        {"node_sync": "outer", "bn": "average"},
        {
            "overlap_steps": 1,
            "payload": "int8",
            "bn": "average",
            "evaluate_every": 4,
            "residuals": "off",
        },
    ],
    ids=str,
)
def test_statistics_of_a_step_that_overflows_are_undone(changes):
    settings = make(amp="fp16", **{**COMMON, **changes})
    with nodes_of(2) as topology:
        flares = WORLD.rank == WORLD.size - 1
        stream = Flare(WORLD.rank, STEPS if flares else 0)
        for record, state in run_driver(topology, settings, new_net(torch.float32), stream):
            # The loss of that step is not counted.
            assert int(state.losses[1]) == STEPS - (flares and record["iteration"] == 1)
            for module in state.bn_modules:
                assert module.running_mean.isfinite().all()
                assert module.running_var.isfinite().all()
                assert module.running_mean.abs().max() < 100
            assert state.z.isfinite().all()
        # What is exchanged behind the next round has arrived with the last one.
        assert_alike_on_all_ranks(state.z)
        assert_alike_on_all_ranks(state.stats)
