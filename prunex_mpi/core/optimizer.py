"""An optimizer of torch over a model's own parameters, and what it remembers as flat vectors.

What torch's optimizers keep per parameter in tensors of its shape (momentum, second moments) lies
in one flat vector of the layout each, of which the optimizer's state holds views. So the memory can
be masked, averaged over ranks, saved, and cut when channels leave, whichever optimizer it is. An
optimizer allocates in its first step: what is new is moved after each step.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest orthogonal one. It takes
the weights of linear layers, attention and convolutions, these as [outputs, inputs x kernel], but
for those of the last layer; that one, embeddings, norms, biases and parameters without a layer go
to AdamW. Its step has the size of AdamW's (Liu et al. 2025), so one learning rate and one weight
decay, decoupled, serve both. All as in `torch.optim.Muon`, which multiplies matrices in bfloat16
everywhere: on processors without instructions for it that takes 24 times as long as float32.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.layout import Layout, trained_parameters
from prunex_mpi.settings.fields import Settings

# AdamW's, as in its paper.
EPSILON = 1e-8
ADAMW_STATE = ("exp_avg", "exp_avg_sq", "step")
# What torch's optimizers call a running mean of gradients.
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
# Whether the parameters of a group have weight decay, for those that are built here.
DECAYS = "decays"


class OptimizerMemory:
    """The memory of `optimizer`: `moments`, flat [numel] each, and `numbers`, one per parameter.

    Of one that is `given`, by somebody's own loop, rate and weight decay are left alone.

    It steps the trained parameters of `model` but for `unstepped` of them, whose moments are zero.
    Raises UserError where it steps parameters of something else.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        layout: Layout,
        given: bool = False,
    ) -> None:
        self.optimizer, self.given = optimizer, given
        self.layout = layout
        self.parameters = trained_parameters(model)
        self.moments: dict[str, Tensor] = {}
        self.numbers: dict[str, Tensor] = {}
        self.adopted = 0
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if others := len(stepped - {id(p) for p in model.parameters()}):
            raise UserError(
                f"the optimizer steps {others} tensors that are not parameters of the model; make "
                "one optimizer of model.parameters()"
            )
        self.unstepped = sum(id(p) not in stepped for p in self.parameters.values())
        self.adopt_()

    def adopt_(self) -> None:
        """Move what the optimizer has allocated since into flat vectors; views take its place."""
        state = self.optimizer.state
        entries = sum(map(len, state.values()))
        if entries == self.adopted:
            return
        for number, parameter in enumerate(self.parameters.values()):
            for name, tensor in state.get(parameter, {}).items():
                if not isinstance(tensor, Tensor):
                    continue
                if tensor.shape == parameter.shape:
                    if name not in self.moments:
                        # A moment may have another precision than its parameter.
                        self.moments[name] = tensor.new_zeros(self.layout.numel)
                    segment = self.layout.segments[number]
                    view = self.moments[name][segment.place].view(segment.shape)
                    if tensor.data_ptr() != view.data_ptr():
                        view.copy_(tensor)
                        state[parameter][name] = view
                elif tensor.dim() == 0:
                    if name not in self.numbers:
                        self.numbers[name] = tensor.new_zeros(len(self.parameters))
                    state[parameter][name] = self.numbers[name][number]
                    state[parameter][name].copy_(tensor)
        self.adopted = entries

    def load_(self, saved: dict[str, Any]) -> None:
        """Load a `state_dict` of the optimizer."""
        self.optimizer.load_state_dict(saved)
        self.adopted = -1
        self.adopt_()

    def flat_of(self, saved: dict[str, Any]) -> dict[str, Tensor]:
        """Return what a `state_dict` of the optimizer holds as flat vectors, on the CPU."""
        found = {n: torch.zeros_like(t, device="cpu") for n, t in self.tensors().items()}
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        numbers = {id(p): number for number, p in enumerate(self.parameters.values())}
        for index, entry in saved["state"].items():
            number = numbers[id(stepped[index])]
            place = self.layout.segments[number].place
            for name in entry.keys() & found.keys():
                part = found[name][place if name in self.moments else number]
                part.copy_(entry[name].view(part.shape))
        return found

    def set_rate_(self, rate: float) -> None:
        """Set the learning rate of all parameters."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def set_decay_(self, decay: float) -> None:
        """Let the parameters that decay, by `build_optimizer`, do so by `decay`."""
        for group in () if self.given else self.optimizer.param_groups:
            group["weight_decay"] = decay if group[DECAYS] else 0.0

    def tensors(self) -> dict[str, Tensor]:
        """Return all that it remembers by torch's names, no copies."""
        return self.moments | self.numbers

    @property
    def first_moment(self) -> Tensor | None:
        """The running mean of gradients, flat [numel], None where there is none."""
        return next((self.moments[n] for n in FIRST_MOMENTS if n in self.moments), None)

    def follow_(self, model: nn.Module, layout: Layout, moments: dict[str, Tensor]) -> None:
        """Step the parameters of a model that has become smaller, with `moments` of its layout."""
        state, now = self.optimizer.state, trained_parameters(model)
        new = {id(p): now[name] for name, p in self.parameters.items()}
        for group in self.optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]
        self.moments = {name: moments[name].contiguous() for name in self.moments}
        for segment, (name, old) in zip(layout.segments, self.parameters.items(), strict=True):
            if old in state:
                entry = state[now[name]] = state.pop(old)
                for key in entry.keys() & self.moments.keys():
                    entry[key] = self.moments[key][segment.place].view(segment.shape)
        self.layout, self.parameters = layout, now


def build_optimizer(settings: Settings, model: nn.Module, layout: Layout) -> torch.optim.Optimizer:
    """Return the optimizer of the settings over the parameters of `model`, its state allocated.

    The fused steps make no temporaries. Weight decay is set later.
    """
    parameters = trained_parameters(model)
    muon = settings.optimizer == "muon"
    chosen = {segment.name for segment in layout.hidden} if muon else set()
    on_all = settings.weight_decay_on == "all"
    kinds = [(n in chosen, on_all or p.dim() > 1) for n, p in parameters.items()]
    groups = [
        {"params": [p for p, k in zip(parameters.values(), kinds, strict=True) if k == kind]}
        | {DECAYS: kind[1], "weight_decay": 0.0}
        | ({"orthogonal": kind[0]} if muon else {})
        for kind in dict.fromkeys(kinds)
    ]
    lr, betas = settings.lr, (settings.momentum, settings.beta2)
    if muon:
        ready = not settings.method.steps_on_gradient
        return Muon(groups, lr=lr, betas=betas, eps=EPSILON, ready=ready)
    if settings.optimizer == "adamw":
        adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=EPSILON, fused=True)
        for group in adamw.param_groups:
            allocate_(adamw, group, *ADAMW_STATE)
        return adamw
    momentum = settings.momentum if settings.method.optimizer else 0.0
    sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)
    # The fused step leaves a buffer of its own uninitialised when fp16 skips the first step.
    for group in sgd.param_groups if momentum else ():
        allocate_(sgd, group, "momentum_buffer")
    return sgd


def allocate_(optimizer: torch.optim.Optimizer, group: dict[str, Any], *names: str) -> None:
    """Give parameters the state, zero, that the optimizer would allocate in its first step."""
    for parameter in group["params"]:
        state = optimizer.state[parameter]
        state.update({name: torch.zeros_like(parameter) for name in names if name != "step"})
        if "step" in names:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)


# --------------------------------------------------------------------------------------------------
# Muon
# --------------------------------------------------------------------------------------------------


# Of the Newton-Schulz iteration, chosen by Jordan et al. for a steep slope at zero.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
# Root mean square of a step of AdamW, which Muon's has as well.
STEP_RMS = 0.2


def describe_muon(layout: Layout, taker: str) -> str:
    """Return one line: which parameters `taker`, muon or dion, takes and which go to AdamW."""
    others = [s for s in layout.segments if len(s.shape) > 1 and s not in layout.hidden]
    count = sum(s.numel for s in layout.hidden)
    named = ", ".join(s.name for s in others)
    return (
        f"{taker} takes {len(layout.hidden)} matrices of hidden layers, {count:,} of "
        f"{layout.numel:,} parameters; adamw takes {named or 'no matrix'} and all of one dimension"
    )


class Muon(torch.optim.Optimizer):
    """Step the groups that are `orthogonal` by Muon and all others by AdamW, at one rate.

    The first of `betas` is Muon's coefficient too. Matrices remember `exp_avg` alone. With `ready`
    their gradients are orthonormal already, and they remember nothing.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        ready: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.ready = ready
        of_matrices = () if ready else ("exp_avg",)
        for group in self.param_groups:
            allocate_(self, group, *(of_matrices if group["orthogonal"] else ADAMW_STATE))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step along the gradients of the parameters."""
        for group in self.param_groups:
            if group["orthogonal"]:
                self._step_matrices(group)
            else:
                self._step_by_adamw(group)

    def _step_by_adamw(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        states = [self.state[p] for p in parameters]
        adamw(
            parameters,
            [p.grad for p in parameters],
            *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_matrices(self, group: dict[str, Any]) -> None:
        coefficient = group["betas"][0]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            matrix, update = (t.view(len(t), -1) for t in (parameter, parameter.grad))
            if not self.ready:
                momentum = self.state[parameter]["exp_avg"].view(matrix.shape)
                momentum.lerp_(update, 1 - coefficient)
                update = orthogonalise(update.lerp(momentum, coefficient))
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            size = STEP_RMS * max(matrix.shape) ** 0.5
            matrix.add_(update, alpha=-group["lr"] * size)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return about the orthogonal matrix nearest to `matrix` [m, n], by Newton-Schulz iterations.

    Its singular values are between about 0.7 and 1.2. In bfloat16 on CUDA devices.
    """
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide.bfloat16() if matrix.device.type == "cuda" else wide
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.T
