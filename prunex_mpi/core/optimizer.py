"""The optimizer of the local steps, and what it remembers from one step to the next."""

import torch
from torch import Tensor

from prunex_mpi.settings.fields import Settings

# AdamW's second coefficient and its epsilon, as in its paper; the first one is `--momentum`.
BETA2, EPSILON = 0.999, 1e-8
# The names of what is remembered, by those that torch has for it.
SGD_STATE = {"momentum_buffer": "momentum"}
ADAMW_STATE = {"exp_avg": "momentum", "exp_avg_sq": "second_moment", "step": "steps_taken"}


def build_optimizer(theta: Tensor, settings: Settings) -> torch.optim.Optimizer:
    """Return the optimizer over the flat `theta`, its state allocated; `theta.grad` is read.

    The fused steps make no temporaries: one pass for weight decay, momentum and update. AdamW's
    weight decay is decoupled: theta *= 1 - lr decay (Loshchilov and Hutter 2019).
    """
    if settings.optimizer == "adamw":
        betas = settings.momentum, BETA2
        adamw = torch.optim.AdamW([theta], lr=settings.lr, betas=betas, eps=EPSILON, fused=True)
        moments = {key: torch.zeros_like(theta) for key in ("exp_avg", "exp_avg_sq")}
        count = torch.zeros((), dtype=torch.float32, device=theta.device)
        adamw.state[theta].update(step=count, **moments)
        return adamw
    momentum = 0.0 if settings.method.own_momentum else settings.momentum
    sgd = torch.optim.SGD([theta], lr=settings.lr, momentum=momentum, fused=True)
    if momentum:
        # The fused step leaves a buffer of its own uninitialised when fp16 skips the first step.
        sgd.state[theta]["momentum_buffer"] = torch.zeros_like(theta)
    return sgd


def remembered(optimizer: torch.optim.Optimizer, theta: Tensor) -> dict[str, Tensor]:
    """Return what the optimizer remembers, by the names that it has in checkpoints.

    `momentum` and, of AdamW, `second_moment` are as long as `theta`; its `steps_taken` is 0-dim.
    """
    names = ADAMW_STATE if isinstance(optimizer, torch.optim.AdamW) else SGD_STATE
    state = optimizer.state[theta]
    return {name: state[key] for key, name in names.items() if key in state}


def momentum_of(optimizer: torch.optim.Optimizer, theta: Tensor) -> Tensor | None:
    """Return the momentum, of AdamW the first moment; None where there is none."""
    return remembered(optimizer, theta).get("momentum")
