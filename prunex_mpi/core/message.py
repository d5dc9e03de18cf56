"""The message between nodes: which parameters and statistics travel, and the memory that they need.

A leader offers the kept parameters of its node, compact, and behind them BatchNorm statistics, as
float32 or in fewer bits (`core/exchange.py` says what of them). All of it goes at once, or in
fragments, each at a step of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mpi4py import MPI

from prunex_mpi.comm.collectives import Transport, allreduce_then_bcast_
from prunex_mpi.comm.traffic import NOTHING, Clock
from prunex_mpi.core.sums import (
    BLOCK,
    Coded,
    allocate_coded,
    coded_bytes,
    first_blocks,
    sum_coded_,
    whole_blocks,
)
from prunex_mpi.pruning.masks import Plan, cut_plan, pack_, unpack_

# The wire dtype of statistics where that of parameters has fewer bits than float32.
STATISTICS = "bf16"


@dataclass(frozen=True)
class Fragment:
    """What travels at once: everything (`number` 0), or one of several fragments, from 1.

    `place` is its part of flat vectors, `start` where its compact parameters begin in the whole
    message. BatchNorm statistics, `stats_kept`, go along with the `last` one.
    """

    number: int
    place: slice
    start: int
    plan: Plan
    stats_kept: Tensor
    last: bool = True

    @property
    def span(self) -> slice:
        """Its part of the compact parameters of the whole message."""
        return slice(self.start, self.start + self.plan.numel)


class Message:
    """The memory of one node's messages, owned by the state.

    `plan` says which parameters travel, `stats_kept` (int64) which entries of the statistics. Both
    lie in `buffer`, each in whole blocks of 128; `codes` are what they travel as in fewer bits,
    None for float32. `residual` is the quantisation error of what was sent so far, in the order of
    the message and weighted like this worker's contribution, None in float32. `agreed`: the leaders
    have compared the plan in force.
    """

    def __init__(self, like: Tensor, plan: Plan, stats_kept: Tensor, quantised: bool) -> None:
        self.plan, self.stats_kept, self.agreed = plan, stats_kept, False
        self.numel = like.numel()
        self.residual = like.new_zeros(whole_blocks(self.numel)) if quantised else None
        self.codes: tuple[Coded, Coded] | None = None
        self._offer: Tensor | None = None
        self._fragments: tuple[Fragment, ...] = ()
        self.buffer = like
        self.allocate_(plan.numel, stats_kept.numel())

    def allocate_(self, parameters: int, statistics: int) -> None:
        """Make room for so many values; zero, since what fills up blocks is added up as well."""
        room = whole_blocks(parameters) + whole_blocks(statistics)
        self.buffer = self.buffer.new_zeros(room)

    def follow_(self, plan: Plan, stats_kept: Tensor, residual_follows: bool) -> None:
        """Let other parameters and statistics travel; the residual may follow to their order.

        Nothing may be in `buffer` then, whose memory is used.
        """
        if self.residual is not None and residual_follows:
            by_place = self.buffer[: self.numel]
            unpack_(self.residual, self.plan, by_place)
            self.residual.zero_()
            pack_(by_place, plan, self.residual)
            self.buffer.zero_()
        self.plan, self.stats_kept, self.agreed = plan, stats_kept, False
        self._fragments = ()

    def fragment(self, number: int = 0, count: int = 1) -> Fragment:
        """Return the whole message (`number` 0) or fragment `number`, from 1, of `count`."""
        if number == 0:
            return Fragment(0, slice(0, self.numel), 0, self.plan, self.stats_kept)
        if len(self._fragments) != count:
            none = self.stats_kept[:0]
            self._fragments = tuple(
                Fragment(n, *cut, self.stats_kept if n == count else none, n == count)
                for n, cut in enumerate(cut_plan(self.plan, count, BLOCK), 1)
            )
        return self._fragments[number - 1]

    def values(self, fragment: Fragment) -> tuple[Tensor, Tensor]:
        """Return the beginning of `buffer` that travels as float32: parameters, statistics."""
        end = fragment.plan.numel + fragment.stats_kept.numel()
        return self.buffer[: fragment.plan.numel], self.buffer[fragment.plan.numel : end]

    def blocks(self, fragment: Fragment) -> tuple[Tensor, Tensor]:
        """Return the same two, each in whole blocks, as they travel in fewer bits."""
        first = whole_blocks(fragment.plan.numel)
        last = first + whole_blocks(fragment.stats_kept.numel())
        return self.buffer[:first], self.buffer[first:last]

    def offer(self, fragment: Fragment) -> Tensor:
        """Return what is encoded: the residual, in whole blocks; of a fragment room for a copy."""
        blocks = whole_blocks(fragment.plan.numel)
        return self._offer[:blocks] if fragment.number else self.residual[:blocks]

    def make_codes_(
        self, wire_dtype: str, peers: int, transport: Transport, fragment: Fragment
    ) -> None:
        """Allocate codes for a fragment between `peers`, none for fp32; keep those long enough."""
        if wire_dtype == "fp32":
            self.codes = None
            return
        lengths = [block.numel() for block in self.blocks(fragment)]
        if fragment.number and (self._offer is None or self._offer.numel() < lengths[0]):
            self._offer = self.buffer.new_empty(lengths[0])
        known = [codes.numel for codes in self.codes or ()]
        if known and fragment.number:
            # Fragments differ by a few blocks: what is enough for the longest is enough.
            lengths = list(map(max, known, lengths))
        if known != lengths:
            self.codes = tuple(
                allocate_coded(dtype, self.buffer.new_empty(n), peers, transport)
                for dtype, n in zip((wire_dtype, STATISTICS), lengths, strict=True)
            )

    def sum_(
        self,
        between: MPI.Comm,
        node: MPI.Comm,
        transport: Transport,
        clock: Clock,
        fragment: Fragment,
        counted: Mapping[str, int] = NOTHING,
    ) -> None:
        """Sum a fragment over the nodes and hand the sum to all ranks of each; update the residual.

        `clock` is this thread's, `counted` bytes for its trace. Collective on `between`, the
        leaders, where it is not MPI.COMM_NULL, then on `node`.
        """
        if self.codes is None:
            flat = self.buffer[: sum(part.numel() for part in self.values(fragment))]
            counted = {**counted, "buckets": -(-flat.nbytes // transport.bucket_bytes)}
            with clock.exchanging(flat.device, "Allreduce and Bcast", counted):
                spent = allreduce_then_bcast_(between, node, flat, transport)
            clock.broadcast += spent
            return
        parameters, statistics = self.blocks(fragment)
        codes = map(first_blocks, self.codes, (parameters, statistics))
        offer = self.offer(fragment)
        ways = transport, clock
        with clock.named("sum of codes", counted):
            sum_coded_(between, node, next(codes), offer, parameters, *ways)
            sum_coded_(between, node, next(codes), statistics, statistics, *ways)
        if fragment.number and between != MPI.COMM_NULL:
            self.residual[fragment.span].copy_(offer[: fragment.plan.numel])


def message_bytes(payload: str, parameters: int, statistics: int, size: int) -> int:
    """Return the bytes of a message of so many values, whose dtype has `size` bytes."""
    if payload == "fp32":
        return (parameters + statistics) * size
    return coded_bytes(payload, parameters) + coded_bytes(STATISTICS, statistics)
