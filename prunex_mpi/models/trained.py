"""Read trained weights from a file and load them into a model, which may have other classes.

Nothing that is read is executed: safetensors, or torch files with `weights_only`.
"""

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError, listed, one_line, quote
from prunex_mpi.base.files import CHUNK_BYTES, loads, open_regular
from prunex_mpi.models.dummy_input import find_ends
from prunex_mpi.models.inputs import Inputs, Tokens
from prunex_mpi.models.standalone import MODEL, WITH_AUXILIARY_HEADS, fill_, names_of_shared

# Below, `weights_only` does not keep files from executing code (CVE-2025-32434, CVE-2026-24747).
SAFE_TORCH = (2, 10)
# Keys under which a file may hold the state dict, and prefixes that wrappers give its names.
WRAPPERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")
# How libraries name the file that says in which of several files each tensor is.
INDEX = ".safetensors.index.json"
# What describes a model in a folder of transformers.
CONFIG = "config.json"
# By so many names it is found what others lack.
TRIED_NAMES = 8
# Torchvision's first DenseNets were saved under names that it renames when it loads them.
DENSENET = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.\w+)$")
AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
# Normalisation of models with auxiliary heads, which convert torchvision's usual one inside.
CENTRED = ((0.5,) * 3, (0.5,) * 3)
Moments = tuple[tuple[float, ...], tuple[float, ...]]


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits; raise UserError (UNREADABLE)."""
    digest = hashlib.sha256()
    try:
        for part in (path, *shards_of(path)):
            with open_regular(part) as file:
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
    except OSError as error:
        raise UserError(f"cannot read weights {path}: {error.strerror}", UNREADABLE) from None
    return digest.hexdigest()


def saved_in(folder: Path) -> Path | None:
    """Return the index of shards in a folder, or the one file that `transformers` has saved."""
    index = next(iter(sorted(folder.glob(f"*{INDEX}"))), None)
    # An exported network has no config.
    whole = all((folder / name).is_file() for name in (CONFIG, MODEL))
    return index or (folder / MODEL if whole else None)


def shards_of(path: Path) -> list[Path]:
    """Return the files that an index of shards names, none for a file of weights.

    Raises UserError (UNREADABLE) for an index that can't be read, and OSError.
    """
    if not path.name.endswith(INDEX):
        return []
    with open_regular(path) as file:
        text = file.read()
    try:
        names = sorted({Path(name) for name in loads(text)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        names = []
    if not names or any(len(name.parts) != 1 for name in names):
        raise UserError(f"{path} names no shards beside it: save the model again", UNREADABLE)
    return [path.parent / name for name in names]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a safetensors or torch file, without wrappers and prefixes.

    Of an index of shards that of all of them. Raises UserError (UNREADABLE) for a file that can't
    be read or holds something else.
    """
    try:
        shards = shards_of(path)
    except OSError as error:
        raise UserError(f"cannot read weights {path}: {error.strerror}", UNREADABLE) from None
    return {k: t for part in shards or [path] for k, t in _read_one(part).items()}


def _read_one(path: Path) -> dict[str, Tensor]:
    try:
        with open_regular(path) as file:
            # A safetensors file begins with the length of its header, which is JSON.
            is_safe = file.read(9)[8:] == b"{"
        if is_safe:
            found = load_file(path)
        elif torch.__version__ < SAFE_TORCH:
            raise UserError(
                f"weights {path} are no safetensors file, and torch {torch.__version__} may "
                "execute what is in one of its own: save them as safetensors, or take torch 2.10",
                UNREADABLE,
            )
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read weights {path}: {error.strerror}", UNREADABLE) from None
    # The libraries may raise anything for a damaged file.
    except Exception as error:
        reason = re.split(r"Please file an issue|\. This file can", one_line(error))[0][:120]
        raise UserError(
            f"weights {path} are no safetensors file and no torch file of tensors alone ({reason}):"
            " save the model's state_dict()",
            UNREADABLE,
        ) from None
    return _unwrapped(found, path)


def _unwrapped(found: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict in the contents of a file, without prefixes of wrapping modules."""
    while (inner := next((key for key in WRAPPERS if _holds(found, key)), None)) is not None:
        found = found[inner]
    tensors = {}
    if isinstance(found, Mapping):
        tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    if not tensors or len(tensors) < len(found):
        kinds = found if isinstance(found, Mapping) else [type(found).__name__]
        shown = listed(quote(str(key), 40) for key in kinds if key not in tensors)
        raise UserError(
            f"weights {path} hold no state dict ({shown}): save the model's state_dict(), alone or "
            f"under {' or '.join(WRAPPERS)}",
            UNREADABLE,
        )
    while prefix := next((p for p in PREFIXES if all(key.startswith(p) for key in tensors)), ""):
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def _holds(found: Any, key: str) -> bool:
    return isinstance(found, Mapping) and isinstance(found.get(key), Mapping)


def find_torchvision_file(model: str) -> tuple[Path, Moments]:
    """Return the file of torchvision's best weights of `model`, and (mean, std) of its images.

    It is in torch's cache (TORCH_HOME), or is downloaded there. Raises UserError for a model that
    torchvision has no weights for and when the file can't be downloaded.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if model not in known:
        raise UserError(
            f"--init-from torchvision has no weights of model {model}: give a file, or a model of "
            "torchvision",
            USAGE,
        )
    weights = torchvision.models.get_model_weights(model).DEFAULT
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    path = folder / os.path.basename(urlparse(weights.url).path)

    try:
        # What is there is whole: it gets its name last.
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            prefix = torch.hub.HASH_REGEX.search(path.name)
            digest = prefix.group(1) if prefix else None
            torch.hub.download_url_to_file(weights.url, str(path), digest, progress=False)
    # No network, no room, another file than was promised.
    except Exception as error:
        raise UserError(
            f"cannot download {weights.url} to {folder} ({one_line(error)}): copy it there from "
            "another machine, or set TORCH_HOME to a cache that has it",
            UNREADABLE,
        ) from None
    transforms = weights.transforms()
    if model in WITH_AUXILIARY_HEADS:
        return path, CENTRED
    return path, (tuple(map(float, transforms.mean)), tuple(map(float, transforms.std)))


def fit_(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    inputs: Inputs,
    where: str,
    others: bool = False,
) -> str:
    """Load trained weights and BatchNorm statistics into `model`; return what was left out, or "".

    The layer that makes the classes keeps its fresh weights where the file has another number of
    classes, or if the classes are `others`. What the model shares may have any of its names in the
    file. All names may lack what a wrapper in the model puts before them, or have it. Raises
    UserError (UNREADABLE) where more differs.
    """
    mine = model.state_dict()
    tensors = _renamed(tensors, mine)
    theirs = {DENSENET.sub(r"\1\2", key): value for key, value in tensors.items()}
    if not any(key.startswith(AUXILIARY) for key in mine):
        theirs = {key: t for key, t in theirs.items() if not key.startswith(AUXILIARY)}
    shared = names_of_shared(model.state_dict(keep_vars=True).items())
    for names in shared:
        if there := [key for key in names if key in theirs]:
            theirs = dict.fromkeys(names, theirs[there[0]]) | theirs
    head, replaced = find_ends(model, inputs).head.rpartition(".")[0], ""
    weight = f"{head}.weight"
    if head and weight in theirs and theirs[weight].dim() == mine[weight].dim():
        here, there = list(mine[weight].shape), list(theirs[weight].shape)
        if (others or here[0] != there[0]) and here[1:] == there[1:]:
            own = {key for key in mine if key.startswith(f"{head}.")}
            theirs = {key: t for key, t in theirs.items() if key not in own}
            theirs |= {key: mine[key] for key in own}
            than = "other classes than the data"
            if here[0] != there[0]:
                than = f"{there[0]} classes and the data {here[0]}"
            replaced = f"{where} has {than}: layer {head} begins anew"
    # Old files lack the counters, which are not used here.
    counters = {key: t for key, t in mine.items() if key.endswith("num_batches_tracked")}
    theirs = {**counters, **theirs}
    odd = [
        f"{key} is {_shape(theirs.get(key))} there and {_shape(mine.get(key))} in the model"
        for key in {**mine, **theirs}
        if key not in mine or key not in theirs or mine[key].shape != theirs[key].shape
    ]
    if odd:
        flags = "--model and --stem"
        if isinstance(inputs, Tokens):
            flags = "--model, --context and --tokenizer"
        raise UserError(
            f"{where} does not fit the model: {listed(odd, '; ')}; give the {flags} it is of",
            UNREADABLE,
        )
    wild = [key for key, t in theirs.items() if not bool(torch.isfinite(t).all())]
    if wild:
        raise UserError(f"{where} has values that are not finite: {listed(wild)}", UNREADABLE)
    for names in shared:
        first, *rest = (theirs[key].to(mine[key].dtype) for key in names)
        if not all(torch.equal(first, tensor) for tensor in rest):
            such = ", such as gpt_nano-untied" * isinstance(inputs, Tokens)
            raise UserError(
                f"{where} does not fit the model: {listed(names)} are one tensor in the model and "
                f"differ there; give a --model in which they are apart{such}",
                UNREADABLE,
            )
    fill_(model, theirs)
    return replaced


def _renamed(theirs: Mapping[str, Tensor], mine: Collection[str]) -> Mapping[str, Tensor]:
    """Return tensors with what their names lack before them, or without what they have, if any."""
    if any(key in mine for key in theirs):
        return theirs
    pairs = [(key, name) for key in islice(theirs, TRIED_NAMES) for name in mine]
    lacking = {name.removesuffix(key) for key, name in pairs if name.endswith(f".{key}")}
    beyond = {key.removesuffix(name) for key, name in pairs if key.endswith(f".{name}")}
    added = [{f"{prefix}{key}": t for key, t in theirs.items()} for prefix in lacking]
    taken = [{key.removeprefix(prefix): t for key, t in theirs.items()} for prefix in beyond]
    return max((theirs, *added, *taken), key=lambda named: sum(key in mine for key in named))


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else str(list(tensor.shape))
