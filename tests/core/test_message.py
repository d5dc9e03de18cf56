"""The outer step of DiLoCo, what is said of rates and momenta, and what is forgotten."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prunex_mpi.config.checks import FEWEST_KEPT, advice
from prunex_mpi.config.resolve import make
from prunex_mpi.core.exchange import VELOCITY, nesterov_, outer_memory
from prunex_mpi.core.memory import Memory
from prunex_mpi.core.optimizer import OptimizerMemory, build_optimizer
from prunex_mpi.core.state import forget_momentum_
from prunex_mpi.models.layout import build_layout


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


def test_what_is_known_to_go_wrong_is_said():
    kept = make(method="diloco", inner_momentum="keep")
    assert "--inner-momentum reset" in advice(kept, FEWEST_KEPT - 1)[0]
    assert advice(kept, FEWEST_KEPT) == []
    assert advice(make(method="diloco"), 1) == advice(make(method="local-sgd"), 1) == []
    assert advice(make(method="diloco", inner_momentum="keep", momentum=0.0), 1) == []
    adamw = make(method="prunex", optimizer="adamw", lr=0.008)
    assert advice(adamw, 9) == []
    assert advice(make(method="diloco", optimizer="adamw"), 16) == []
    (line,) = advice(make(method="diloco", optimizer="adamw", inner_momentum="reset"), 16)
    assert "give --inner-momentum keep" in line
    (line,) = advice(make(method="qsr", optimizer="adamw", lr=0.2), 4)
    assert "lr 0.2 is high for adamw" in line
    assert advice(make(method="qsr", optimizer="adamw"), 4) == []
    (line,) = advice(make(method="dense"), 9, steady=False)
    assert "lr 0.2 with sgd" in line
    assert "--optimizer adamw" in line
    (line,) = advice(make(method="dgc", lr=0.1), 9, steady=False)
    assert "lr 0.1 with sgd" in line
    assert "adamw" not in line
    for changes in ({"lr": 0.05}, {"optimizer": "adamw", "lr": 0.01}, {"method": "lion"}):
        assert advice(make(**changes), 9, steady=False) == []


def adamw_over(gradient: list[float], **settings: object) -> tuple[OptimizerMemory, nn.Parameter]:
    """Return the memory of AdamW over as many ones, and these, with a gradient."""
    model = nn.Linear(len(gradient), 1, bias=False)
    nn.init.ones_(model.weight)
    model.weight.grad = torch.tensor([gradient])
    layout = build_layout(model)
    built = build_optimizer(make(method="diloco", optimizer="adamw", **settings), model, layout)
    return OptimizerMemory(built, model, layout), model.weight


def test_reset_forgets_the_first_moment_of_adamw_alone():
    memory, theta = adamw_over([0.5, 0.5, 0.5], lr=0.1)
    memory.set_decay_(0.01)
    memory.optimizer.step()
    # The first step is the rate, whatever the gradient; the decay is decoupled.
    torch.testing.assert_close(theta.detach(), torch.full((1, 3), 1 - 0.1 * 0.01 - 0.1))
    forget_momentum_(SimpleNamespace(optimizer=memory))
    kept = memory.optimizer.state[theta]
    assert not kept["exp_avg"].any()
    assert kept["exp_avg_sq"].all()
    assert kept["step"] == 1


def test_a_step_that_overflows_leaves_adamw_as_it_was():
    memory, theta = adamw_over([1.0, float("inf")], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(memory.optimizer)
    scaler.step(memory.optimizer)
    scaler.update()
    assert theta.tolist() == [[1, 1]]
    assert not any(part.any() for part in memory.tensors().values())
