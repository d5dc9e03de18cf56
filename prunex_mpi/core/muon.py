"""Muon on flat vectors: for the matrices of hidden layers, and torch's AdamW for all else.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest orthogonal one. It takes
the weights of linear layers, attention and convolutions, these as [outputs, inputs x kernel], but
for those of the last layer; that one, embeddings, norms, biases and parameters without a layer go
to AdamW. Its step has the size of AdamW's (Liu et al. 2025), so one learning rate and one weight
decay, decoupled, serve both. All as in `torch.optim.Muon`, which multiplies matrices in bfloat16
everywhere: on processors without instructions for it that takes 24 times as long as float32.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

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
    """Step `theta` [numel] by Muon in `matrices` and by AdamW elsewhere, all at one rate.

    Its state of `theta` is named as AdamW's: `exp_avg` is the momentum of both, `exp_avg_sq` is
    AdamW's alone, zero in matrices, `step` counts. `momentum` is Muon's coefficient, AdamW's first.
    """

    def __init__(
        self,
        theta: Tensor,
        layout: Layout,
        matrices: Iterable[Segment],
        *,
        lr: float,
        momentum: float,
        beta2: float,
        eps: float,
    ) -> None:
        super().__init__([theta], {"lr": lr, "weight_decay": 0.0})
        matrices = list(matrices)
        first, second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.steps = torch.zeros((), dtype=torch.float32, device=theta.device)
        self.state[theta].update(exp_avg=first, exp_avg_sq=second, step=self.steps)
        self.counts: list[Tensor] = []
        self.momentum = momentum
        self.matrices = [
            tuple(flat[s.place].view(s.shape[0], -1) for flat in (theta, theta.grad, first))
            for s in matrices
        ]
        self.adamw: torch.optim.Optimizer | None = None
        places = _between(layout, matrices)
        if places:
            views = [_view(theta, place) for place in places]
            betas = momentum, beta2
            adamw = torch.optim.AdamW(views, lr=lr, betas=betas, eps=eps, fused=True)
            for view, place in zip(views, places, strict=True):
                count = self.steps.clone()
                self.counts.append(count)
                moments = {"exp_avg": first[place], "exp_avg_sq": second[place]}
                adamw.state[view].update(step=count, **moments)
            self.adamw = adamw

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step along the gradients that `theta.grad` holds."""
        mine = self.param_groups[0]
        if self.adamw is not None:
            # A checkpoint may have set the one that counts.
            torch._foreach_copy_(self.counts, [self.steps] * len(self.counts))
            for name in ("lr", "weight_decay"):
                self.adamw.param_groups[0][name] = mine[name]
            self.adamw.step()
        for matrix, grad, momentum in self.matrices:
            momentum.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(momentum, self.momentum))
            matrix.mul_(1 - mine["lr"] * mine["weight_decay"])
            size = STEP_RMS * max(matrix.shape) ** 0.5
            matrix.add_(update, alpha=-mine["lr"] * size)
        self.steps += 1


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


def _view(theta: Tensor, place: slice) -> Tensor:
    """Return a view of a part of theta whose gradient is the same part of theta's."""
    view = theta[place]
    view.grad = theta.grad[place]
    return view


def _between(layout: Layout, matrices: list[Segment]) -> list[slice]:
    """Return the runs of flat vectors that are in none of the matrices."""
    ends = [0, *(end for s in matrices for end in (s.place.start, s.place.stop)), layout.numel]
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return [slice(start, stop) for start, stop in pairs if stop > start]
