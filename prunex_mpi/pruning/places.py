"""Where a forward pass is: in which module."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class Places:
    """The names of the modules that a forward pass is in, the innermost last."""

    def __init__(self) -> None:
        self.inside: list[str] = []

    @property
    def module(self) -> str:
        """The innermost module, whose code is running; "" is the whole model."""
        return self.inside[-1] if self.inside else ""


@contextmanager
def following(model: nn.Module, places: Places) -> Iterator[None]:
    """Let `places` say where a forward pass of `model` is; where it raises, that stays."""

    def leave(*_: object) -> None:
        places.inside.pop()

    handles = []
    for name, module in model.named_modules():
        enter = module.register_forward_pre_hook(lambda *_, name=name: places.inside.append(name))
        handles += [enter, module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
