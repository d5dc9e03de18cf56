"""Find what users name as `package.module:function`."""

import importlib
from collections.abc import Callable
from typing import Any

from prunex_mpi.base.errors import USAGE, UserError, one_line


def import_function(what: str, name: str, purpose: str) -> Callable[..., Any]:
    """Import the function `name`, package.module:function, which a setting `what` gives.

    `purpose` ends "has no function 'f'". Raises UserError (USAGE) where it can't be imported.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    # Importing runs the user's module, which can raise anything.
    except Exception as error:
        raise UserError(
            f"{what} {name}: cannot import {module_name!r} ({one_line(error)}): "
            "give package.module:function with the package on PYTHONPATH",
            USAGE,
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(
            f"{what} {name}: {module_name} has no function {attribute!r} {purpose}", USAGE
        )
    return function
