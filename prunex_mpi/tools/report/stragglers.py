"""Return which ranks the others waited for: plain arithmetic on what every rank recorded.

What a rank waits for is some other rank's work, so only work counts, as the excess over the ranks
that do the same. The phases of an outer iteration are walked in their order. Where ranks meet in a
collective, the one that comes last delays the rest: what it came later than they did is counted for
its phases since they last met. What is late on one rank while another is later still is counted for
nobody, as it costs nothing. (So does StageFrontier: the frontier is the maximum over the ranks of
their cumulative stage times.)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from prunex_mpi.base.record_keys import RANK_PHASES

# Where the ranks of a node meet; in all others all ranks do.
INSIDE = ("local", "intra")
# Where leaders have other work than the ranks that they lead.
BY_ROLE = ("intra", "project", "inter")
# Over so many outer iterations it is found what is usual for a rank that has no like.
BLOCK = 256
# From this part of its largest delay on an iteration counts among those of a straggler.
NOTICEABLE = 0.25


@dataclass(frozen=True)
class RankRecord:
    """One outer iteration of all ranks: each one's node, and seconds float64 [ranks] by phase.

    `exchange` is what collectives took, waiting and transmitting; `broadcast` [ranks] is the part
    of phase 4's exchange that was the broadcast in the node; `hosts` are the nodes' names, where a
    job begins.
    """

    iteration: int
    node: np.ndarray
    work: Mapping[str, np.ndarray]
    exchange: Mapping[str, np.ndarray]
    residuals: Mapping[str, np.ndarray]
    broadcast: np.ndarray
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankDelay:
    """What the others lost in an outer iteration through one rank, on a host, in one phase."""

    iteration: int
    phase: str
    rank: int
    host: str
    seconds: float


@dataclass(frozen=True)
class Straggler:
    """A rank that the others waited for in a phase, noticeably in these `iterations`."""

    phase: str
    rank: int
    host: str
    seconds: float
    iterations: tuple[int, ...]


@dataclass(frozen=True)
class RankTimes:
    """Where the time of all ranks went in so many outer iterations.

    `places` are rank numbers with their machines, "" if unknown: after a loss, or in another job, a
    number may be on another one. `work`, `waiting` and `transmitting` are seconds [places] by
    phase, `delays` what was lost by iteration; `stragglers` begin with the worst. `node` and
    `hosts` are those of each rank when there were most.
    """

    iterations: int
    node: tuple[int, ...]
    hosts: tuple[str, ...]
    places: tuple[tuple[int, str], ...]
    work: Mapping[str, np.ndarray]
    waiting: Mapping[str, np.ndarray]
    transmitting: Mapping[str, np.ndarray]
    delays: tuple[RankDelay, ...]
    stragglers: tuple[Straggler, ...]

    @property
    def ranks(self) -> int:
        """How many ranks there are at most."""
        return len(self.node)


def find_stragglers(records: Iterable[RankRecord]) -> RankTimes | None:
    """Return which ranks the others waited for in a run, None where there are no records.

    Records are consumed one block at a time; ranks may become more or fewer, and move, where a run
    goes on in another job.
    """
    work: dict[str, np.ndarray] = {}
    waiting: dict[str, np.ndarray] = {}
    transmitting: dict[str, np.ndarray] = {}
    delays: list[RankDelay] = []
    places: dict[tuple[int, str], int] = {}
    node, hosts, names, count = np.zeros(0, dtype=np.int64), (), (), 0
    for records_of_block in blocks(records):
        # What begins a job, or follows a loss, names them anew.
        names = records_of_block[0].hosts or names
        block = stack(records_of_block, names)
        delays += delays_of(block)
        count += len(records_of_block)
        if len(block.node) >= len(node):
            node, hosts = block.node, block.hosts
        at = [places.setdefault(place, len(places)) for place in enumerate(block.hosts)]
        for phase, seconds in block.work.items():
            _add(work, phase, seconds, at)
        for phase, seconds in block.exchange.items():
            waited, sent = split_exchange(seconds)
            _add(waiting, phase, waited, at)
            _add(transmitting, phase, sent, at)
    if not count:
        return None
    for sums in (work, waiting, transmitting):
        for phase, seconds in sums.items():
            sums[phase] = _widened(seconds, len(places))
    parts = (work, waiting, transmitting, tuple(delays), find_worst(delays))
    return RankTimes(count, tuple(map(int, node)), hosts, tuple(places), *parts)


@dataclass(frozen=True)
class Block:
    """Outer iterations with the same ranks on the same nodes; `hosts` are those of the ranks.

    `work` and `exchange` are float64 [iterations, ranks] by phase, 0 where nothing was recorded.
    """

    iterations: np.ndarray
    node: np.ndarray
    hosts: tuple[str, ...]
    work: Mapping[str, np.ndarray]
    exchange: Mapping[str, np.ndarray]


def blocks(records: Iterable[RankRecord]) -> Iterator[list[RankRecord]]:
    """Yield the records in lists of at most BLOCK that have the same ranks on the same nodes.

    A list ends where the next job begins.
    """
    source = iter(records)
    while taken := list(islice(source, BLOCK)):
        begin = 0
        for i, record in enumerate(taken):
            if i > begin and (record.hosts or not np.array_equal(record.node, taken[begin].node)):
                yield taken[begin:i]
                begin = i
        yield taken[begin:]


def stack(records: Sequence[RankRecord], names: Sequence[str]) -> Block:
    """Return records of the same ranks as one block; `names` are those of the nodes, if known."""
    node = records[0].node
    hosts = tuple(names[place] if 0 <= place < len(names) else "" for place in node)
    nothing = np.zeros(len(node))

    def stacked(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        phases = dict.fromkeys(phase for part in parts for phase in part)
        return {
            phase: np.nan_to_num(np.array([part.get(phase, nothing) for part in parts]))
            for phase in phases
        }

    return Block(
        np.array([record.iteration for record in records]),
        node,
        hosts,
        stacked([record.work for record in records]),
        stacked([record.exchange for record in records]),
    )


def _add(sums: dict[str, np.ndarray], phase: str, seconds: np.ndarray, at: Sequence[int]) -> None:
    """Add a block's seconds of ranks to a sum, in which they are `at` these places."""
    sums[phase] = _widened(sums.get(phase, np.zeros(0)), max(at) + 1)
    sums[phase][at] += seconds.sum(axis=0)


def _widened(sums: np.ndarray, count: int) -> np.ndarray:
    """Return sums with zeros at the end, so that there are at least so many."""
    return np.append(sums, np.zeros(max(0, count - len(sums))))


def split_exchange(exchange: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of waiting and of transmitting in what collectives took, [.., ranks].

    The last to come waits for nobody: what collectives took there, all ranks spent on messages.
    """
    transmitting = np.broadcast_to(exchange.min(axis=-1, keepdims=True), exchange.shape)
    return exchange - transmitting, transmitting


def roles_of(node: np.ndarray) -> np.ndarray:
    """Return for each rank whether it leads: it is the first of its node; bool [ranks]."""
    return np.array([place not in node[:rank] for rank, place in enumerate(node)])


def excess(work: np.ndarray, phase: str, roles: np.ndarray) -> np.ndarray:
    """Return how much longer each rank worked than its likes; float64 [iterations, ranks].

    The lower median stands for these, so that of two ranks the faster one does. The only leader is
    held against its own usual time as well: what it does in every outer iteration is its task.
    """
    late = work - lower_median(work)
    if phase not in BY_ROLE or roles.all():
        return late
    for likes in (roles, ~roles):
        if likes.sum() > 1:
            late[:, likes] = work[:, likes] - lower_median(work[:, likes])
    if roles.sum() == 1:
        usual = np.sort(work[:, roles], axis=0)[(len(work) - 1) // 2]
        late[:, roles] = np.minimum(late[:, roles], work[:, roles] - usual)
    return late


def lower_median(work: np.ndarray) -> np.ndarray:
    """Return what half of the ranks take at most, [iterations, 1]."""
    return np.sort(work, axis=1)[:, (work.shape[1] - 1) // 2, None]


def delays_of(block: Block) -> list[RankDelay]:
    """Walk the phases of the outer iterations of a block and return what was lost in them."""
    count, ranks = len(block.iterations), len(block.node)
    roles = roles_of(block.node)
    nothing = np.zeros((count, ranks))
    # How late each rank is since all last met, its parts by phase, and whose excess a part is:
    # where the ranks of a node have met, it is that of the one that came last there.
    total, parts = nothing.copy(), np.zeros((len(RANK_PHASES), count, ranks))
    owner = np.zeros(parts.shape, dtype=np.int64)
    found: list[RankDelay] = []
    for number, phase in enumerate(RANK_PHASES):
        parts[number] = excess(block.work.get(phase, nothing), phase, roles)
        owner[number] = np.arange(ranks)
        total += parts[number]
        # At the end of an outer iteration accounts are settled, whether ranks meet or not.
        met = block.exchange.get(phase, nothing).any(axis=1) | (phase == RANK_PHASES[-1])
        rows = np.flatnonzero(met)
        if phase in INSIDE:
            for place in np.unique(block.node):
                here = np.flatnonzero(block.node == place)
                latest = here[np.argmax(total[np.ix_(rows, here)], axis=1)]
                total[np.ix_(rows, here)] = total[rows, latest][:, None]
                for whose in (parts, owner):
                    whose[np.ix_(range(len(RANK_PHASES)), rows, here)] = whose[:, rows, latest][
                        ..., None
                    ]
            continue
        latest = np.argmax(total[rows], axis=1)
        lost = total[rows, latest]
        shares = np.maximum(parts[:, rows, latest], 0)
        sums = shares.sum(axis=0)
        shares *= np.divide(lost, sums, out=np.zeros_like(lost), where=(lost > 0) & (sums > 0))
        cause = owner[:, rows, latest]
        found += [
            RankDelay(
                int(block.iterations[rows[i]]),
                RANK_PHASES[p],
                int(cause[p, i]),
                block.hosts[cause[p, i]],
                float(shares[p, i]),
            )
            for p, i in np.argwhere(shares > 0)
        ]
        total[rows] = 0
        parts[:, rows] = 0
    return found


def find_worst(delays: Iterable[RankDelay]) -> tuple[Straggler, ...]:
    """Return who delayed the others, in which phase and by how much in all, the worst first."""
    by_place: dict[tuple[str, int, str], list[RankDelay]] = {}
    for delay in delays:
        by_place.setdefault((delay.phase, delay.rank, delay.host), []).append(delay)
    found = []
    for (phase, rank, host), mine in by_place.items():
        most = max(delay.seconds for delay in mine)
        noticed = {c.iteration for c in mine if c.seconds >= NOTICEABLE * most}
        seconds = sum(delay.seconds for delay in mine)
        found.append(Straggler(phase, rank, host, seconds, tuple(sorted(noticed))))
    return tuple(sorted(found, key=lambda s: (-s.seconds, s.rank)))


def ranges(numbers: Sequence[int], most: int = 6) -> str:
    """Return rising numbers as text: "1-4, 7", and how many more there are after so many ranges."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    if len(text) <= most:
        return ", ".join(text)
    rest = sum(b - a + 1 for a, b in spans[most:])
    return f"{', '.join(text[:most])} and {rest} more"
