"""Muon and AdamW on flat vectors beside torch's own; what is said of rates and momenta."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from driving import by_name, element_masks, run_driver
from nets import CoupledNet, RandomStream, new_net
from nodes import WORLD, nodes_of
from torch import nn

from prunex_mpi.config.checks import FEWEST_KEPT, advice
from prunex_mpi.config.resolve import make
from prunex_mpi.core.optimizer import (
    OptimizerMemory,
    build_optimizer,
    describe_muon,
    orthogonalise,
)
from prunex_mpi.core.state import forget_momentum_
from prunex_mpi.models.layout import build_layout, flatten_


class Words(nn.Module):
    """Embedding, positions, a hidden layer and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.places = nn.Parameter(torch.randn(4, 6))
        self.hidden, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.between, self.head = nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight


def test_hidden_matrices_are_muons_and_all_else_is_adamws():
    model = Words()
    layout = build_layout(model)
    names = [segment.name for segment in layout.hidden]
    assert names == ["hidden.weight", "between.weight"]
    line = describe_muon(layout, "muon")
    assert "2 matrices" in line and "places, words.weight" in line
    net = new_net()
    names = [segment.name for segment in build_layout(net).hidden]
    assert [name for name in names if name.startswith("fc")] == []
    assert len(names) == 4


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_steps_are_those_of_torchs_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the precision in which this one multiplies on a CPU.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(3)
    model = new_net(torch.float32)
    other = copy.deepcopy(model)
    settings = make(optimizer="muon", lr=0.01, weight_decay=0.1, beta2=0.99)
    layout = build_layout(model)
    flatten_(model, layout)
    mine = build_optimizer(settings, model, layout)
    memory = OptimizerMemory(mine, model, layout)
    memory.set_decay_(settings.weight_decay)
    chosen = {segment.name for segment in layout.hidden}
    parameters = dict(other.named_parameters())
    matrices = {n: nn.Parameter(parameters[n].detach().flatten(1)) for n in chosen}
    rest = [p for n, p in parameters.items() if n not in chosen]
    theirs = [
        torch.optim.Muon(
            matrices.values(),
            lr=0.01,
            weight_decay=0.1,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.95, 0.99), weight_decay=0.1),
    ]
    for _ in range(3):
        images, labels = torch.randn(8, 3, 6, 6), torch.randint(5, (8,))
        for net in (model, other):
            for p in net.parameters():
                p.grad.zero_() if p.grad is not None else None
            F.cross_entropy(net(images), labels).backward()
        for name, matrix in matrices.items():
            matrix.grad = parameters[name].grad.flatten(1)
        mine.step()
        for optimizer in theirs:
            optimizer.step()
        for name, matrix in matrices.items():
            parameters[name].data.copy_(matrix.detach().view(parameters[name].shape))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert set(memory.moments) == {"exp_avg", "exp_avg_sq"}
    assert int(memory.numbers["step"].max()) == 3


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (7, 7)], ids=str)
def test_a_matrix_becomes_nearly_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    found = orthogonalise(matrix)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    torch.testing.assert_close(found, u @ values.diag() @ v, rtol=1e-12, atol=1e-12)


@pytest.mark.mpi
@pytest.mark.any_mpi
@pytest.mark.parametrize("groups", [("coupled",), ("filter", "channel")])
def test_what_is_pruned_stays_zero(groups):
    changes = {"warmup_iterations": 0, "keep_ramp_iterations": 1, "freeze_iteration": 2}
    changes |= {"rho1": 0.02, "rho2": 0.005, "residuals": "off", "outer_iterations": 4}
    settings = make(optimizer="muon", lr=0.01, groups=groups, bn="average", **changes)
    model = CoupledNet() if groups == ("coupled",) else new_net(torch.float32)
    with nodes_of(1) as topology:
        stream = RandomStream(WORLD.rank, torch.float32)
        pruned = False
        for _, state in run_driver(topology, settings, model, stream):
            if not state.frozen:
                continue
            for view, factor in _pruned(state):
                assert not view[factor].any()
                pruned |= bool(factor.any())
    assert pruned


def _pruned(state):
    theta = by_name(state.theta, state)
    return [(theta[name], ~mask) for name, mask in element_masks(state).items()]


def test_what_is_known_to_go_wrong_is_said():
    kept = make(method="diloco", inner_momentum="keep")
    assert "--inner-momentum reset" in advice(kept, FEWEST_KEPT - 1)[0]
    assert advice(kept, FEWEST_KEPT) == []
    assert advice(make(method="diloco"), 1) == advice(make(method="local-sgd"), 1) == []
    assert advice(make(method="diloco", inner_momentum="keep", momentum=0.0), 1) == []
    assert advice(make(method="diloco", optimizer="adamw"), 16) == []
    (line,) = advice(make(method="diloco", optimizer="adamw", inner_momentum="reset"), 16)
    assert "give --inner-momentum keep" in line


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
