"""A step of SparDL (Zhao et al. 2024): sums of the largest elements by shares, sparse all the way.

The gradient is cut into as many blocks as there are workers (W), of one size but for the last. In
ceil(log2 W) rounds worker r sends away all blocks but block r: with distance d, a falling power of
two, blocks r + d to r + 2d - 1, counted around, go to worker r + d. Before a block is sent its k
largest elements are taken, k being the ratio of a block rounded up; whoever receives them adds them
to its own block, and takes the largest of the sum when its turn comes. So what travels never grows,
for any W. The k largest of the sums of block r, which worker r holds in the end, go to all.

With `--spardl-teams` D > 1 each run of W/D neighbours does so by itself, with blocks of a D-th of
as many, k of a block as before. What a worker holds in the end are D sums of the same block, one of
each team. Their h largest, k/D <= h <= k, go to all D that hold such a sum (B-SAG, for any D), and
of what they add up to the k largest go to the team, or all where there are fewer. h is adapted so
that there are about k: it moves on as long as that is the right way, in steps that double, and
turns back by half a step.

The residual is the authors' global one (ZJU-DAILY/SparDL, allreducer.py). Where nothing was chosen
in the end, every worker keeps what it had, residual + gradient, as if nothing had been sent;
elsewhere it keeps what it has left out, others' values among it. At each place the workers' sum of
what has arrived and what is kept is what was there before.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.compress import sparse
from prunex_mpi.core.memory import MEAN, RANK, Declared, Lasting, summed
from prunex_mpi.core.state import State
from prunex_mpi.methods.exchange import RESIDUAL, Exchange
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

# With teams: h, by how much it changes next, and whether that has been right once. Zeros are how
# it begins; other nodes go on from the means, too low where followers have zeros until it has
# adapted.
ADAPTED = "elements_between_teams"
# The position of a place that is none, of what fills up a message.
NOWHERE = torch.iinfo(torch.int32).max


class SparDl(Exchange):
    """Add up the largest elements of blocks, filled up with zeros, in pairs (values, positions)."""

    OPERATIONS = (
        ("largest of blocks, in each round", "workers", "Sendrecv", "values, then int32 positions"),
        ("one team: largest of each sum", "workers", "Allgather", "values, then int32 positions"),
        ("teams: sums, then of these", "workers", "Sendrecv", "values, then int32 positions"),
    )

    def allocate(self) -> None:
        theta, teams, comm = self.state.theta, self.options.teams, self.link.comm
        workers = comm.size // teams
        first, self.place = comm.rank - comm.rank % workers, comm.rank % workers
        self.team = range(first, first + workers)
        self.peers = range(self.place, comm.size, workers)
        size, count = sizes_of(self.settings, theta.numel(), comm.size)
        self.blocks = theta.new_zeros(workers, size)
        most = max(map(len, rounds(workers, 0)), default=1)
        self.leaving = paired(theta.new_empty(most, count))
        self.arriving = paired(theta.new_empty(most, count))
        self.everyone = paired(theta.new_empty(workers, count))
        self.between = paired(theta.new_empty(teams * count if teams > 1 else 0))
        starts = size * torch.arange(workers, device=theta.device).view(-1, 1)
        # Of one team everyone's come in the order of ranks, of several from this one on.
        self.starts = starts if teams == 1 else starts.roll(-self.place, 0)
        self.places = torch.empty_like(self.everyone[1], dtype=torch.int64)

    @staticmethod
    def check_workers(settings: Settings, workers: int) -> None:
        """Raise UserError where the workers can't form teams of one size."""
        if workers % settings.options.teams:
            raise UserError(
                f"spardl.teams {settings.options.teams} does not divide the {workers} workers; "
                "give a number that does"
            )

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate what has not been sent yet and, with teams, how much travels between them."""
        sparse.check_positions(layout)
        kept = {RESIDUAL: summed(torch.zeros_like(theta))}
        if settings.options.teams > 1:
            kept[ADAPTED] = Lasting(theta.new_zeros(3, dtype=torch.float64), RANK, MEAN)
        return kept

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the largest of the sums of residual + gradient."""
        residual = self.state.memory[RESIDUAL].add_(flat)
        self.blocks.view(-1)[: flat.numel()].copy_(residual)
        self.reduce_blocks_()
        if len(self.peers) == 1:
            self.gather_blocks_()
        else:
            self.merge_teams_(self.state.memory[ADAPTED])
        # What fills up the last blocks may be among the largest of a block of zeros.
        chosen = self.places < flat.numel()
        places, values = self.places[chosen], self.everyone[0][chosen]
        residual.index_copy_(0, places, self.blocks.view(-1)[places])
        flat.zero_().index_copy_(0, places, values)

    def reduce_blocks_(self) -> None:
        """Add up every block at its owner; `blocks` become what is left out."""
        team, blocks, place, size = self.team, self.blocks, self.place, len(self.team)
        for leaving in rounds(size, place):
            distance, many = leaving.start - place, len(leaving)
            for number, values, positions in zip(leaving, *self.leaving, strict=False):
                sparse.move_top_(blocks[number % size], values, positions)
            to, source = team[leaving.start % size], team[(place - distance) % size]
            for mine, came in zip(self.leaving, self.arriving, strict=True):
                flat, received = mine[:many].view(-1), came[:many].view(-1)
                self.link.sendrecv_(flat, to, received, source, team=size)
            for number in range(many):
                values, positions = (came[number] for came in self.arriving)
                blocks[(place + number) % size].index_add_(0, positions, values)

    def gather_blocks_(self) -> None:
        """Hand the largest of this block to all; `places` are those of all."""
        mine = [kind[0] for kind in self.leaving]
        sparse.move_top_(self.blocks[self.link.comm.rank], *mine)
        for kind, everyone in zip(mine, self.everyone, strict=True):
            self.link.gather_(kind, everyone)
        torch.add(self.everyone[1], self.starts, out=self.places)

    def merge_teams_(self, kept: Tensor) -> None:
        """Hand the largest of the teams' sums of each block to all.

        `kept` is what `adapted` returns, float64 [3].
        """
        teams, most = len(self.peers), self.leaving[0].shape[1]
        share, step, right = adapted(kept.tolist(), most, teams)
        values, positions = (t[: teams * share].view(teams, share) for t in self.between)
        sparse.move_top_(self.blocks[self.place], values[0], positions[0])
        self.gather_from_(self.peers, values)
        self.gather_from_(self.peers, positions)
        places, where = torch.unique(positions, return_inverse=True)
        sums = values.new_zeros(places.numel())
        # In the order of the teams, of equal ones the first: the same bits at each of the peers.
        mine = self.peers.index(self.link.comm.rank)
        sparse.add_sparse_(sums, values.roll(mine, 0), where.roll(mine, 0))
        chosen = sums.abs().sort(descending=True, stable=True).indices[:most]
        found = (sums, 0), (places, NOWHERE)
        for everyone, (those, nothing) in zip(self.everyone, found, strict=True):
            everyone[0].fill_(nothing)[: chosen.numel()].copy_(those[chosen])
            self.gather_from_(self.team, everyone)
        torch.add(self.everyone[1], self.starts, out=self.places)
        kept.copy_(torch.tensor(adapted((share, step, right), most, teams, places.numel())))

    def gather_from_(self, ranks: range, rows: Tensor) -> None:
        """Fill `rows` [len(ranks), n], the first this rank's, with those of ranks after it (Bruck).

        Collective on the workers, which are in such ranges of one step.
        """
        size, place, gap = len(ranks), ranks.index(self.link.comm.rank), 1
        while gap < size:
            mine, received = rows[: min(gap, size - gap)], rows[gap : 2 * gap]
            to, source = ranks[(place - gap) % size], ranks[(place + gap) % size]
            team = size * ranks.step
            self.link.sendrecv_(mine.view(-1), to, received.view(-1), source, team=team)
            gap *= 2

    @staticmethod
    def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
        return sparse.position_bytes(payload, state.theta.element_size())

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        SparDl.check_workers(settings, workers)
        teams, (_, count) = settings.options.teams, sizes_of(settings, layout.numel, workers)
        blocks = workers // teams
        how = f"{count:,} values and positions of each of {blocks} blocks, {settings.aggregation}"
        travelling = blocks
        if teams > 1:
            # Within a team the other blocks, twice; what the other teams have of one, at most.
            how, travelling = f"at most {how}, {teams} teams", 2 * (blocks - 1) + teams - 1
        return travelling * count * (size + sparse.POSITION_BYTES), how


def paired(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return `values` and as many int32 positions."""
    return values, torch.empty_like(values, dtype=torch.int32)


def sizes_of(settings: Settings, numel: int, workers: int) -> tuple[int, int]:
    """Return the elements of a block, and how many of them travel; `workers` are all teams'."""
    size = -(-numel // (workers // settings.options.teams))
    return size, sparse.share_of(size, settings.options.ratio)


def rounds(workers: int, rank: int) -> list[range]:
    """Return the blocks, counted around, that go to the worker of the first in each round."""
    distances = [1 << bit for bit in reversed(range((workers - 1).bit_length()))]
    return [range(rank + d, rank + min(2 * d, workers)) for d in distances]


def adapted(kept: Sequence[float], most: int, teams: int, found: int = 0) -> tuple[int, int, int]:
    """Return how many elements go to other teams, what that changes by, and if that was right once.

    `kept` is what was returned before, or zeros; `found` is how many there were together, of `most`
    that are wanted, 0 before anybody looked. Nothing is larger than `most`.
    """
    least = max(1, most // teams)
    share, step, right = (round(number) for number in kept)
    step = step or max(1, (most - least) // 100)
    if found and (found > most) == (step < 0):
        step, right = (2 * step, 0) if right else (step, 1)
    elif found:
        step, right = int(-step / 2) if abs(step) > 1 else -step, 0
    step = max(-most, min(step, most))
    return min(max(share + step if found else share, least), most), step, right
