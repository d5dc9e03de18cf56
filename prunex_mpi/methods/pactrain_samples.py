"""The images that PacTrain's pruning looks at, before it trains.

As in the authors' code of GraSP (Wang et al. 2020): of every class as many, class by class, in two
halves that are a batch each; gradients of both halves are added up. The images are the first ones
of their class over the shards of all ranks, whose order the seed draws. So they are the same for
any number of ranks; the ranks share the batches, not the images of one.
"""

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.evaluation import check_readable
from prunex_mpi.core.state import RunContext
from prunex_mpi.data.batches import Shard
from prunex_mpi.data.datasets import class_counts, places_in_draws

# A batch holds at most so many pixels, 512 images of 32x32: second derivatives take memory.
BATCH_PIXELS = 2**19
# Images of each class, of all ranks together.
SAMPLES = 10

Batches = list[tuple[Tensor, Tensor]]


def batches_to_score(everyone: Wire, context: RunContext) -> Batches:
    """Return this rank's batches for the score grasp; it may have none.

    Collective on `world`. Raises UserError on every rank where a class has too few images, or one
    can't be read.
    """
    problem = context.problem
    drawn = draw_balanced(everyone, problem.train_shard, SAMPLES)
    check_readable(everyone.comm, context)
    most = max(1, BATCH_PIXELS // drawn.images[0, 0].numel())
    size = len(drawn.labels)
    pieces = []
    for half in (slice(0, size // 2), slice(size // 2, size)):
        # As long as each other, since each batch's mean loss counts as much.
        parts = max(1, -(-(half.stop - half.start) // most))
        images, labels = drawn.images[half], drawn.labels[half]
        pairs = zip(images.tensor_split(parts), labels.tensor_split(parts), strict=True)
        pieces += [Shard(*pair) for pair in pairs if len(pair[1])]
    mine = pieces[everyone.comm.rank :: everyone.comm.size]
    return [
        batch for piece in mine for batch in problem.batches(piece, batch_size=len(piece.labels))
    ]


def draw_balanced(everyone: Wire, shard: Shard, each: int) -> Shard:
    """Return `each` images of every class, class by class.

    The same on all ranks. Collective on `world`. Raises UserError on every rank.
    """
    comm = everyone.comm
    highest = torch.tensor([int(shard.labels.max()) if len(shard.labels) else -1])
    everyone.reduce_(highest, MPI.MAX, kind="setup")
    classes = int(highest) + 1
    table = torch.zeros(comm.size, classes, dtype=torch.int64)
    table[comm.rank] = class_counts(shard.labels, classes)
    everyone.reduce_(table.view(-1), kind="setup")
    fewest = int(table.sum(0).min())
    if fewest < each:
        raise UserError(
            f"pactrain.score grasp looks at {each} training images of each class, and one has "
            f"{fewest}: give --pactrain-score magnitude, or more images"
        )
    own, places = places_in_draws(shard.labels, table[: comm.rank].sum(0), each, 1)
    images = torch.zeros(classes * each, *shard.images.shape[1:], dtype=shard.images.dtype)
    images[places] = shard.images[own]
    everyone.reduce_(images.view(-1), MPI.BOR, kind="setup")
    labels = torch.arange(classes).repeat_interleave(each)
    return Shard(images, labels)
