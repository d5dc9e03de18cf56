"""Build a network of the widths that pruning has found, to be trained from scratch.

    # mine.py, for --model mine:slim
    from prunex_mpi.models.found_widths import fresh

    def slim(**sizes):
        return fresh("runs/slim/model", **sizes)

Beside a pruned network it shows what the weights are worth: same widths, fresh weights.
"""

import math
from pathlib import Path

from torch import Tensor, nn

from prunex_mpi.base.errors import USAGE, UserError
from prunex_mpi.base.files import read_json
from prunex_mpi.base.record_keys import check_network
from prunex_mpi.models.inputs import inputs_from
from prunex_mpi.models.standalone import FORMAT, PLAN, build, fill_, resize_


def fresh(folder: str | Path, **sizes: int) -> nn.Module:
    """Return the network that was exported to `folder` with fresh weights, float32 on the CPU.

    They are drawn from torch's global generator for the network of full size and cut; weights but
    those of embeddings are divided by the root of the share of inputs kept, so that sums have the
    same variance (inputs are all dimensions after the first). Raises UserError (USAGE) for a folder
    without a plan of these `sizes` of inputs.
    """
    path = Path(folder) / PLAN
    try:
        plan = read_json(path)
        description, form, layers = plan["model"], plan["format"], plan["layers"]
        known, wanted = inputs_from(description), inputs_from(sizes)
        check_network(plan, description, plan["normalisation"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} can't be read ({error}): name an exported model", USAGE) from None
    if (form, known) != (FORMAT, wanted):
        raise UserError(
            f"{path} is of {known.text()}, format {form}; this run has {wanted.text()} "
            f"and {FORMAT}",
            USAGE,
        )
    whole = build(description).state_dict()
    network = build(description)
    resize_(network, layers)
    left = network.state_dict(keep_vars=True)
    if left.keys() != whole.keys():
        raise UserError(f"{path}: its network has other parameters than the whole one", USAGE)
    # They look up, and add up nothing.
    looked_up = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
    cut = {
        name: _cut(whole[name], tensor, sums=id(tensor) not in looked_up)
        for name, tensor in left.items()
    }
    fill_(network, cut)
    return network


def _cut(whole: Tensor, like: Tensor, sums: bool) -> Tensor:
    """Return `whole` cut to the shape of `like`, scaled by the inputs kept if it `sums` them."""
    part = whole[tuple(slice(size) for size in like.shape)]
    if sums and part.dim() > 1:
        part = part * math.sqrt(math.prod(whole.shape[1:]) / math.prod(part.shape[1:]))
    return part
