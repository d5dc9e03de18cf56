"""What one outer iteration costs: bytes handed over, bytes that leave a node, seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Traffic:
    """Bytes of one outer iteration.

    `payload`, `mask` and `evaluate` are operands that one worker, a rank that speaks between nodes,
    hands to collectives; `intra` are operands inside the node; `setup` is what a method sends once
    to begin. `dense` is what `payload` would be
    for the whole model. `sent` is what leaves a node for payload and masks, by `wire.ring_bytes`.
    """

    payload: int = 0
    mask: int = 0
    intra: int = 0
    evaluate: int = 0
    setup: int = 0
    dense: int = 0
    sent: int = 0


@dataclass
class Clock:
    """Seconds of one outer iteration that are told apart.

    Of phase 1 `exchange` is waiting for messages, `method` what a method computes beside forward
    and backward pass; `setup` is what it does once to begin, messages in it; `behind` is what an
    exchange behind the local steps kept waiting, `late`, and its result took; `earlier` is what the
    phase took before the run was interrupted in it. `agreed` is waiting for messages that belong to
    the phase they are in, as those by which the ranks agree on going on. In the other phases all
    messages do.
    """

    earlier: float = 0.0
    behind: float = 0.0
    method: float = 0.0
    exchange: float = 0.0
    setup: float = 0.0
    agreed: float = 0.0
    late: float = 0.0

    @property
    def messages(self) -> float:
        """Seconds in messages, behind the local steps or set-up apart."""
        return self.exchange + self.agreed

    @contextmanager
    def exchanging(self, device: torch.device) -> Iterator[None]:
        """Count the block as waiting for messages."""
        started = now(device)
        yield
        self.exchange += now(device) - started

    @contextmanager
    def agreeing(self, device: torch.device) -> Iterator[None]:
        """Count the block as waiting for messages that belong to the phase they are in."""
        started = now(device)
        yield
        self.agreed += now(device) - started

    @contextmanager
    def computing(self, device: torch.device) -> Iterator[None]:
        """Count the block as the method's own, without the messages in it."""
        started, waited = now(device), self.exchange
        yield
        self.method += now(device) - started - (self.exchange - waited)

    @contextmanager
    def setting_up(self, device: torch.device) -> Iterator[None]:
        """Count the block, the messages in it too, as what a method does once to begin."""
        started, waited, agreed = now(device), self.exchange, self.agreed
        yield
        self.setup += now(device) - started
        self.exchange, self.agreed = waited, agreed


def now(device: torch.device) -> float:
    """Return the time at which all that is queued on `device` has been done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
