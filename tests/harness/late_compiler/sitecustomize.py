"""Load torch.compile's modules where they are used, not where torch or torchvision is.

torchvision and torch's optimizers import `torch._dynamo` for three functions that do nothing
outside of compiled code; it and what it needs are 40 % of the time that a small job takes. With
this folder on PYTHONPATH, two modules with these functions stand in their place, until anything
else is asked of them. batch/test.sh has it there unless PRUNEX_LONG=1.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = ("torch._dynamo", "torch._dynamo.utils")


class Late(ModuleType):
    """A module of these names that has next to nothing, and gives way to the real one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load(self.__name__), name)


class Finder:
    """Find modules of these names, and load the real ones for any other module of the package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in NAMES:
            return ModuleSpec(name, self, is_package=name == NAMES[0])
        if name.startswith(f"{NAMES[0]}."):
            load(NAMES[0])
            real = load(name)
            # Python would load again what it finds here when it has looked for it.
            del sys.modules[name]
            return ModuleSpec(name, self, loader_state=(real, real.__spec__))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.loader_state is not None:
            return spec.loader_state[0]
        module = Late(spec.name)
        if spec.name == NAMES[0]:
            module.graph_break = lambda *_: None
            module.disable = lambda function, *_, **__: function
        else:
            module.is_compile_supported = lambda device: load(NAMES[1]).is_compile_supported(device)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state[1]


FINDER = Finder()


def load(name: str) -> ModuleType:
    """Return the real module; the first time, remove all that stands in its place."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        for late in NAMES:
            sys.modules.pop(late, None)
    return importlib.import_module(name)


sys.meta_path.insert(0, FINDER)
