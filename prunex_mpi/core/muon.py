"""Muon on flat vectors: torch's Muon for the matrices of hidden layers, its AdamW for all else.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest orthogonal one. It takes
the weights of linear layers, attention and convolutions, these as [outputs, inputs x kernel], but
for those of the last layer; that one, embeddings, norms, biases and parameters without a layer go
to AdamW. Its step has the size of AdamW's (`match_rms_adamw`, Liu et al. 2025), so one learning
rate and one weight decay, decoupled, serve both.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.layout import Layout, Segment

LAYERS = (*(nn.Linear, nn.MultiheadAttention), *(nn.Conv1d, nn.Conv2d, nn.Conv3d))


def require_muon() -> None:
    """Raise UserError where this torch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"optimizer muon: torch {torch.__version__} has none; install torch 2.9 or later, or "
            "give --optimizer adamw"
        )


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
        require_muon()
        matrices = list(matrices)
        first, second = torch.zeros_like(theta), torch.zeros_like(theta)
        self.steps = torch.zeros((), dtype=torch.float32, device=theta.device)
        self.state[theta].update(exp_avg=first, exp_avg_sq=second, step=self.steps)
        self.counts: list[Tensor] = []
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            views = [_view(theta, s.place, (s.shape[0], -1)) for s in matrices]
            muon = torch.optim.Muon(views, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
            for view, segment in zip(views, matrices, strict=True):
                muon.state[view]["momentum_buffer"] = first[segment.place].view(view.shape)
            self.parts.append(muon)
        places = _between(layout, matrices)
        if places:
            views = [_view(theta, place, (-1,)) for place in places]
            betas = momentum, beta2
            adamw = torch.optim.AdamW(views, lr=lr, betas=betas, eps=eps, fused=True)
            for view, place in zip(views, places, strict=True):
                count = self.steps.clone()
                self.counts.append(count)
                moments = {"exp_avg": first[place], "exp_avg_sq": second[place]}
                adamw.state[view].update(step=count, **moments)
            self.parts.append(adamw)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step along the gradients that `theta.grad` holds."""
        if self.counts:
            # A checkpoint may have set the one that counts.
            torch._foreach_copy_(self.counts, [self.steps] * len(self.counts))
        for part in self.parts:
            for name in ("lr", "weight_decay"):
                part.param_groups[0][name] = self.param_groups[0][name]
            part.step()
        self.steps += 1


def _view(theta: Tensor, place: slice, shape: tuple[int, ...]) -> Tensor:
    """Return a view of a part of theta whose gradient is the same part of theta's."""
    view = theta[place].view(shape)
    view.grad = theta.grad[place].view(shape)
    return view


def _between(layout: Layout, matrices: list[Segment]) -> list[slice]:
    """Return the runs of flat vectors that are in none of the matrices."""
    ends = [0, *(end for s in matrices for end in (s.place.start, s.place.stop)), layout.numel]
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return [slice(start, stop) for start, stop in pairs if stop > start]
