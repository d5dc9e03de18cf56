"""What one outer iteration costs: bytes handed over, bytes that leave a node, seconds."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.profiler import profile, record_function

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass
class Traffic:
    """Bytes of one outer iteration.

    `payload`, `mask` and `evaluate` are operands that one worker, a rank that speaks between nodes,
    hands to collectives; `intra` are operands inside the node; `setup` is what a method sends once
    to begin. `control` is what one rank hands over for ranks to agree: losses, norms, digests and
    errors; not the two numbers by which they agree about once a second on whether to stop. `dense`
    is what `payload` would be for the whole model. `sent` is what leaves a node for payload and
    masks, by `units.ring_bytes`, and `racks` what leaves a rack; then `sent` is that of its first
    node, through which all that leaves the rack goes.
    """

    payload: int = 0
    mask: int = 0
    intra: int = 0
    evaluate: int = 0
    setup: int = 0
    control: int = 0
    dense: int = 0
    sent: int = 0
    racks: int = 0


@dataclass
class Clock:
    """Seconds of one outer iteration, by what they were spent on.

    Of the local steps (phase 1):

    - `exchange`: waiting for messages.
    - `method`: what a method computes beside the forward and backward pass.
    - `setup`: what a method does once to begin, its messages included.
    - `asynchronous`: an exchange in the helper thread, waiting for it (`late`), using its result.
    - `data`: waiting for images to be decoded.
    - `earlier`: the phase so far, where the run was interrupted in it.

    Of any phase: `agreed` is waiting for messages that count to the phase itself, as those by which
    ranks agree on going on; `broadcast` is the part of waiting for messages that hand results of
    other nodes to the ranks of a node. With a `profiler` each message is named in its trace.
    """

    earlier: float = 0.0
    asynchronous: float = 0.0
    method: float = 0.0
    exchange: float = 0.0
    setup: float = 0.0
    agreed: float = 0.0
    late: float = 0.0
    broadcast: float = 0.0
    data: float = 0.0

    def __post_init__(self) -> None:
        # No field: it is no part of what a checkpoint remembers.
        self.profiler: profile | None = None

    @property
    def messages(self) -> float:
        """Seconds in messages, behind the local steps or set-up apart."""
        return self.exchange + self.agreed

    @contextmanager
    def exchanging(
        self,
        device: torch.device,
        name: str,
        counted: Mapping[str, int] = NOTHING,
        part: str = "exchange",
    ) -> Iterator[None]:
        """Count the block as waiting for messages; `counted` are bytes for the trace."""
        started = now(device)
        with self.named(name, counted):
            yield
            ended = now(device)
        setattr(self, part, getattr(self, part) + ended - started)

    @contextmanager
    def broadcasting(self, device: torch.device) -> Iterator[None]:
        """Count the block as handing to the ranks of a node what has come from other nodes."""
        waited = self.exchange
        with self.exchanging(device, "Bcast"):
            yield
        self.broadcast += self.exchange - waited

    def named(
        self, name: str, counted: Mapping[str, int] = NOTHING
    ) -> AbstractContextManager[object]:
        """Name the block in the trace, if there is one, with the bytes that were `counted`."""
        if self.profiler is None:
            return nullcontext()
        return record_function(", ".join([name, *(f"{key} {n}" for key, n in counted.items())]))

    @contextmanager
    def computing(self, device: torch.device) -> Iterator[None]:
        """Count the block as the method's own, without the messages in it."""
        started, waited = now(device), self.exchange
        yield
        self.method += now(device) - started - (self.exchange - waited)

    @contextmanager
    def between_steps(self, device: torch.device) -> Iterator[None]:
        """Count the block, an exchange between two local steps, as one behind them that is late."""
        started, before = now(device), (self.exchange, self.agreed)
        yield
        self.asynchronous += now(device) - started
        self.late += self.messages - sum(before)
        self.exchange, self.agreed = before

    @contextmanager
    def setting_up(self, device: torch.device) -> Iterator[None]:
        """Count the block, the messages in it too, as what a method does once to begin."""
        started, before = now(device), (self.exchange, self.agreed, self.broadcast)
        yield
        self.setup += now(device) - started
        self.exchange, self.agreed, self.broadcast = before


def now(device: torch.device) -> float:
    """Return the time at which all that this thread has queued on `device` has been done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
