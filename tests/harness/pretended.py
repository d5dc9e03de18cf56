"""Pretend that tensors on the CPU lie on a GPU, and refuse what a GPU would refuse.

Each tensor keeps its values where it is; the memory of those on the GPU carries a mark. So code
runs to its end as it would there. What is no part of it: streams, the order in which things are
done, numbers that another processor rounds otherwise.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MARK = "_pretended_gpu"
PLAIN = torch._C.DisableTorchFunction
aten = torch.ops.aten
COPIES = (aten.copy_, aten._to_copy)
# What an index on the host is copied for.
INDEXED = (aten.index, aten.index_put_)
# What looks at values, and so waits for them.
LOOKING = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount)
# What takes the name of a device and makes no tensor of it.
NAMING = (torch.device, torch._C._nn._parse_to)


class Generator(torch.Generator):
    """A generator of the CPU, for whichever device it was asked."""

    def __new__(cls, device: torch.device = CPU) -> "Generator":
        return super().__new__(cls)


def lies_on_gpu(tensor: Tensor) -> bool:
    with PLAIN():
        return getattr(tensor.untyped_storage(), MARK, False)


def put(tensor: Tensor, device: torch.device) -> Tensor:
    with PLAIN():
        setattr(tensor.untyped_storage(), MARK, device.type == "cuda")
    return tensor


class Operations(TorchDispatchMode):
    """Refuse operations on tensors of both devices; what comes of those on the GPU lies there."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do `func` if a GPU would."""
        with PLAIN():
            kind = func.overloadpacket
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            there = [lies_on_gpu(t) for t in tensors]
            # Numbers of the host may take part.
            here = [t for t, on in zip(tensors, there, strict=True) if not on and t.dim()]
            if any(there) and here and kind not in COPIES:
                if kind not in INDEXED or not there[0]:
                    raise RuntimeError(f"{func} gets tensors of the CPU and of the GPU")
                self.waits[str(kind)] += 1
            masked = kind in INDEXED and any(t.dtype == torch.bool for t in tensors[1:2])
            if any(there) and (kind in LOOKING or masked):
                self.waits[str(kind)] += 1
            if kind is aten.copy_ and there[0] != there[1] and not (args[2:] and args[2]):
                self.waits[str(kind)] += 1
            for tensor, on in zip(tensors, there, strict=True):
                put(tensor, GPU if on else CPU)
            out = func(*args, **(kwargs or {}))
            if any(there):
                for tensor in tree_leaves(out):
                    if isinstance(tensor, Tensor) and not hasattr(tensor.untyped_storage(), MARK):
                        put(tensor, GPU)
            return out


class Names(TorchFunctionMode):
    """Let devices have names as if there were a GPU, and tensors go there and back."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with the CPU for the GPU, and mark what comes of it."""
        kwargs, first = dict(kwargs or {}), args[0] if args else None
        there = isinstance(first, Tensor) and lies_on_gpu(first)
        if getattr(func, "__self__", None) is Tensor.device:
            return GPU if there else CPU
        if there and func in (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.pin_memory):
            raise TypeError(f"{func.__name__} of a tensor on the GPU")
        if func in NAMING:
            return func(*args, **kwargs)
        if func is Tensor.pin_memory:
            return first
        if there and func is Tensor.tolist:
            self.waits["tolist"] += 1
        kwargs.pop("pin_memory", None)
        named = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.device)]
        texts = kwargs.get("device"), *(args[1:2] if func is Tensor.to else ())
        named += [torch.device(a) for a in texts if isinstance(a, str)]
        named += [CPU] if func is Tensor.cpu else []
        args, kwargs = tree_map_only(torch.device, lambda _: CPU, (args, kwargs))
        if "device" in kwargs and named:
            kwargs["device"] = CPU
        if func is Tensor.to:
            args = tuple(CPU if isinstance(a, str) else a for a in args)
        if func not in (Tensor.to, Tensor.cpu):
            out = func(*args, **kwargs)
            return put(out, named[-1]) if named and isinstance(out, Tensor) else out
        if not named or (named[-1].type == "cuda") == there:
            return func(*args, **kwargs)
        if not kwargs.get("non_blocking"):
            self.waits["to"] += 1
        kwargs["copy"] = True
        out = Tensor.to(*args, **kwargs) if func is Tensor.to else first.clone()
        return put(out, named[-1])


@contextmanager
def pretended_gpu() -> Iterator[Counter[str]]:
    """Have a GPU for the time of the block; yield how often it was waited for, by what did."""
    waits = Counter[str]()

    def enter(stream: Any) -> None:
        """Begin in a helper thread, whose modes are its own."""
        if threading.current_thread() is not threading.main_thread():
            Operations(waits).__enter__()
            Names(waits).__enter__()

    def count() -> None:
        waits["synchronize"] += 1

    stream = SimpleNamespace(synchronize=count, wait_stream=lambda other: None)
    event = SimpleNamespace(wait=lambda: None, record=lambda stream: None)
    with pytest.MonkeyPatch.context() as patch:
        cuda = torch.cuda
        for name in ("Stream", "current_stream"):
            patch.setattr(cuda, name, lambda *device: stream)
        patch.setattr(cuda, "Event", lambda: event)
        patch.setattr(cuda, "stream", lambda _: nullcontext())
        patch.setattr(cuda, "set_stream", enter)
        for name in ("is_available", "is_initialized"):
            patch.setattr(cuda, name, lambda: True)
        patch.setattr(cuda, "get_rng_state", lambda device: torch.get_rng_state())
        patch.setattr(cuda, "set_rng_state", lambda state, device: None)
        patch.setattr(cuda, "mem_get_info", lambda device: (2**36, 2**36))
        for name in ("memory_reserved", "memory_allocated"):
            patch.setattr(cuda, name, lambda device: 0)
        patch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0"))
        patch.setattr(torch, "Generator", Generator)
        # AdamW asks whether a graph of the GPU is being recorded.
        check = "_accelerator_graph_capture_health_check"
        patch.setattr(torch.optim.Optimizer, check, lambda self: None, raising=False)
        with Operations(waits), Names(waits):
            yield waits
