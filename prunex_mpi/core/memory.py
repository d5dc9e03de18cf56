"""What a method remembers from one step to the next: named tensors that checkpoints hold.

A name says whose a tensor is. `own.` tensors are each rank's: parts of a vector whose sum over all
ranks is what counts, such as the gradient that has not been sent yet; on other nodes the sum is
dealt out anew by the ranks' weights. `shared.` tensors are the same on all ranks that use them.
"""

import torch
from torch import Tensor

from prunex_mpi.compress.low_rank import new_right_factors, split_layout
from prunex_mpi.compress.sparse import check_positions
from prunex_mpi.compress.support import bucket_numel, build_tracker
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

OWN, SHARED = "own.", "shared."


def build_memory(settings: Settings, layout: Layout, theta: Tensor) -> dict[str, Tensor]:
    """Allocate the memory of the method as it is before the first step.

    `own.` tensors have theta's dtype and device, `shared.` tensors any (small ones that decide stay
    on the host); all are contiguous.
    Raises UserError where the method can't work on such a layout.
    """
    match settings.method:
        case "topk":
            check_positions(layout)
            return {"own.residual": torch.zeros_like(theta)}
        case "dgc":
            check_positions(layout)
            # Both are linear in what the workers contribute, so their sums over ranks count.
            return {
                "own.momentum": torch.zeros_like(theta),
                "own.residual": torch.zeros_like(theta),
            }
        case "powersgd":
            split = split_layout(layout, settings.powersgd_rank)
            return {
                "own.residual": torch.zeros_like(theta),
                "shared.right_factors": new_right_factors(split, settings.seed, theta),
            }
        case "diloco":
            return {"shared.outer_momentum": torch.zeros_like(theta)}
        case "pactrain":
            return build_tracker(theta, bucket_numel(settings.bucket_mib, theta))
        case "prunetrain":
            coefficient = torch.zeros(1, dtype=torch.float64, device=theta.device)
            return {"shared.lasso_coefficient": coefficient}
        case _:
            return {}
