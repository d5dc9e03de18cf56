"""A model replicated in a loop of one's own: the program's weights, resume, the smaller network."""

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nodes import WORLD, nodes_of
from small_runs import COMMON, CPU
from torch import Tensor, nn

import prunex_mpi
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.collectives import build_transport
from prunex_mpi.config.resolve import make
from prunex_mpi.core.state import RunContext
from prunex_mpi.data.request import Request
from prunex_mpi.replica.replicate import Replica
from prunex_mpi.run.problem import load_dataset
from prunex_mpi.run.start import assemble
from prunex_mpi.run.supervision import outer_iterations

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi]

# As the program's: pieces of a message are rounded by themselves.
TRANSPORT = build_transport(CPU, 32.0, "host", 60)
LENGTH = {"outer_iterations": 6, "local_steps": 2}
STAGES = {"warmup_iterations": 1, "keep_ramp_iterations": 2, "freeze_iteration": 4}
PRUNES = {**STAGES, "bn": "average", "residuals": "every", "groups": ("coupled",)}
# Method, settings of both, momentum of SGD.
CASES = {
    "prunex": ("prunex", PRUNES, 0.9),
    "prunex int4": ("prunex", {**PRUNES, "payload": "int4"}, 0.9),
    "prunex removed": ("prunex", {**PRUNES, "remove_dropped": True}, 0.9),
    "prunex of the paper": (
        "prunex",
        {**PRUNES, "theta_start": "theta", "node_sync": "outer", "after_freeze": "admm"},
        0.9,
    ),
    "prunex-flat": ("prunex-flat", PRUNES, 0.9),
    "local-sgd": ("local-sgd", {"payload": "int8"}, 0.9),
    "local-sgd in fragments": ("local-sgd", {"fragments": 2}, 0.9),
    "diloco": ("diloco", {"inner_momentum": "reset"}, 0.9),
    "sparseloco": ("sparseloco", {"sparseloco_ratio": 0.1}, 0.9),
    "one-shot": ("one-shot", {"one_shot_prune_iteration": 3, "bn": "average"}, 0.9),
    "dense": ("dense", {}, 0.9),
    "dense by leaders": ("dense", {"aggregation": "hierarchical"}, 0.9),
    "topk": ("topk", {"topk_ratio": 0.1}, 0.9),
    "dgc": ("dgc", {"dgc_ratio": 0.05, "dgc_warmup_epochs": 1}, 0.0),
    "powersgd": ("powersgd", {}, 0.9),
    "omnireduce": ("omnireduce", {"omnireduce_block_size": 16}, 0.9),
    "spardl": ("spardl", {"spardl_ratio": 0.1}, 0.9),
    "terngrad": ("terngrad", {}, 0.9),
    "fp16": ("fp16", {}, 0.9),
    "lion": ("lion", {}, 0.0),
    "adacgd": ("adacgd", {}, 0.9),
    "gossip": ("gossip", {}, 0.9),
    "pactrain": ("pactrain", {"pactrain_score": "magnitude"}, 0.9),
    "prunetrain": ("prunetrain", {"prunetrain_reconfigure_every": 2}, 0.9),
    "clicktrain": ("clicktrain", {}, 0.9),
    "qsr": ("qsr", {"qsr_alpha": 0.02}, 0.9),
}
# Those with nothing of their own between the loop and the exchange; and those of more than two.
RARELY = ("prunex", "local-sgd", "sparseloco", "topk", "powersgd", "omnireduce", "spardl", "fp16")
RARELY += ("adacgd", "clicktrain", "terngrad", "gossip")
ON_FOUR = ("prunex int4", "dense by leaders")
RATE, DECAY = 0.01, 1e-4


def program_settings(method: str, settings: dict[str, Any]) -> Any:
    """Return settings of the program for as long a run on tiny images."""
    own = {k: v for k, v in COMMON.items() if k not in LENGTH} | LENGTH
    own |= {"weight_decay": DECAY, "weight_decay_on": "all", "lr": RATE, "warmup_ratio": 0.0}
    own |= {"evaluate_every": 6, "preset": "recipe", "model": "resnet8-w4"}
    return make(**own | {"method": method} | settings)


@contextmanager
def program(method: str, settings: dict[str, Any], ranks_per_node: int = 1) -> Iterator[Any]:
    """Have the program's nodes and what a rank works on."""
    with nodes_of(ranks_per_node) as topology:
        around = topology, program_settings(method, settings), CPU, TRANSPORT, Heartbeat()
        dataset = load_dataset(topology, Request.of(around[1]), around[-1])
        yield topology, assemble(topology, around[1], dataset, *around[2:])


def replicated(
    model: nn.Module, method: str, settings: dict[str, Any], momentum: float, **more: Any
) -> tuple[Replica, torch.optim.Optimizer]:
    """Return a replica of `model` on virtual nodes of one rank, and its optimizer."""
    rate = {"lr": RATE, "momentum": momentum, "weight_decay": 0.0 if method == "dgc" else DECAY}
    optimizer = torch.optim.SGD(model.parameters(), fused=True, **rate)
    own = {"momentum": 0.9, "weight_decay": DECAY} if method == "dgc" else {}
    # Every rank is a node of its own there.
    nodes = {} if method == "prunex-flat" else {"ranks_per_node": 1}
    given = {**LENGTH, **settings, **own, **nodes, "example": torch.zeros(2, 3, 8, 8), **more}
    return prunex_mpi.replicate(WORLD, model, optimizer, method=method, **given), optimizer


def take_steps(replica: Replica, batches: Iterator[Any], count: int = 10**9) -> None:
    """Take as many steps of the run as there are."""
    while not replica.done and count:
        images, labels = next(batches)
        loss = F.cross_entropy(replica.model(images), labels)
        replica.overlap_backward()
        loss.backward()
        replica.step(loss)
        count -= 1


def batches_of(context: RunContext) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of the program on this rank."""
    while True:
        yield context.problem.train.next()


def own_cases() -> Iterator[Any]:
    """Yield the cases with their marks."""
    for name in CASES:
        marks = [] if name in ON_FOUR else [pytest.mark.two_ranks]
        yield pytest.param(name, marks=[*marks, pytest.mark.long] if name in RARELY else marks)


@pytest.mark.parametrize("case", [*own_cases()])
def test_own_loop_has_the_programs_weights_bit_for_bit(case: str) -> None:
    method, settings, momentum = CASES[case]
    steps = {"steps_per_epoch": 64 // WORLD.size // 4}
    with program(method, settings) as (topology, context):
        model = copy.deepcopy(context.problem.model)
        records = list(outer_iterations(topology, context))
    with program(method, settings) as (_, other):
        replica, _ = replicated(model, method, settings, momentum, **steps)
        take_steps(replica, batches_of(other))
        # In words: a report of all that two runs are made of takes pytest long.
        equal = torch.equal(replica._context.state.z, context.state.z)
        assert equal
        # The program evaluates besides, and agrees on its first batch.
        both = [
            [r["bytes"] | {"evaluate": 0, "control": 0} for r in x]
            for x in (replica.records, records)
        ]
        assert both[0] == both[1]
        assert [r["train_loss"] for r in replica.records] == [r["train_loss"] for r in records]
        replica.close()


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("case", "stop"),
    [("prunex removed", 10), ("diloco", 5), ("dgc", 10), ("qsr", 10)],
)
def test_resumed_loop_goes_on_bit_for_bit(case: str, stop: int) -> None:
    method, settings, momentum = CASES[case]
    with program(method, settings) as (_, context):
        model, batches = copy.deepcopy(context.problem.model), []
        source = batches_of(context)
        batches = [next(source) for _ in range(12)]
    steps = {"steps_per_epoch": 8}
    first, _ = replicated(copy.deepcopy(model), method, settings, momentum, **steps)
    take_steps(first, iter(batches))
    first.close()
    second, _ = replicated(copy.deepcopy(model), method, settings, momentum, **steps)
    take_steps(second, iter(batches), stop)
    file = io.BytesIO()
    torch.save(second.state_dict(), file)
    second.close()
    file.seek(0)
    third, _ = replicated(model, method, settings, momentum, **steps)
    third.load_state_dict(torch.load(file, weights_only=True))
    take_steps(third, iter(batches[stop:]))
    for name in ("z", "theta"):
        equal = torch.equal(*(getattr(r._context.state, name) for r in (third, first)))
        assert equal, name
    assert [r["train_loss"] for r in third.records] == [r["train_loss"] for r in first.records]
    third.close()


class Averaged(torch.optim.Optimizer):
    """Gradient steps on z, of which the weights are an average: z is the method's word too."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            z = self.state[p].setdefault("z", p.detach().clone())
            p.lerp_(z.sub_(p.grad, alpha=self.param_groups[0]["lr"]), 0.5)


@pytest.mark.two_ranks
def test_an_optimizer_may_call_its_memory_as_the_method_does() -> None:
    found = []
    for stop in (6, 3):
        torch.manual_seed(0)
        model, generator = new_model(), torch.Generator().manual_seed(WORLD.rank)
        given = {"method": "local-sgd", "outer_iterations": 3, "local_steps": 2}
        replica = prunex_mpi.replicate(WORLD, model, Averaged(model.parameters()), **given)
        for step in range(6):
            if step == stop:
                saved = copy.deepcopy(replica.state_dict())
                replica.close()
                model = new_model()
                replica = prunex_mpi.replicate(WORLD, model, Averaged(model.parameters()), **given)
                replica.load_state_dict(saved)
            model(torch.randn(4, 3, 8, 8, generator=generator)).square().sum().backward()
            replica.step()
        found.append(replica._context.state.z.clone())
        replica.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("case", ["prunex removed", "prunex int4", "diloco", "topk"])
def test_resumes_on_other_nodes_from_what_all_had_in_common(case: str) -> None:
    method, settings, momentum = CASES[case]
    if WORLD.size < 4 and case == "topk":
        pytest.skip("leaders of nodes of several ranks")
    settings = settings | ({"aggregation": "hierarchical"} if case == "topk" else {})
    generator = torch.Generator().manual_seed(WORLD.rank)
    batches = [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.zeros(4, dtype=torch.long))
        for _ in range(12)
    ]
    torch.manual_seed(0)
    model = new_model()
    first, _ = replicated(copy.deepcopy(model), method, settings, momentum)
    take_steps(first, iter(batches), 11)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    first.close()
    states = [
        torch.load(io.BytesIO(one), weights_only=True) for one in WORLD.allgather(file.getvalue())
    ]
    other, _ = replicated(model, method, settings, momentum, ranks_per_node=2)
    if WORLD.size > 1:
        with pytest.raises(UserError, match="the list of all states"):
            other.load_state_dict(states[WORLD.rank])
    with pytest.raises(UserError, match="give those of all ranks in order"):
        other.load_state_dict([*states, states[0]])
    other.load_state_dict(states)
    before, after = first._context.state, other._context.state
    # The interval under way begins anew, from the consensus.
    assert torch.equal(after.z, before.z) and torch.equal(after.theta, before.z)
    moment = before.optimizer.first_moment.double()
    mean = WORLD.allreduce(moment.numpy()) / WORLD.size
    # It begins anew with each interval where that is asked for.
    mean = mean * (settings.get("inner_momentum") != "reset")
    assert torch.allclose(after.optimizer.first_moment.double(), torch.from_numpy(mean), atol=1e-6)
    take_steps(other, iter([*batches, *batches]))
    assert [record["iteration"] for record in other.records] == [1, 2, 3, 4, 5, 6]
    other.close()


@pytest.mark.two_ranks
@pytest.mark.parametrize("kind", ["adamw", "rmsprop", "adagrad", "nadam", "two groups", "frozen"])
def test_any_optimizer_trains_on_the_mask(kind: str) -> None:
    torch.manual_seed(0)
    model = new_model()
    parameters = list(model.parameters())
    if kind == "frozen":
        parameters[-1].requires_grad_(False)
    groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:]}]
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-3),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=1e-2),
        "nadam": lambda: torch.optim.NAdam(parameters, lr=1e-3),
        "two groups": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        "frozen": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }[kind]()
    given = {**LENGTH, **STAGES, "groups": ["coupled"], "ranks_per_node": 1}
    with prunex_mpi.replicate(
        WORLD, model, optimizer, method="prunex", example=torch.zeros(2, 3, 8, 8), **given
    ) as replica:
        generator = torch.Generator().manual_seed(WORLD.rank)
        before = model[0].weight.detach().clone()
        # A part that is not trained stays so.
        model[1].eval()
        while not replica.done:
            # As loops do: gradients that are None, and several backward passes for one step.
            optimizer.zero_grad()
            for _ in range(2):
                images = torch.randn(8, 3, 8, 8, generator=generator)
                (F.mse_loss(model(images), images.mean((2, 3))[:, :2]) / 2).backward()
            replica.step()
        assert not model[1].training and model[0].training
        assert not torch.equal(before, model[0].weight)
        small, images = replica.smaller(), torch.randn(3, 3, 8, 8)
        with replica.delivered() as whole, torch.no_grad():
            assert torch.allclose(small(images), whole(images), atol=1e-5)
    kept = sum(p.numel() for p in small.parameters())
    assert kept < 0.6 * sum(p.numel() for p in model.parameters())


def new_model() -> nn.Module:
    """Return a network of images of 8 by 8 pixels with two numbers for each."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
    )


class TwoHeads(nn.Module):
    """A trunk with a classifier and a second head, whose outputs come in any form."""

    def __init__(self, form: type) -> None:
        super().__init__()
        self.form = form
        self.trunk, self.second = nn.Linear(8, 16), nn.Linear(16, 6)
        self.classifier = nn.Linear(16, 4)

    def forward(self, batch: Tensor) -> Any:
        hidden = torch.relu(self.trunk(batch))
        outputs = self.second(hidden), self.classifier(hidden.mean(1))
        return dict(zip("ab", outputs, strict=True)) if self.form is dict else self.form(outputs)


@pytest.mark.two_ranks
@pytest.mark.parametrize("form", [tuple, list, dict])
def test_every_output_keeps_its_channels(form: type) -> None:
    torch.manual_seed(0)
    model = TwoHeads(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"groups": ["coupled"], "ranks_per_node": 1, "outer_iterations": 8, "local_steps": 1}
    example = torch.randn(2, 3, 8)
    with prunex_mpi.replicate(
        WORLD, model, optimizer, method="prunex", example=example, **given
    ) as replica:
        while not replica.done:
            outputs = model(torch.randn(2, 3, 8))
            first, second = outputs.values() if form is dict else outputs
            (first.square().mean() + second.square().mean()).backward()
            replica.step()
        small = replica.smaller()
    assert (small.trunk.out_features, small.second.out_features) == (8, 6)
    assert small.classifier.out_features == 4


REFUSED = {
    "lr": ({"lr": 0.1}, "lr is no setting of replicate; give that of the optimizer"),
    "data": ({"val_split": 0.1}, "val-split means nothing in one's own loop"),
    "typo": ({"payloads": "int4"}, "replicate has no setting 'payloads'; did you mean 'payload'"),
    "overlap": ({"overlap_steps": "auto"}, "overlap_steps='auto' measures the program's own loop"),
    "name": ({"grad_clip": 1.0}, "no setting 'grad_clip'; did you mean 'clip_grad'"),
    "share": ({"sparsity": 0.5}, "give keep_ratio, the share that stays"),
    "value": ({"payload": "int5"}, "payload"),
    "length": ({"outer_iterations": None}, "replicate needs outer_iterations="),
    "example": ({"method": "prunex", "example": None}, "give example=, a batch"),
    "bn": ({"bn": "recalibrate"}, "bn recalibrate needs batches; give calibrate="),
    "option": ({"method": "topk", "ratio": 0.1}, "'ratio'; did you mean 'topk_ratio'"),
    "width": ({"method": "prunex", "example": torch.zeros(2, 4, 8, 8)}, "does not take example=: "),
    "momentum": ({"method": "dgc"}, "give torch.optim.SGD without momentum"),
    "other": (
        {"topk_ratio": 0.1},
        "topk.ratio means nothing to method local-sgd; leave it away (it is for topk)",
    ),
    "grasp": ({"method": "pactrain", "keep_ratio": 0.1}, "pactrain_score='magnitude'"),
}


@pytest.mark.two_ranks
@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_is_refused_in_a_sentence(case: str) -> None:
    given, sentence = REFUSED[case]
    given = {"method": "local-sgd", "example": torch.zeros(2, 3, 8, 8), **LENGTH, **given}
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UserError) as caught:
        prunex_mpi.replicate(WORLD, model, optimizer, **given)
    assert sentence in str(caught.value)


@pytest.mark.two_ranks
def test_no_optimizer_and_one_of_another_model_are_refused() -> None:
    model, length = new_model(), {"method": "dense", **LENGTH}
    with pytest.raises(UserError, match=r"third argument of replicate is of type float"):
        prunex_mpi.replicate(WORLD, model, 0.1, **length)
    other = torch.optim.SGD(new_model().parameters(), lr=0.1)
    with pytest.raises(UserError, match="not parameters of the model"):
        prunex_mpi.replicate(WORLD, model, other, **length)


@pytest.mark.two_ranks
def test_parameters_that_the_optimizer_leaves_out_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with prunex_mpi.replicate(WORLD, model, optimizer, method="dense", **LENGTH):
        told = "2 tensors of the model are trained, but the optimizer does not" in caplog.text
    assert told == (WORLD.rank == 0)


@pytest.mark.two_ranks
def test_models_that_differ_between_ranks_are_told_apart() -> None:
    model = nn.Linear(3 + WORLD.rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError) as caught:
        prunex_mpi.replicate(WORLD, model, optimizer, method="dense", **LENGTH)
    found = (
        "the parameters of the model differ between ranks: 'weight [2, 4] torch.float32' on rank 1"
    )
    assert found in str(caught.value)


@pytest.mark.two_ranks
def test_steps_beyond_the_length_and_of_the_optimizer_alone_are_refused() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"method": "local-sgd", "outer_iterations": 1, "local_steps": 2}
    with prunex_mpi.replicate(WORLD, model, optimizer, **given) as replica:
        with pytest.raises(UserError, match=r"optimizer.step\(\) was called beside"):
            optimizer.step()
        with pytest.raises(UserError, match=r"step\(\) without a backward pass") as caught:
            replica.step()
        assert caught.value.together
        model(torch.ones(4, 3, 8, 8)).sum().backward()
        replica.step()
        late = "the delivered network after step 1 of 2, between two exchanges"
        with pytest.raises(UserError, match=late), replica.delivered():
            pass
        with pytest.raises(UserError, match=r"step\(\) without a backward pass"):
            replica.optimizer.step()
        # A rank without a batch of its own.
        model.zero_grad(set_to_none=False)
        replica.optimizer.step()
        with pytest.raises(UserError, match="the run has had its 2 steps"):
            replica.step()
    with pytest.raises(UserError, match=r"step\(\) after close\(\)"):
        replica.step()


@pytest.mark.two_ranks
def test_dion_hands_the_step_of_hidden_matrices_to_plain_sgd() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = {**LENGTH, "method": "dion", "momentum": 0.9}
    with prunex_mpi.replicate(WORLD, model, optimizer, **given) as replica:
        before = [p.detach().clone() for p in model.parameters()]
        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(WORLD.rank))
        model(inputs).square().sum().backward()
        gradients = [WORLD.allreduce(p.grad.numpy()) / WORLD.size for p in model.parameters()]
        replica.step()
        steps = [(p - b) / -0.5 for p, b in zip(model.parameters(), before, strict=True)]
    # Of a quarter of 8 columns, orthonormal to the left, of length one to the right.
    assert torch.linalg.matrix_rank(steps[0], atol=1e-3) == 2
    assert steps[0].norm().item() == pytest.approx(2**0.5, rel=1e-3)
    for step, gradient in list(zip(steps, gradients, strict=True))[1:]:
        torch.testing.assert_close(step.detach(), torch.from_numpy(gradient), rtol=1e-4, atol=1e-5)


@pytest.mark.two_ranks
def test_a_network_of_which_nothing_is_pruned_yet_is_told(caplog: pytest.LogCaptureFixture) -> None:
    replica = trained(False, 1)
    numbers = [p.numel() for p in replica.model.parameters()]
    assert [p.numel() for p in replica.smaller().parameters()] == numbers
    told = "nothing is pruned, or not yet" in caplog.text
    assert told == (WORLD.rank == 0)
    replica.close()


@pytest.mark.two_ranks
def test_another_setting_than_that_of_a_state_is_named() -> None:
    replica = trained(False, 1)
    state = replica.state_dict()
    replica.close()
    other = trained(False, 1, payload="int4")
    with pytest.raises(UserError, match=r"other settings of replicate: payload = .int4. here"):
        other.load_state_dict(state)
    other.close()


@pytest.mark.two_ranks
def test_the_state_of_a_model_of_as_many_parameters_is_refused() -> None:
    def replica_of(*layers: nn.Module) -> Replica:
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return prunex_mpi.replicate(WORLD, model, optimizer, method="dense", **LENGTH)

    with replica_of(nn.Linear(3, 2), nn.ReLU(), nn.BatchNorm1d(2)) as replica:
        state = replica.state_dict()
    with (
        replica_of(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.ReLU()) as other,
        pytest.raises(UserError, match=r"the state is of another model: 1\.weight \[2\]"),
    ):
        other.load_state_dict(state)


def trained(scaled: bool, length: int = 6, **given: Any) -> Replica:
    """Return a replica of a small network after outer iterations, the losses scaled or not."""
    torch.manual_seed(0)
    model = new_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if scaled else None
    replica = prunex_mpi.replicate(
        *(WORLD, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)),
        **{**LENGTH, **STAGES, "method": "prunex", "groups": ["coupled"], "ranks_per_node": 1},
        **{"example": torch.zeros(2, 3, 8, 8), "scaler": scaler, **given},
    )
    generator = torch.Generator().manual_seed(WORLD.rank)
    while len(replica.records) < length:
        images = torch.randn(8, 3, 8, 8, generator=generator)
        loss = F.mse_loss(model(images), images.mean((2, 3))[:, :2])
        (scaler.scale(loss) if scaler else loss).backward()
        replica.step(loss)
    return replica


@pytest.mark.two_ranks
def test_a_state_of_before_is_loaded_into_a_loop_that_has_gone_on() -> None:
    replica = trained(False, 1)
    saved = replica.state_dict()
    model, scheduled = replica.model, replica.optimizer
    for _ in range(LENGTH["local_steps"]):
        model(torch.ones(4, 3, 8, 8)).sum().backward()
        replica.step()
    replica.load_state_dict(saved)
    # What a scheduler sets, steps take.
    scheduled.param_groups[0]["lr"] = 0.0
    before = [p.clone() for p in model.parameters()]
    model(torch.ones(4, 3, 8, 8)).sum().backward()
    replica.step()
    assert all(map(torch.equal, before, model.parameters()))
    replica.close()


@pytest.mark.two_ranks
def test_a_scaler_changes_no_weight_and_skips_what_overflows() -> None:
    plain, scaled = trained(False), trained(True)
    # Powers of two scale without rounding.
    equal = torch.equal(plain._context.state.z, scaled._context.state.z)
    assert equal
    plain.close()
    scaled.close()


@pytest.mark.two_ranks
def test_statistics_are_estimated_on_batches_that_are_given() -> None:
    batches = [torch.randn(16, 3, 8, 8) for _ in range(4)]
    # Before masks freeze: then averages follow what is trained on them.
    with trained(False, 3, bn="recalibrate", calibrate=batches) as replica:
        assert not replica.records[-1]["frozen"]
        with replica.delivered() as network, torch.no_grad():
            norm, conv = network[1], network[0]
            means = torch.stack([conv(batch).mean((0, 2, 3)) for batch in batches]).mean(0)
            total = WORLD.allreduce(means.numpy()) / WORLD.size
            alike = torch.allclose(norm.running_mean, torch.from_numpy(total), atol=1e-5)
        assert alike


@pytest.mark.two_ranks
def test_what_is_clipped_is_what_is_averaged() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    given = {"outer_iterations": 1, "local_steps": 1, "clip_grad": 0.5, "method": "dense"}
    with prunex_mpi.replicate(WORLD, model, optimizer, **given) as replica:
        before = [p.detach().clone() for p in model.parameters()]
        (100 * model(torch.randn(4, 3, 8, 8)).sum()).backward()
        replica.step()
    moved = sum(
        float((p - b).square().sum()) for p, b in zip(model.parameters(), before, strict=True)
    )
    assert moved**0.5 == pytest.approx(0.5, rel=1e-3)
