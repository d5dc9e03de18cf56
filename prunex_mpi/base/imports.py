"""Import what users name as `package.module:function`, and nothing that files alone name.

And say which packages something needs that are not installed.
"""

import filecmp
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prunex_mpi.base.errors import UserError, one_line, quote
from prunex_mpi.base.files import TOKENIZER

# Before the folder of a model that `transformers` has saved, which names no code.
HUB = "hf:"


def hub_folder(model: str) -> str:
    """Return the folder of a model that `transformers` has saved, "" for other models."""
    return model.removeprefix(HUB) if model.startswith(HUB) else ""


def hub_defaults(model: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that name what is in the folder of a model that `transformers` has saved.

    `given` are settings by name. Raises UserError for another tokenizer than that of the folder
    that weights come from: weights fit a smaller vocabulary as well.
    """
    folder = hub_folder(model)
    paths = {"init_from": folder, "tokenizer": os.path.join(folder, TOKENIZER)}
    own = {name: path for name, path in paths.items() if os.path.exists(path)}
    theirs, name = own.get("tokenizer"), given.get("tokenizer")
    weights = given.get("init_from", own.get("init_from")) == own.get("init_from")
    if not (theirs and name and weights):
        return own
    if not (os.path.exists(name) and filecmp.cmp(theirs, name, shallow=False)):
        raise UserError(
            f"--tokenizer {name} is not {theirs}, which the weights are of: leave it away, or "
            "begin with fresh weights (--init-from '')"
        )
    return own


def import_function(what: str, name: str, purpose: str) -> Callable[..., Any]:
    """Import the function `name`, package.module:function, which a setting `what` gives.

    `purpose` ends "has no function 'f'". Raises UserError (USAGE) where it can't be imported.
    """
    module_name, _, attribute = name.partition(":")
    find_own_modules()
    try:
        module = importlib.import_module(module_name)
    # Importing runs the user's module, which can raise anything.
    except Exception as error:
        advice = "give package.module:function with the package on PYTHONPATH"
        if (plain := name.replace(".py:", ":")) != name:
            advice = f"did you mean {plain}?"
        raise UserError(
            f"{what} {name}: cannot import {module_name!r} ({one_line(error)}): {advice}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{what} {name}: {module_name} has no function {attribute!r} {purpose}")
    return function


def find_own_modules() -> None:
    """Let modules of the current folder be imported, those that are installed before them."""
    if not {"", str(Path.cwd())} & set(sys.path) and not getattr(sys.flags, "safe_path", False):
        sys.path.append("")


def check_named(
    what: str,
    name: str,
    given: Iterable[str],
    where: str,
    folder: Path | None = None,
    whole: bool = True,
) -> None:
    """Raise UserError unless the user has named the function `name`, which comes from a file.

    `name` is that of a setting `what`, package.module:function or any other, which is no module;
    `given` are names that the user has given; `where` describes the file. Not `whole`, another
    function of the module will do. A module inside `folder`, which is read, is refused anyway.
    """
    module, colon, _ = name.partition(":")
    if not colon or name.startswith(HUB):
        return
    known = {other if whole else other.partition(":")[0] for other in given if ":" in other}
    if (name if whole else module) not in known:
        raise UserError(
            f"{where} names the {what} {quote(name)}, and importing it runs its code: if you trust "
            f"it, repeat it as --{what} {name}"
        )
    if folder is not None and _is_inside(module, folder):
        raise UserError(
            f"the {what} {quote(name)} is a module inside {folder}, the folder that is read: move "
            "it elsewhere"
        )


def _is_inside(module: str, folder: Path) -> bool:
    """Return whether the package of a module is in a folder; nothing is imported."""
    find_own_modules()
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    # A module that is loaded may have none.
    except ValueError:
        spec = None
    found = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    return any(Path(path).resolve().is_relative_to(folder.resolve()) for path in found if path)


def named_in(argv: Iterable[str]) -> set[str]:
    """Return the words of a command line, of `--flag=X` what is given."""
    return {word.partition("=")[2] if word.startswith("--") else word for word in argv}


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Raise UserError unless `packages` are installed, which `what` needs and an extra brings."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f'{what} needs {" and ".join(missing)}: pip install "prunex_mpi[{extra}]"')
