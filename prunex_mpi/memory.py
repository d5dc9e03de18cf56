"""What a method remembers from one step to the next: named tensors that checkpoints hold.

A name says whose a tensor is. `own.` tensors are each rank's: parts of a vector whose sum over all
ranks is what counts, such as the gradient that has not been sent yet; on other nodes the sum is
dealt out anew by the ranks' weights. `shared.` tensors are the same on all ranks.
"""

import torch
from torch import Tensor

from prunex_mpi.layout import Layout
from prunex_mpi.settings import Settings

OWN, SHARED = "own.", "shared."


def build_memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate the memory of the method as it is before the first step, on theta's device.

    `own.` tensors have theta's dtype, `shared.` tensors any dtype; all are contiguous.
    """
    match settings.method:
        case "topk":
            return {"own.residual": torch.zeros_like(theta)}
        case "diloco":
            return {"shared.outer_momentum": torch.zeros_like(theta)}
        case "prunetrain":
            coefficient = torch.zeros(1, dtype=torch.float64, device=theta.device)
            return {"shared.lasso_coefficient": coefficient}
        case _:
            return {}
