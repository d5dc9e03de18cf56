"""A run that a program of one's own drives: own model, own images, own loss, own loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.base.errors import UserError, one_line
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import gather_counts, require_same, run_collectively
from prunex_mpi.comm.async_exchange import exchanging_behind
from prunex_mpi.comm.topology import Topology
from prunex_mpi.config.resolve import to_toml
from prunex_mpi.core.evaluation import delivered
from prunex_mpi.core.losses import Loss
from prunex_mpi.core.state import RunContext, weights
from prunex_mpi.data.batches import Look, Shard, evaluation_batches
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.models.dummy_input import dummy_input, evaluating, settle
from prunex_mpi.models.inputs import Images
from prunex_mpi.run.learn import outer_iterations
from prunex_mpi.run.start import assemble_around, find_transport, log_warnings, places_of
from prunex_mpi.run.supervision import check_exchange, goes_behind_steps
from prunex_mpi.run.tuning import is_left_to_measure
from prunex_mpi.settings.fields import CROSS_ENTROPY, OF_SECTION, SHARED, Settings, key_of
from prunex_mpi.settings.values import AUTO

# What the program takes from its own models and data, which it normalises and augments as here.
OF_ITS_OWN = ("model", "stem", "init_from", "init_digest")
NORMALISED = ("image_mean", "image_std", "augment", "transforms")
OF_THE_PROGRAM = (
    *OF_ITS_OWN,
    *(name for name in OF_SECTION["data"] if name not in NORMALISED),
    *OF_SECTION["safety"],
    # At this one the outer iterations themselves look.
    *(name for name in OF_SECTION["output"] if name != "evaluate_every"),
)


@dataclass(frozen=True)
class Data:
    """This rank's images: those to train on, as many on every rank, and its share of a test set.

    All ranks have such a share, which may be empty, or none has. Images are uint8 [n, 3, S, S],
    labels int64 [n], both on the CPU. `flip` and `pad` say how images are augmented: mirrored, and
    cropped out of as many more pixels on each side.
    """

    train: Shard
    test: Shard | None = None
    flip: bool = False
    pad: int = 0


@dataclass(frozen=True)
class Training:
    """A run under way."""

    topology: Topology
    context: RunContext

    def outer_iterations(self) -> Iterator[dict[str, Any]]:
        """Train; yield what metrics.jsonl would hold of each outer iteration.

        Collective on the communicator of the run: every rank must exhaust the iterator. Raises
        Diverged on every rank.
        """
        yield from outer_iterations(self.topology, self.context)

    def normalised(self, images: Tensor) -> Tensor:
        """Return uint8 images [n, 3, S, S] as the model sees them, of its dtype, on the CPU."""
        problem = self.context.problem
        dtype = next(p.dtype for p in problem.model.parameters())
        look = Look(problem.mean, problem.std, "cpu", dtype)
        shard = Shard(images, torch.zeros(len(images), dtype=torch.int64))
        return next(evaluation_batches(shard, batch_size=len(images), look=look))[0]

    def delivered(self) -> nn.Module:
        """Return a copy of the model, on the CPU, with the weights that all ranks agree on.

        With `--model-ema-decay` their average. What is pruned is zero. Does not communicate;
        `export.smaller` takes the zeros out. Meant for the end: while masks are being chosen, with
        `bn` recalibrate, its BatchNorm statistics are those of the network before pruning.
        """
        state, model = self.context.state, self.context.problem.model
        with delivered(self.context), weights(state, state.z):
            tensors = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
        side = self.context.problem.train_shard.images.shape[-1]
        # Some modules keep a result of the last batch, which has no copy with its gradient.
        settle(model, Images(side))
        copy = deepcopy(model).cpu()
        copy.load_state_dict(tensors)
        for parameter in copy.parameters():
            parameter.grad = None
        copy.eval()
        return copy


@contextmanager
def training(
    world: MPI.Comm, settings: Settings, model: nn.Module, data: Data, loss: Loss | None = None
) -> Iterator[Training]:
    """Have a run for the time of the block: `model` trained on `data` by the ranks of `world`.

    The model, on the CPU, becomes the run's own; rank 0's weights become everyone's. `loss` takes
    outputs [b, classes] and labels [b] and returns their mean loss; without it it is cross-entropy.
    Raises UserError on every rank. Collective on `world`, at both ends.
    """
    run_collectively(world, lambda: check_foreign(settings, loss, data))
    shape = tuple(data.train.images.shape[1:])
    same = f"{len(data.train.labels)} images {shape}, flip {data.flip}, pad {data.pad}"
    require_same(world, "the numbers or sizes of the images to train on", same)
    # A rank without some of these would leave the others alone in a collective.
    require_same(
        world, "the images, which some have without a test set,", str(data.test is not None)
    )
    require_same(world, "the settings", to_toml(settings, {}))
    with places_of(world, settings) as place:
        topology, device = place.topology, place.device
        transport = find_transport(place, settings)
        check_exchange(topology, settings)
        tests = sum(gather_counts(world, len(data.test.labels) if data.test is not None else 0))
        dataset = run_collectively(world, lambda: as_dataset(model, data, world.size, tests))
        around = (topology, settings, dataset, model, device, transport)
        context = assemble_around(*around, Heartbeat())
        log_warnings(world, context)
        problem = context.problem
        if loss is not None:
            problem = replace(problem, loss=loss, guess_loss=0.0)
        if data.test is None:
            problem = replace(problem, test=None)
        with exchanging_behind(topology, goes_behind_steps(settings), transport) as behind:
            yield Training(topology, replace(context, problem=problem, behind=behind))


def check_foreign(settings: Settings, loss: Loss | None, data: Data) -> None:
    """Raise UserError for settings of what is given here, or done by the program alone."""
    for name in OF_THE_PROGRAM:
        if getattr(settings, name) != SHARED[name].default:
            raise UserError(
                f"{key_of(name)} means nothing to a run from Python, which brings model and data "
                "and writes no files; leave it away"
            )
    if loss is not None and settings.loss != CROSS_ENTROPY:
        raise UserError("the loss is given twice, as a function and in the settings; keep one")
    if is_left_to_measure(settings):
        name = "local-steps" if settings.local_steps == AUTO else "overlap-steps"
        raise UserError(f"{name} auto takes a trial, which the program makes; give a number")
    for shard in (data.train, data.test):
        if shard is not None:
            check_images(shard)


def check_images(shard: Shard) -> None:
    """Raise UserError for images or labels that are not as they have to be."""
    images, labels = shard.images, shard.labels
    square = images.dim() == 4 and images.shape[1] == 3 and images.shape[2] == images.shape[3]
    if images.dtype != torch.uint8 or not square:
        raise UserError(f"images must be uint8 [n, 3, S, S], not {_kind(images)}")
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise UserError(f"labels must be int64 [{len(images)}], not {_kind(labels)}")


def as_dataset(model: nn.Module, data: Data, ranks: int, tests: int) -> Dataset:
    """Return the images as a loaded data set has them, `tests` on all ranks together.

    Raises UserError for images that there are none of, or that the model does not fit, and for
    labels beyond its outputs.
    """
    if not len(data.train.labels):
        raise UserError("there is no image to train on")
    if data.test is not None and not tests:
        raise UserError("the test set is empty on all ranks; leave test away where there is none")
    side = data.train.images.shape[-1]
    classes = find_classes(model, side)
    test = data.test or Shard(data.train.images[:0], data.train.labels[:0])
    for labels in (data.train.labels, test.labels):
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise UserError(f"labels must be from 0 to {classes - 1}, the outputs of the model")
    return Dataset(
        train=data.train,
        test=test,
        num_classes=classes,
        image_size=side,
        train_total=len(data.train.labels) * ranks,
        test_total=tests,
        flip=data.flip,
        pad=data.pad,
    )


def find_classes(model: nn.Module, side: int) -> int:
    """Return how many outputs the model has; raise UserError where it can't take such images."""
    try:
        with evaluating(model):
            outputs = model(dummy_input(model, Images(side)))
    # The user's model can raise anything.
    except Exception as error:
        raise UserError(
            f"the model can't take images of {side}x{side} ({one_line(error)})"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != 1:
        found = _kind(outputs) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise UserError(f"the model returns {found} for one image, not [1, classes]")
    return outputs.shape[1]


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
