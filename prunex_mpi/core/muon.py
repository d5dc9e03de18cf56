"""Muon for the matrices of hidden layers, and torch's AdamW for all else.

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

from prunex_mpi.models.layout import Layout, Segment

# Of the Newton-Schulz iteration, chosen by Jordan et al. for a steep slope at zero.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
# Root mean square of a step of AdamW, which Muon's has as well.
STEP_RMS = 0.2

LAYERS = (*(nn.Linear, nn.MultiheadAttention), *(nn.Conv1d, nn.Conv2d, nn.Conv3d))


def hidden_matrices(model: nn.Module, layout: Layout) -> list[Segment]:
    """Return the segments that Muon takes, in the order of the layout."""
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    inner = {id(p) for layer in layers[:-1] for p in layer.parameters(recurse=False)}
    other = [m for m in model.modules() if not isinstance(m, LAYERS)]
    # A tied embedding is no hidden layer, whichever module comes first.
    inner -= {id(p) for m in (*other, *layers[-1:]) for p in m.parameters(recurse=False)}
    names = {name for name, p in model.named_parameters() if id(p) in inner and p.dim() > 1}
    return [segment for segment in layout.segments if segment.name in names]


def describe_muon(model: nn.Module, layout: Layout) -> str:
    """Return one line: which parameters Muon takes and which go to AdamW."""
    matrices = hidden_matrices(model, layout)
    others = [s for s in layout.segments if len(s.shape) > 1 and s not in matrices]
    count = sum(s.numel for s in matrices)
    named = ", ".join(s.name for s in others)
    return (
        f"muon takes {len(matrices)} matrices of hidden layers, {count:,} of {layout.numel:,} "
        f"parameters; adamw takes {named or 'no matrix'} and all of one dimension"
    )


class Muon(torch.optim.Optimizer):
    """Step the groups that are `orthogonal` by Muon and all others by AdamW, at one rate.

    The first of `betas` is Muon's coefficient too. Matrices remember `exp_avg` alone.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["exp_avg"] = torch.zeros_like(parameter)
                if not group["orthogonal"]:
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                    device = parameter.device
                    state["step"] = torch.zeros((), dtype=torch.float32, device=device)

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
            tensors = parameter, parameter.grad, self.state[parameter]["exp_avg"]
            matrix, grad, momentum = (t.view(t.shape[0], -1) for t in tensors)
            momentum.lerp_(grad, 1 - coefficient)
            update = orthogonalise(grad.lerp(momentum, coefficient))
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
