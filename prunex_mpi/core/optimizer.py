"""An optimizer of torch over a model's own parameters, and what it remembers as flat vectors.

What torch's optimizers keep per parameter in tensors of its shape (momentum, second moments) lies
in one flat vector of the layout each, of which the optimizer's state holds views. So the memory can
be masked, averaged over ranks, saved, and cut when channels leave, whichever optimizer it is. An
optimizer allocates in its first step: what is new is moved after each step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.core.muon import Muon, hidden_matrices
from prunex_mpi.models.layout import Layout, trained_parameters
from prunex_mpi.settings.fields import Settings

# AdamW's, as in its paper.
EPSILON = 1e-8
# What torch's optimizers call a running mean of gradients.
FIRST_MOMENTS = ("momentum_buffer", "exp_avg")
# Whether the parameters of a group have weight decay, for those that are built here.
DECAYS = "decays"


class OptimizerMemory:
    """The memory of `optimizer`: `moments`, flat [numel] each, and `numbers`, one per parameter.

    Of one that is `given`, by somebody's own loop, rate and weight decay are left alone.

    `optimizer` steps the trained parameters of `model`, all or some of them; moments of those that
    it does not step are zero. Raises UserError where it steps parameters of something else.
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
                    self._adopt_moment_(number, parameter, name, tensor)
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

    def _adopt_moment_(
        self, number: int, parameter: nn.Parameter, name: str, tensor: Tensor
    ) -> None:
        if name not in self.moments:
            # A moment may have another precision than its parameter.
            self.moments[name] = tensor.new_zeros(self.layout.numel)
        segment = self.layout.segments[number]
        view = self.moments[name][segment.place].view(segment.shape)
        if tensor.data_ptr() != view.data_ptr():
            view.copy_(tensor)
            self.optimizer.state[parameter][name] = view

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
    chosen = {segment.name for segment in hidden_matrices(model, layout)} if muon else set()
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
        return Muon(groups, lr=lr, betas=betas, eps=EPSILON)
    if settings.optimizer == "adamw":
        adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=EPSILON, fused=True)
        allocate_(adamw, ("exp_avg", "exp_avg_sq"), counts=True)
        return adamw
    momentum = 0.0 if settings.method.own_momentum else settings.momentum
    sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)
    # The fused step leaves a buffer of its own uninitialised when fp16 skips the first step.
    allocate_(sgd, ("momentum_buffer",) if momentum else ())
    return sgd


def allocate_(
    optimizer: torch.optim.Optimizer, moments: Sequence[str], counts: bool = False
) -> None:
    """Give the optimizer the state, zero, that it would allocate in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state.update({name: torch.zeros_like(parameter) for name in moments})
            if counts:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
