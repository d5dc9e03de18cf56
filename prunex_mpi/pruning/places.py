"""Where a forward pass is: in which module, and at which call of its code."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.overrides import TorchFunctionMode

# A module, and which of torch's functions it is that its own code calls, counted from 0.
Call = tuple[str, int]


@dataclass(frozen=True)
class Pins:
    """Calls that work at full size alone: what they get stays, or all that was made before them."""

    arguments: frozenset[Call] = frozenset()
    all_before: frozenset[Call] = frozenset()


# Every call works at any size.
NO_PINS = Pins()


class Places:
    """The modules that a forward pass is in, the innermost last, and what each has called."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.calls: list[int] = []

    @property
    def module(self) -> str:
        """The innermost module, whose code is running; "" is the whole model."""
        return self.inside[-1] if self.inside else ""

    def count(self) -> Call:
        """Count a call of the code that is running, and return which it is."""
        if not self.inside:
            return "", -1
        self.calls[-1] += 1
        return self.inside[-1], self.calls[-1] - 1

    def enter(self, name: str) -> None:
        """Be in the module `name`."""
        self.inside.append(name)
        self.calls.append(0)

    def leave(self) -> None:
        """Be out of the innermost module."""
        self.inside.pop()
        self.calls.pop()


class Failing(TorchFunctionMode):
    """Note in `call` which call of torch's functions raises."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places
        self.call: Call | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = self.places.count()
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.call = call
            raise


@contextmanager
def following(model: nn.Module, places: Places) -> Iterator[None]:
    """Let `places` say where a forward pass of `model` is; where it raises, that stays."""
    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda *_, name=name: places.enter(name)),
            module.register_forward_hook(lambda *_: places.leave()),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
