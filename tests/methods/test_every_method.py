"""What every method keeps to, so that checkpoints and mixed precision do right by it."""

from types import SimpleNamespace

import pytest
import torch
from driving import COMMON, run_driver
from nets import OF_EMBEDDINGS, RandomStream, new_net
from nodes import WORLD, nodes_of
from small_runs import small_run
from torch import nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.core.memory import RANK, SUM, TOTAL, Declared
from prunex_mpi.methods.declared import METHODS
from prunex_mpi.methods.exchanges import EXCHANGES, memory_of
from prunex_mpi.models.layout import build_layout
from prunex_mpi.run.supervision import outer_iterations


def remembered(method: str, **changes: object) -> Declared:
    """Return what a method remembers of a small network in float64."""
    layout = build_layout(new_net(method=method))
    theta = torch.zeros(layout.numel, dtype=torch.float64)
    state = SimpleNamespace(layout=layout, theta=theta)
    return memory_of(make(method=method, **changes), state)


def test_every_exchange_of_its_own_is_in_the_table():
    assert {m.name for m in METHODS if m.own_exchange} == {*EXCHANGES}


@pytest.mark.parametrize("method", [m.name for m in METHODS])
def test_what_is_remembered_can_be_added_up(method):
    found = remembered(method)
    for name, entry in found.items():
        assert entry.tensor.is_contiguous(), name
        assert entry.elsewhere != SUM or entry.tensor.dtype == torch.float64, name
        assert entry.elsewhere != TOTAL or found[entry.of].elsewhere == SUM, name


# What is kept of gradients, or of estimates of them.
PER_STEP = [method.name for method in METHODS if method.per_step]
KEEPING = [m for m in PER_STEP if any(e.owner == RANK for e in remembered(m).values())]


@pytest.mark.parametrize("method", KEEPING)
def test_what_workers_keep_of_gradients_is_not_for_float16(method):
    """A step whose gradient overflows is left out, but not what it has left in a memory."""
    with pytest.raises(UserError, match="amp fp16"):
        make(method=method, amp="fp16")


@pytest.mark.skipif(WORLD.size > 1, reason="one rank compresses as several do")
@pytest.mark.parametrize("method", [m.name for m in METHODS])
def test_parameters_without_elements_do_no_harm(method):
    changes = {"prunetrain_reconfigure_every": 1} if method == "prunetrain" else {}
    kind = "reads_with" if method in OF_EMBEDDINGS else "with"
    changes |= {"model": f"odd_models:{kind}_empty_parameters", "outer_iterations": 2}
    with nodes_of(1) as topology, small_run(topology, "dense", method=method, **changes) as context:
        before = context.state.theta.clone()
        for _ in outer_iterations(topology, context):
            pass
        assert torch.isfinite(context.state.theta).all()
        assert not torch.equal(
            context.state.theta[: len(before)], before[: len(context.state.theta)]
        )


@pytest.mark.skipif(WORLD.size > 1, reason="samples of all ranks are those of one")
def test_grasp_refuses_several_outputs_as_training_does():
    grasp = {"pactrain_score": "grasp", "pactrain_prune_iteration": 0, "train_samples": 400}
    grasp |= {"model": "odd_models:more_while_training"}
    refused = pytest.raises(UserError, match="returns tuple while it trains")
    with nodes_of(1) as topology, small_run(topology, "pactrain", **grasp) as context, refused:
        next(outer_iterations(topology, context))


class Bright(RandomStream):
    """Images whose mean is ten thousand times their deviation."""

    def next(self):
        images, labels = super().next()
        return 100 + 0.01 * images, labels


@pytest.mark.skipif(WORLD.size > 1, reason="second moments are averaged over several ranks")
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("method", ["dense", "local-sgd", "diloco", "prunex", "prunex-flat"])
def test_a_rank_that_is_alone_loses_no_variance(method, overlap):
    if overlap and method not in ("local-sgd", "prunex"):
        pytest.skip("it doesn't go on while it exchanges")
    changes = {**COMMON, "outer_iterations": 3, "overlap_steps": overlap, "lr": 1e-3}
    changes |= {"residuals": "off"} if overlap and method == "prunex" else {}
    changes |= {"evaluate_every": 3} if overlap else {}
    changes |= {} if method == "dense" else {"bn": "average"}
    settings = make(method=method, **changes)
    torch.manual_seed(0)
    body = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
    head = nn.Flatten(), nn.Linear(16, 5)
    model = nn.Sequential(nn.BatchNorm2d(3), *body, *head)
    with nodes_of(1) as topology:
        for _ in run_driver(topology, settings, model, Bright(0, torch.float32)):
            pass
    seen = Bright(0, torch.float32)
    variances = [seen.next()[0].transpose(0, 1).flatten(1).var(dim=1) for _ in range(9)]
    # 9 steps: a plain mean.
    wanted = sum(variances) / len(variances)
    torch.testing.assert_close(model[0].running_var.cpu(), wanted, rtol=1e-4, atol=0)
