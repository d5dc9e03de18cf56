"""Cut groups of channels out of a network: its tensors and the sizes of its modules."""

import copy
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import FAILURE, UserError, one_line
from prunex_mpi.models.standalone import (
    ATTENTIONS,
    BATCH_NORMS,
    CONVOLUTIONS,
    SlimAttention,
    fill_,
    resize_,
)
from prunex_mpi.pruning.coupling import Coupling

WEIGHT = ".weight"
STATISTICS = (".running_mean", ".running_var")
# Of the largest output, or of 1, for sums in another order: in float64, and in a dtype of less.
EXACT, TOLERANCE = 1e-9, 1e-3
NOISE = 0.1


def shrink(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> nn.Module:
    """Return a copy of `model` without the groups of `removed`, bool [groups].

    Raises UserError where a parameter belongs to a module that can't be made smaller.
    """
    smaller = copy.deepcopy(model)
    resize_(smaller, smaller_sizes(model, coupling, removed))
    fill_(smaller, smaller_tensors(model, coupling, removed))
    return smaller


@torch.no_grad()
def verify(model: nn.Module, coupling: Coupling, image_size: int) -> None:
    """Try the coupling: a network with half of each set at zero and the one without must agree.

    Copies of `model`, on the CPU, in float64, or in its own dtype where it does not run in that.
    Raises UserError where they differ or the smaller one can't run, so that a training does not end
    with a network that can't be exported.
    """
    removed = np.zeros(coupling.total, dtype=bool)
    for s in coupling.sets:
        removed[s.start + 1 : s.start + s.count : 2] = True
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, image_size, image_size, generator=generator, dtype=torch.float64)
    masked, allowed = _masked_copy(model, coupling, removed).double(), EXACT
    wanted = _in_double(masked, image)
    if wanted is None:
        masked, allowed = _masked_copy(model, coupling, removed), TOLERANCE
        image = image.to(next(masked.parameters()).dtype)
        wanted = masked(image)
    try:
        found = shrink(masked, coupling, removed)(image)
        apart = float((found - wanted).abs().max())
        reason = f"the outputs differ by {apart:.2g}"
    except UserError as error:
        apart, reason = math.inf, str(error)
    # Whatever the model's own code meets at other sizes.
    except Exception as error:
        apart, reason = math.inf, one_line(error)
    if not apart <= allowed * max(1.0, float(wanted.abs().max())):
        raise UserError(
            f"coupled groups: this model does not work without its channels ({reason}); "
            "choose another --model or other --groups"
        )


@torch.no_grad()
def _masked_copy(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> nn.Module:
    """Return a copy in evaluation mode with the groups of `removed` at zero.

    With noise on all vectors: BatchNorm and biases begin as zeros and ones that hide a mistake.
    """
    generator = torch.Generator().manual_seed(0)
    masked = copy.deepcopy(model).eval()
    for name, parameter in masked.named_parameters():
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=NOISE)
        for dim, ids in ((0, coupling.rows.get(name)), (1, coupling.columns.get(name))):
            if ids is not None:
                gone = torch.from_numpy(np.flatnonzero(~_kept(ids, removed)))
                parameter.index_fill_(dim, gone, 0.0)
    return masked


def _in_double(model: nn.Module, image: Tensor) -> Tensor | None:
    """Return the outputs in float64, None where the model's own code does not compute in it."""
    try:
        outputs = model(image)
    # Whatever that code meets.
    except Exception:
        return None
    return outputs if outputs.dtype == torch.float64 else None


def smaller_sizes(
    model: nn.Module, coupling: Coupling, removed: np.ndarray
) -> dict[str, dict[str, int]]:
    """Return what `standalone.resize_` takes: the sizes of every module that can have others.

    Raises UserError where a parameter that gets smaller belongs to none of these.
    """
    sizes: dict[str, dict[str, int]] = {}

    def left(known: Mapping[str, np.ndarray], name: str, size: int) -> int:
        return int(_kept(known[name], removed).sum()) if name in known else size

    for name, module in model.named_modules():
        weight = f"{name}{WEIGHT}" if name else "weight"
        if isinstance(module, ATTENTIONS):
            inner = module.num_heads * module.head_dim
            rows = left(coupling.rows, f"{name}.in_proj_weight", 3 * inner)
            sizes[name] = {"num_heads": rows // (3 * module.head_dim)}
        elif isinstance(module, BATCH_NORMS):
            sizes[name] = {"num_features": left(coupling.rows, weight, module.num_features)}
        elif isinstance(module, nn.Linear) and attention_of(model, weight) is None:
            sizes[name] = {
                "in_features": left(coupling.columns, weight, module.in_features),
                "out_features": left(coupling.rows, weight, module.out_features),
            }
        elif isinstance(module, CONVOLUTIONS):
            outputs = left(coupling.rows, weight, module.out_channels)
            inputs, groups = left(coupling.columns, weight, module.in_channels), module.groups
            if groups > 1 and groups == module.in_channels:
                # Depthwise: with each input channel go all of its outputs.
                inputs = groups = outputs * module.in_channels // module.out_channels
            sizes[name] = {"in_channels": inputs, "out_channels": outputs, "groups": groups}
    for known in (coupling.rows, coupling.columns):
        for name, ids in known.items():
            owner = name.rpartition(".")[0]
            if (
                owner not in sizes
                and attention_of(model, name) is None
                and not _kept(ids, removed).all()
            ):
                kind = type(owner_of(model, name)).__name__
                raise UserError(f"{name}: a {kind} can't be made smaller", FAILURE)
    return sizes


def smaller_tensors(model: nn.Module, coupling: Coupling, removed: np.ndarray) -> dict[str, Tensor]:
    """Return the state dict of `model` without the groups of `removed`: copies, same dtype."""
    first: dict[int, str] = {}
    canonical = {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    tensors = {}
    for key, tensor in model.state_dict().items():
        name = canonical.get(key, key)
        rows, columns = coupling.rows.get(name), coupling.columns.get(name)
        if key.endswith(STATISTICS):
            weight = key.rpartition(".")[0] + WEIGHT
            rows = coupling.rows.get(canonical.get(weight, weight))
        left = slices_left(tensor, rows, columns, removed)
        tensors[key] = left.detach().clone(memory_format=torch.contiguous_format)
    return tensors


def slices_left(
    tensor: Tensor, rows: np.ndarray | None, columns: np.ndarray | None, removed: np.ndarray
) -> Tensor:
    """Return `tensor` without its slices of the groups of `removed`; None where it has none."""
    for dim, ids in ((0, rows), (1, columns)):
        if ids is not None:
            kept = torch.from_numpy(np.flatnonzero(_kept(ids, removed))).to(tensor.device)
            tensor = tensor.index_select(dim, kept)
    return tensor


def _kept(ids: np.ndarray, removed: np.ndarray) -> np.ndarray:
    """Return which slices stay, bool of the length of `ids`."""
    return (ids < 0) | ~removed[ids]


def owner_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module that holds the parameter `name`."""
    return model.get_submodule(name.rpartition(".")[0])


def attention_of(model: nn.Module, name: str) -> nn.MultiheadAttention | SlimAttention | None:
    """Return the attention that the parameter `name` is part of, if it is of one."""
    path = name.rpartition(".")[0]
    for candidate in (path, path.rpartition(".")[0]):
        module = model.get_submodule(candidate)
        if isinstance(module, ATTENTIONS):
            return module
    return None
