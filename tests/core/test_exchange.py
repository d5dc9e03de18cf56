"""The mean of BatchNorm statistics where variances are small beside means; DiLoCo's outer step."""

import pytest
import torch
from driving import comms_of, make_context
from nets import RandomStream
from nodes import WORLD, nodes_of
from torch import nn

from prunex_mpi.config.resolve import make
from prunex_mpi.core.exchange import (
    VELOCITY,
    average_statistics,
    find_reference_,
    nesterov_,
    outer_memory,
)
from prunex_mpi.core.memory import Memory
from prunex_mpi.core.schedule import Stage
from prunex_mpi.methods.hsadmm import inter_node_consensus, intra_node_consensus
from prunex_mpi.methods.sparseloco import SparseLoco

# Of each channel: a mean, and by how much of it the deviation is smaller.
MEANS = torch.tensor([100.0, -100.0, 3000.0, 1.0])
RATIOS = torch.tensor([1e-4, 1 / 30, 1e-3, 1.0])
UNCHANGED = Stage(strict=1.0, choose=False, vote=True, freeze=False, measured=False)


def net() -> nn.Module:
    """Return a network with one BatchNorm of four channels."""
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))


def statistics_of(rank: int, round_: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return means and variances, float64 [4], of a rank in an exchange."""
    deviations = (MEANS * RATIOS).abs().double()
    moved = torch.cos(torch.arange(4) + 2.0 * rank + 5.0 * round_).double()
    means = (MEANS.double() + 0.3 * moved * deviations).float().double()
    return means, deviations**2 * (1 + 0.2 * moved)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("way", ["per step", "fp32", "int4", "sparseloco"])
def test_small_variances_beside_large_means_survive_every_exchange(way, ranks_per_node):
    method = {"per step": "dense", "sparseloco": "sparseloco"}.get(way, "local-sgd")
    payload = {"payload": way} if way in ("fp32", "int4") else {}
    settings = make(method=method, **payload)
    context = make_context(settings, net(), RandomStream(WORLD.rank, torch.float32))
    state, module = context.state, context.problem.model[1]
    with nodes_of(ranks_per_node) as topology:
        comms = comms_of(topology, flat=way == "per step")
        for round_ in range(3):
            mean, variance = statistics_of(WORLD.rank, round_)
            module.running_mean.copy_(mean)
            module.running_var.copy_(variance)
            if way == "per step":
                average_statistics(comms, state)
            else:
                find_reference_(comms, state)
                z_node = intra_node_consensus(comms.node, state, settings)
                state.z_node, state.scratch = z_node, state.z_node
            if way == "sparseloco":
                SparseLoco(comms, context).exchange_(state.z)
            elif way != "per step":
                inter_node_consensus(comms, context, UNCHANGED, asynchronous=False)
            ranks = [statistics_of(rank, round_) for rank in range(WORLD.size)]
            means, variances = (torch.stack(each) for each in zip(*ranks, strict=True))
            pooled = (variances + (means - means.mean(0)) ** 2).mean(0)
            found = module.running_var.double()
            assert ((found - pooled).abs() / pooled).max() < 0.01, round_
            gap = (module.running_mean - means.mean(0)).abs() / pooled.sqrt()
            assert gap.max() < 0.01, round_


@pytest.mark.parametrize("warmup", [0, 3])
def test_the_outer_step_is_torchs_sgd_with_nesterov_momentum(warmup):
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    rates = {"diloco_outer_lr": 0.4, "diloco_outer_momentum": 0.8}
    settings = make(method="diloco", **rates, diloco_outer_warmup=warmup)
    z = torch.zeros(7, dtype=torch.float64)
    theirs = z.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.4, momentum=0.8, nesterov=True)
    memory = Memory(outer_memory(z))
    for k, mean in enumerate(means, 1):
        theirs.grad = theirs.detach() - mean
        optimizer.param_groups[0]["momentum"] = 0.8 * min(1, k / max(1, warmup))
        optimizer.step()
        last, z = z, mean.clone()
        nesterov_(settings, k, last, z, memory[VELOCITY])
        torch.testing.assert_close(z, theirs.detach(), rtol=1e-13, atol=1e-13)
    kept = optimizer.state[theirs]["momentum_buffer"]
    torch.testing.assert_close(memory[VELOCITY], kept, rtol=1e-13, atol=1e-13)
