"""Build networks by name, or of the widths that pruning has found, to be trained from scratch.

    # mine.py, for --model mine:slim
    from prunex_mpi.models.build import fresh

    def slim(**sizes):
        return fresh("runs/slim/model", **sizes)

Beside a pruned network it shows what the weights are worth: same widths, fresh weights.
"""

import json
import math
from pathlib import Path
from typing import Any

import torchvision
from torch import Tensor, nn

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError, meant, one_line
from prunex_mpi.base.files import read_json, read_text
from prunex_mpi.base.imports import hub_folder, import_function, require_packages
from prunex_mpi.base.record_keys import check_network
from prunex_mpi.models.dummy_input import try_forward
from prunex_mpi.models.gpt import GPT_SIZES, gpt_shape
from prunex_mpi.models.inputs import Images, Inputs, Tokens, inputs_from
from prunex_mpi.models.standalone import (
    CIFAR_FAMILY,
    FORMAT,
    NARROW_RESNETS,
    PLAN,
    SMALL_VGG,
    SMALL_VIT,
    build,
    fill_,
    resize_,
)
from prunex_mpi.models.trained import CONFIG

CIFAR_STEM_MAX_SIDE = 64  # "auto" gives images up to this side the stem that keeps their resolution
# Networks that are not torchvision's, each with a stem of its own.
OF_OUR_OWN = (*CIFAR_FAMILY, SMALL_VGG, SMALL_VIT)


def build_model(name: str, inputs: Inputs, stem: str = "auto") -> nn.Module:
    """Build the network `name` with fresh weights, float32 on the CPU; try whether it fits.

    `name` is a ResNet of the CIFAR family, a torchvision classifier, a transformer for text as in
    `gpt`, hf:FOLDER of transformers, or `package.module:factory`, called with the first of
    `inputs.sizes()` and the others that its signature takes, by keyword: num_classes and
    image_size, or vocab_size and context. The weights are drawn from torch's global generator.
    Raises UserError (USAGE) for an unknown name, a stem the model does not have, a factory that
    fails, and a model that does not fit.
    """
    description = describe(name, inputs, stem)
    try:
        model = build(description)
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise UserError(
                f"model {name}: the factory returned {kind}, not a torch.nn.Module", USAGE
            )
        try_forward(model, inputs)
    except UserError:
        raise
    # The model's own code may raise anything for a size that does not fit.
    except Exception as error:
        raise UserError(
            f"model {name} does not fit {inputs.text()} ({one_line(error)}): choose another "
            f"--model or {inputs.setting}",
            USAGE,
        ) from error
    return model


def model_names() -> list[str]:
    """Return every name that `build_model` knows, sorted; factories come on top."""
    return sorted(
        {
            *OF_OUR_OWN,
            *NARROW_RESNETS,
            *GPT_SIZES,
            *torchvision.models.list_models(module=torchvision.models),
        }
    )


def describe(name: str, inputs: Inputs, stem: str = "auto") -> dict[str, Any]:
    """Return the description of a network for `standalone.build`; raise as `build_model` does.

    A factory is imported here, not called.
    """
    chosen = ""
    if folder := hub_folder(name):
        config = _read_config(name, Path(folder, CONFIG), inputs)
        return {"name": name, **inputs.sizes(), "stem": chosen, "config": config}
    if ":" in name:
        import_function("model", name, "to build it")
    elif gpt_shape(name) is None and name not in model_names():
        raise UserError(
            f"unknown model {name!r}{meant(name, model_names())} "
            "(any torchvision classifier, gpt_nano and its variants, or package.module:factory)",
            USAGE,
        )
    elif not isinstance(inputs, Images if gpt_shape(name) is None else Tokens):
        some = GPT_SIZES if isinstance(inputs, Tokens) else (*OF_OUR_OWN[:3], SMALL_VIT)
        raise UserError(
            f"model {name} does not fit {inputs.text()}: choose one of {', '.join(some)}, or "
            "package.module:factory",
            USAGE,
        )
    if _is_torchvision_resnet(name):
        small = stem == "cifar" or (stem == "auto" and inputs.side <= CIFAR_STEM_MAX_SIDE)
        chosen = "cifar" if small else "imagenet"
    elif stem == "imagenet" and (name in OF_OUR_OWN or gpt_shape(name)):
        raise UserError(f"--stem imagenet does not fit {name}, which has a stem of its own", USAGE)
    elif name not in CIFAR_FAMILY and (stem == "cifar" or (":" in name and stem != "auto")):
        raise UserError(
            f"--stem {stem} fits torchvision's ResNet family, not {name}: leave --stem out", USAGE
        )
    return {"name": name, **inputs.sizes(), "stem": chosen}


def _read_config(name: str, path: Path, inputs: Inputs) -> dict[str, Any]:
    """Return the config of a model that `transformers` has saved; raise UserError."""
    require_packages(f"model {name}", "transformers", "transformers")
    if not isinstance(inputs, Tokens):
        raise UserError(f"model {name} reads text: give --dataset text", USAGE)
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"model {name}: {path} can't be read ({one_line(error)}): give a folder that "
            "save_pretrained of transformers has written",
            UNREADABLE,
        ) from None


def _is_torchvision_resnet(name: str) -> bool:
    if name in NARROW_RESNETS:
        return True
    if ":" in name or name in OF_OUR_OWN or gpt_shape(name):
        return False
    return torchvision.models.get_model_builder(name).__module__ == "torchvision.models.resnet"


# --------------------------------------------------------------------------------------------------
# A network of the widths that pruning has found
# --------------------------------------------------------------------------------------------------


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
