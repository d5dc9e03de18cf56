"""PacTrain's mask: which weights are pruned, by magnitude or by GraSP, before it trains.

GraSP looks at images, or windows of text. As in its authors' code (Wang et al. 2020): of every
class as many, class by class, in two halves that are a batch each; gradients of both halves are
added up. The images are the first ones of their class over the shards of all ranks, whose order the
seed draws. So they are the same for any number of ranks; the ranks share the batches, not the
images of one.

Of text, which has no classes to balance, it is windows at even distances over all of it that is to
train on, in two halves and the same for any number of ranks as well.
"""

from collections.abc import Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import run_collectively, run_collectively_while
from prunex_mpi.comm.wire import Wire
from prunex_mpi.core.evaluation import check_readable
from prunex_mpi.core.losses import softened
from prunex_mpi.core.state import RunContext
from prunex_mpi.core.task import IMAGES
from prunex_mpi.methods.declared import GRASP_BELOW
from prunex_mpi.models.dummy_input import keeping
from prunex_mpi.models.layout import matrices
from prunex_mpi.pruning.unstructured import (
    Batches,
    add_gradients_,
    add_hessian_products_,
    prune_by_gradient_flow,
    prune_by_magnitude,
)
from prunex_mpi.settings.fields import Settings

# What logits are divided by for the score grasp (Wang et al. 2020).
GRASP_TEMPERATURE = 200.0
# A batch holds at most so many pixels, 512 images of 32x32: second derivatives take memory.
BATCH_PIXELS = 2**19
# Images of each class, of all ranks together.
SAMPLES = 10
# Windows of text, as many as CIFAR-10's images, and tokens of a batch of them.
WINDOWS, BATCH_TOKENS = 100, 2**13


def score_of(settings: Settings) -> str:
    """Return what decides which weights go, magnitude or grasp."""
    if settings.options.score != "auto":
        return settings.options.score
    return "magnitude" if settings.keep_ratio[0] >= GRASP_BELOW else "grasp"


def choose_pruned(everyone: Wire, context: RunContext) -> Tensor:
    """Return which weights go, bool [layout.numel]; only what world rank 0 returns counts.

    Collective on `world`. Raises UserError on every rank.
    """
    state, settings = context.state, context.settings
    layout, (ratio,) = state.layout, settings.keep_ratio
    if not matrices(layout):
        raise UserError("the model has no weight of two or more dimensions to prune")
    if score_of(settings) == "magnitude":
        return prune_by_magnitude(state.theta, layout, ratio)
    product = hessian_gradient_product(everyone, context)
    prune = partial(prune_by_gradient_flow, state.theta, product, layout, ratio)
    return run_collectively(everyone.comm, prune)


def hessian_gradient_product(everyone: Wire, context: RunContext) -> Tensor:
    """Return H g over the weights, both summed over the batches of all ranks.

    Of the loss at logits divided by `GRASP_TEMPERATURE`. As in the authors' code g and H are
    those of the weights that may be pruned alone. Collective on `world`. Raises UserError alike.
    """
    state, problem = context.state, context.problem
    if problem.train_shard is None:
        raise UserError(
            "score grasp looks at samples and their loss, which one's own loop keeps to itself; "
            "give pactrain_score='magnitude'"
        )
    layout, model, temperature = state.layout, problem.model, GRASP_TEMPERATURE
    batches = batches_to_score(everyone, context)

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return problem.loss(softened(outputs, temperature), labels)

    slope, product = torch.zeros_like(state.theta), torch.zeros_like(state.theta)
    model.train()
    passes = (
        (slope, partial(add_gradients_, slope, layout, model, loss)),
        (product, partial(add_hessian_products_, product, slope, layout, model, loss)),
    )

    # The passes must leave no trace in the statistics of BatchNorm.
    with keeping(model.buffers()):
        for flat, add in passes:
            counted = beating_through(batches, context.heartbeat)
            run_collectively_while(everyone.comm, partial(add, counted), context.heartbeat)
            everyone.reduce_(flat, kind="setup")
            for segment in layout.segments:
                if len(segment.shape) < 2:
                    flat[segment.place].zero_()
    return product


def beating_through(batches: Batches, heartbeat: Heartbeat) -> Batches:
    """Yield each batch, and count it as progress."""
    for batch in batches:
        heartbeat.go_on()
        yield batch


# --------------------------------------------------------------------------------------------------
# What GraSP looks at
# --------------------------------------------------------------------------------------------------


def batches_to_score(everyone: Wire, context: RunContext) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's batches for the score grasp; it may have none.

    Collective on `world`. Raises UserError on every rank where a class has too few images, or one
    can't be read.
    """
    problem = context.problem
    shard, stream = problem.train_shard, problem.train
    of_images = problem.task is IMAGES
    pieces = halves_of(everyone, shard) if of_images else windows_apart(shard, stream.stop)
    check_readable(everyone.comm, context)
    mine = pieces[everyone.comm.rank :: everyone.comm.size]
    return [batch for piece in mine for batch in problem.batches(piece, batch_size=len(piece))]


def windows_apart(shard: Any, stop: int) -> list[Sized]:
    """Return windows at even distances before token `stop`, in pieces, each a batch.

    `shard` are `data.text.Windows`, which `starts` and `context` tell.
    """
    context = shard.context
    there = (stop - 1) // context
    count = min(WINDOWS, there)
    apart = there // count * context
    starts = range(0, count * apart, apart)
    cut = pieces_of_halves(count, max(1, BATCH_TOKENS // context))
    return [replace(shard, starts=starts[piece]) for piece in cut]


def pieces_of_halves(size: int, most: int) -> list[slice]:
    """Return the places of both halves of so many samples, each in pieces of at most `most`.

    They are as long as each other, since each batch's mean loss counts as much.
    """
    pieces = []
    for half in torch.arange(size).split([size // 2, size - size // 2]):
        parts = half.tensor_split(max(1, -(-len(half) // most)))
        pieces += [slice(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]
    return pieces


def halves_of(everyone: Wire, shard: Any) -> list[Sized]:
    """Return the same images on all ranks in pieces, each a batch. Collective on `world`."""
    drawn = draw_balanced(everyone, shard, SAMPLES)
    most = max(1, BATCH_PIXELS // drawn.images[0, 0].numel())
    return [
        replace(drawn, images=drawn.images[piece], labels=drawn.labels[piece])
        for piece in pieces_of_halves(len(drawn.labels), most)
    ]


def draw_balanced(everyone: Wire, shard: Any, each: int) -> Any:
    """Return `each` images of every class, class by class.

    `shard` is a `data.batches.Shard`, of images uint8 [n, 3, H, W] and labels int64 [n], CPU.
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
    return replace(shard, images=images, labels=labels)


def places_in_draw(labels: Tensor, before: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Return which images of a shard are drawn, and where they stand among all that are.

    `each` images of every class, class by class: the first ones of it, in the order of the ranks
    and their shards. `before`, int64 [classes], are the images of each class on the ranks before.
    Returns int64 indices into the shard, and as many places.
    """
    counts = torch.bincount(labels, minlength=before.numel())
    order = torch.argsort(labels, stable=True)
    of_class = labels[order]
    first = torch.cumsum(counts, 0) - counts
    number = before[of_class] + torch.arange(labels.numel()) - first[of_class]
    drawn = number < each
    return order[drawn], of_class[drawn] * each + number[drawn]
