"""The images, or the windows of text, that PacTrain's pruning looks at, before it trains.

As in the authors' code of GraSP (Wang et al. 2020): of every class as many, class by class, in two
halves that are a batch each; gradients of both halves are added up. The images are the first ones
of their class over the shards of all ranks, whose order the seed draws. So they are the same for
any number of ranks; the ranks share the batches, not the images of one.

Of text, which has no classes to balance, it is windows at even distances over all of it that is to
train on, in two halves and the same for any number of ranks as well.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.evaluation import check_readable
from prunex_mpi.core.state import RunContext
from prunex_mpi.data.batches import Shard
from prunex_mpi.data.datasets import places_in_draw
from prunex_mpi.data.text import Windows

# A batch holds at most so many pixels, 512 images of 32x32: second derivatives take memory.
BATCH_PIXELS = 2**19
# Images of each class, of all ranks together.
SAMPLES = 10
# Windows of text, as many as CIFAR-10's images, and tokens of a batch of them.
WINDOWS, BATCH_TOKENS = 100, 2**13

Batches = list[tuple[Tensor, Tensor]]


def batches_to_score(everyone: Wire, context: RunContext) -> Batches:
    """Return this rank's batches for the score grasp; it may have none.

    Collective on `world`. Raises UserError on every rank where a class has too few images, or one
    can't be read.
    """
    problem = context.problem
    shard, stream = problem.train_shard, problem.train
    of_text = isinstance(shard, Windows)
    pieces = windows_apart(shard, stream.stop) if of_text else halves_of(everyone, shard)
    check_readable(everyone.comm, context)
    mine = pieces[everyone.comm.rank :: everyone.comm.size]
    return [batch for piece in mine for batch in problem.batches(piece, batch_size=len(piece))]


def windows_apart(shard: Windows, stop: int) -> list[Windows]:
    """Return windows at even distances before token `stop`, in pieces, each a batch."""
    context = shard.context
    there = (stop - 1) // context
    count = min(WINDOWS, there)
    apart = there // count * context
    starts = range(0, count * apart, apart)
    most = max(1, BATCH_TOKENS // context)
    pieces = []
    for half in (starts[: count // 2], starts[count // 2 :]):
        # As long as each other, since each batch's mean loss counts as much.
        parts = max(1, -(-len(half) // most))
        ends = [len(half) - len(half) * (parts - i) // parts for i in range(parts + 1)]
        pieces += [half[begin:end] for begin, end in pairwise(ends) if begin < end]
    return [replace(shard, starts=piece) for piece in pieces]


def halves_of(everyone: Wire, shard: Shard) -> Sequence[Shard]:
    """Return the same images on all ranks in pieces, each a batch. Collective on `world`."""
    drawn = draw_balanced(everyone, shard, SAMPLES)
    most = max(1, BATCH_PIXELS // drawn.images[0, 0].numel())
    size = len(drawn.labels)
    pieces = []
    for half in (slice(0, size // 2), slice(size // 2, size)):
        # As long as each other, since each batch's mean loss counts as much.
        parts = max(1, -(-(half.stop - half.start) // most))
        images, labels = drawn.images[half], drawn.labels[half]
        pairs = zip(images.tensor_split(parts), labels.tensor_split(parts), strict=True)
        pieces += [Shard(*pair) for pair in pairs if len(pair[1])]
    return pieces


def draw_balanced(everyone: Wire, shard: Shard, each: int) -> Shard:
    """Return `each` images of every class, class by class.

    The same on all ranks. Collective on `world`. Raises UserError on every rank.
    """
    comm = everyone.comm
    highest = torch.tensor([int(shard.labels.max()) if len(shard.labels) else -1])
    everyone.reduce_(highest, MPI.MAX, kind="setup")
    classes = int(highest) + 1
    table = torch.zeros(comm.size, classes, dtype=torch.int64)
    table[comm.rank] = torch.bincount(shard.labels, minlength=classes)
    everyone.reduce_(table.view(-1), kind="setup")
    fewest = int(table.sum(0).min())
    if fewest < each:
        raise UserError(
            f"pactrain.score grasp looks at {each} training images of each class, and one has "
            f"{fewest}: give --pactrain-score magnitude, or more images"
        )
    own, places = places_in_draw(shard.labels, table[: comm.rank].sum(0), each)
    images = torch.zeros(classes * each, *shard.images.shape[1:], dtype=shard.images.dtype)
    images[places] = shard.images[own]
    everyone.reduce_(images.view(-1), MPI.BOR, kind="setup")
    labels = torch.arange(classes).repeat_interleave(each)
    return Shard(images, labels)
