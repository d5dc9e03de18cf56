"""Replicate a model over MPI in anybody's training loop: `prunex_mpi.replicate`.

The program's own loop (`run/supervision.py`) takes its steps by the same drivers.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.base.errors import UserError, log, meant
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import require_same, run_collectively
from prunex_mpi.comm.async_exchange import exchanging_asynchronously
from prunex_mpi.comm.collectives import BUCKET_MIB, broadcast_weights_, build_transport
from prunex_mpi.comm.topology import Topology, nodes_of, set_threads
from prunex_mpi.config.resolve import BY_NAME, FIELDS, OWNER, make, to_toml
from prunex_mpi.core.evaluation import statistics_of_z
from prunex_mpi.core.mask_choice import log_unpruned, try_groups
from prunex_mpi.core.optimizer import OptimizerMemory
from prunex_mpi.core.schedule import steps_taken, total_steps
from prunex_mpi.core.state import Problem, RunContext, State, build_state, weights
from prunex_mpi.methods.exchanges import exchange_of, memory_of
from prunex_mpi.methods.stepper import Stepper
from prunex_mpi.models.dummy_input import Called, as_read, keeping_modes
from prunex_mpi.models.layout import build_layout, tensors_text, trained_parameters
from prunex_mpi.models.standalone import fill_, resize_
from prunex_mpi.pruning.shrink import smaller_sizes, smaller_tensors
from prunex_mpi.replica import saving
from prunex_mpi.replica.ending import Lockstep, end_all_on_exceptions, leave_at_exit
from prunex_mpi.settings.fields import OF_SECTION, Settings, key_of

# Of records: what the program's evaluations find.
OF_EVALUATIONS = ("test_", "val_")
UNUSED = torch.empty(0)


class Calibration(NamedTuple):
    """What drivers ask of data: batches to estimate BatchNorm statistics on, steps of an epoch."""

    given: Sequence[Tensor]
    steps_per_epoch: int
    batch_size: int = 1
    waited: float = 0.0

    def batches(self, shard: None, batch_size: int) -> Iterator[tuple[Tensor, None]]:
        """Yield what statistics are estimated on."""
        for batch in self.given:
            yield batch, None


def replicate(
    comm: MPI.Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    example: Any = None,
    calibrate: Sequence[Tensor] = (),
    scaler: torch.amp.GradScaler | None = None,
    steps_per_epoch: int = 0,
    **settings: Any,
) -> "Replica":
    """Have `model` trained by the ranks of `comm` together; rank 0's weights become everyone's.

    `optimizer` is any of torch's over the parameters of `model`; learning rate, weight decay and
    schedule are its own. `settings` bear the names of the program's flags; `method`,
    `outer_iterations` (the length of the run) and `local_steps` (steps between two exchanges) are
    those to begin with. `example`, a batch as the model takes it (a tensor, or tensors by name or
    place), is needed to prune. `calibrate` are batches to estimate BatchNorm statistics on, with
    `bn="recalibrate"`. With a `scaler` the loss is scaled before backward; the replica unscales.
    `steps_per_epoch` is for schedules in epochs, by default `local_steps`. Without OMP_NUM_THREADS
    torch gets as many threads as this rank has cores of its own. Which channels stay unpruned, and
    why, is logged (`logging.INFO`) by rank 0. Raises UserError on every rank. Collective on `comm`.
    """
    if not isinstance(comm, MPI.Comm):
        raise UserError(f"the first argument of replicate is a communicator, not {type(comm)}")
    end_all_on_exceptions(comm)
    asked = partial(
        settings_of,
        settings,
        optimizer,
        has_example=example is not None,
        calibrates=len(calibrate) > 0,
    )
    resolved = run_collectively(comm, asked)
    require_same(comm, "the settings of replicate", to_toml(resolved, {}))
    with ExitStack() as exits:
        ranks_per_node = 1 if resolved.method.flat else resolved.ranks_per_node
        topology = exits.enter_context(nodes_of(comm, ranks_per_node, None, resolved.rack_of))
        threads = set_threads(topology.core_sharers, topology.host_size)
        feed = Calibration(calibrate, steps_per_epoch or resolved.local_steps)
        context = _assemble(topology, model, optimizer, resolved, example, feed, scaler)
        helper = exchanging_asynchronously(topology, resolved.overlap_steps > 0, context.transport)
        context = replace(context, helper=exits.enter_context(helper))
        if comm.rank == 0:
            log.info("torch computes with %d threads on rank 0", threads)
            log_unpruned(resolved, context.state.groups, context.state.layout.numel)
            if unstepped := context.state.optimizer.unstepped:
                log.warning(
                    "%d tensors of the model are trained, but the optimizer does not step them; "
                    "they are sent all the same: give it model.parameters(), or set "
                    "requires_grad_(False) on what shall stay",
                    unstepped,
                )
        # All that was made is the replica's from here on.
        return Replica(topology, model, context, exits.pop_all())


def _assemble(
    topology: Topology,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    example: Any,
    feed: Calibration,
    scaler: torch.amp.GradScaler | None,
) -> RunContext:
    """Build the state around a model that lies on its device. Collective on `world`."""
    world = topology.world
    device = next(model.parameters()).device
    buffers = "device" if settings.mpi_buffers == "device" else "host"
    transport = build_transport(device, BUCKET_MIB, buffers, settings.piece_kib)
    require_same(world, "the parameters of the model", tensors_text(model))
    broadcast_weights_(world, model, transport)

    def build() -> tuple[nn.Module, State]:
        read, inputs = (model, None) if example is None else as_read(model, example)
        layout = build_layout(read)
        # Channels are followed on the CPU.
        followed = read
        if any(p.device.type != "cpu" for p in read.parameters()):
            followed = copy.deepcopy(read).cpu()
        groups = try_groups(settings, followed, layout, inputs)
        memory = OptimizerMemory(optimizer, read, layout, given=True)
        state = build_state(read, layout, groups, settings, optimizer=memory)
        state.memory.declare(memory_of(settings, state))
        return read, state

    read, state = run_collectively(world, build)
    require_same(world, "the groups of the model", repr(state.groups))
    state.alone = world.size == 1
    if scaler is not None:
        state.scaler = scaler
        state.sound = torch.empty_like(state.stats)
    problem = Problem(
        model=read,
        forward=read,
        loss=None,
        train=feed,
        train_shard=None,
        test=None,
        batches=feed.batches,
        steps=settings.local_steps,
        mean=UNUSED,
        std=UNUSED,
        # Of a loss of somebody's own nothing is known; it may begin at zero.
        guess_loss=math.inf,
        rate=lambda: optimizer.param_groups[0]["lr"],
        calibration_batches=len(feed.given),
    )
    return RunContext(state, problem, settings, transport, Heartbeat())


class Replica:
    """A model that ranks train together; between two steps it holds this rank's theta.

    `records` holds what metrics.jsonl would of each outer iteration so far; "train_loss" is None
    where `step` was not given its last loss. `done` says that the run has had its length,
    `exchanged` that the last step ended an outer iteration. `optimizer` is one whose `step()` is
    this replica's, for loops that call it themselves.
    """

    def __init__(
        self, topology: Topology, model: nn.Module, context: RunContext, exits: ExitStack
    ) -> None:
        self.model = model
        self.records: list[dict[str, Any]] = []
        self._topology, self._context, self._exits = topology, context, exits
        self._lockstep = exits.enter_context(closing(Lockstep(topology.world)))
        self._taken = context.state.optimizer.optimizer
        self._in_step = self._announced = self._has_stepped = False
        handle = self._taken.register_step_pre_hook(self._refuse_foreign_step)
        exits.callback(handle.remove)
        self.optimizer = SteppedOptimizer(self)
        self._open = self.exchanged = True
        self._begin()
        leave_at_exit(topology.world, self.close)

    # ----------------------------------------------------------------------------------------------
    # Steps
    # ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Return the steps of the run so far; on other nodes it resumes where an interval began."""
        return steps_taken(self._context)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Average, step the optimizer, exchange when due, from the gradients in the model.

        Those of one backward pass or of several; they are zero afterwards. `loss` is for the
        records alone. Clip before it what is this rank's alone; `clip_grad=` clips what is
        averaged. Raises UserError after the last step, without a backward pass since the one
        before, and where another rank has left its loop. Collective on `comm`.
        """
        if not self._open:
            raise UserError("step() after close(); leave the loop before the replica is closed")
        if self.done:
            total = total_steps(self._context.settings, self._context.problem.steps)
            raise UserError(
                f"the run has had its {total} steps (outer_iterations times local_steps); leave "
                "the loop where replica.done, or give more outer_iterations"
            )
        self._lockstep.enter()
        if self._has_stepped:
            self._collect_gradients()
        else:
            # A loop that lacks the backward pass lacks it here, on all ranks.
            run_collectively(self._topology.world, self._collect_gradients)
        self._has_stepped = True
        mean = loss if isinstance(loss, Tensor) else torch.tensor(float(loss or 0.0))
        before = len(self.records)
        self._resume(mean.detach().to(self._context.state.theta.device))
        self.exchanged = len(self.records) > before
        if self.exchanged and loss is None:
            self.records[-1]["train_loss"] = None

    def overlap_backward(self) -> None:
        """Send gradients during the next backward pass, the last one before `step`.

        Gradients must not have been set to None since the last step.
        """
        self._announced = True
        if self._stepper.averager is not None:
            self._stepper.averager.begin()

    def _begin(self) -> None:
        """Start the driver from where the state stands."""
        self._stepper = Stepper(self._topology, self._context)
        self._resume(None)

    def _resume(self, loss: Tensor | None) -> None:
        """Go on to where the next gradient is needed, and keep the records on the way."""
        self._in_step = True
        # Drivers put all of it into training mode, where the caller may have parts that are not.
        with keeping_modes(self._context.problem.model):
            record = self._stepper.resume(loss)
            while record is not None:
                kept = {k: v for k, v in record.items() if not k.startswith(OF_EVALUATIONS)}
                self.records.append(kept)
                record = self._stepper.resume(None)
        self._in_step = self._announced = False
        self._untouched = self._context.state.grad._version
        self.done = self._stepper.ended

    def _collect_gradients(self) -> None:
        """Bring gradients that autograd has put elsewhere into the flat one.

        Raises UserError where no gradient has been written since the last step.
        """
        state = self._context.state
        # Views share their version with the whole, which backward raises, as zero_grad does.
        written = state.grad._version > self._untouched
        parameters = trained_parameters(self._context.problem.model).values()
        for parameter, view in zip(parameters, state.layout.views(state.grad), strict=True):
            grad = parameter.grad
            if grad is not None and grad.data_ptr() == view.data_ptr():
                continue
            if self._announced and self._stepper.averager is not None:
                raise UserError(
                    "gradients were set to None after overlap_backward(), so that others were "
                    "sent; call zero_grad before it, or zero_grad(set_to_none=False)"
                )
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)
                written = True
            parameter.grad = view
        if not written:
            raise UserError(
                "step() without a backward pass since the last one; call loss.backward() before "
                "it, or zero_grad(set_to_none=False) where this rank has no batch"
            )

    def _refuse_foreign_step(self, *_: Any) -> None:
        if not self._in_step:
            raise UserError(
                "optimizer.step() was called beside replica.step(), which steps the optimizer; "
                "leave it away, or give your loop replica.optimizer"
            )

    # ----------------------------------------------------------------------------------------------
    # What comes of it
    # ----------------------------------------------------------------------------------------------

    @contextmanager
    def delivered(self) -> Iterator[nn.Module]:
        """Have the consensus in the model for the block: z, masked, in evaluation mode.

        To look at right after an exchange (`exchanged`), or at the end. With `bn="recalibrate"`
        collective on `comm`.
        """
        context, state = self._context, self._context.state
        if not self.exchanged:
            total = total_steps(context.settings, context.problem.steps)
            raise UserError(
                f"this rank asks for the delivered network after step {self.steps} of "
                f"{total}, between two exchanges, where every node has weights of its own; ask "
                "where replica.exchanged, or leave the loop where replica.done"
            )
        estimates = not self.done and context.settings.method.by_iteration
        estimates = estimates and context.settings.bn == "recalibrate"
        estimated = statistics_of_z(self._topology, context) if estimates else nullcontext()
        with estimated, keeping_modes(self.model), weights(state, state.z):
            self.model.eval()
            yield self.model

    def smaller(self) -> nn.Module:
        """Return a copy of the model on the CPU without what was pruned, in evaluation mode.

        Where nothing is pruned it has its old size, and the log says so. Raises UserError where the
        groups leave zeros alone (all but "coupled"). Does not communicate, but as `delivered`.
        """
        state = self._context.state
        if state.groups.total and state.groups.coupling is None:
            raise UserError(
                "what these groups prune are zeros in a network of the old size; give "
                "groups=['coupled'] for one that is smaller"
            )
        with self.delivered():
            small = copy.deepcopy(self._context.problem.model).cpu()
        for parameter in small.parameters():
            parameter.grad = None
            parameter.data = parameter.data.clone()
        small.eval()
        removed = ~state.mask.bits
        if not removed.any() and not state.sizes and self._topology.world.rank == 0:
            log.warning("smaller(): nothing is pruned, or not yet, so the network has its old size")
        if removed.any() and not state.sizes:
            coupling = state.groups.coupling
            sizes, tensors = (f(small, coupling, removed) for f in (smaller_sizes, smaller_tensors))
            resize_(small, sizes)
            fill_(small, tensors)
        return small.model if isinstance(small, Called) else small

    # ----------------------------------------------------------------------------------------------
    # Resume, and the end
    # ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that this rank needs to go on bit for bit; tensors are copies, on the CPU.

        The data loader's place, a scheduler and random generators are the caller's to keep.
        `torch.save` and `torch.load(weights_only=True)` take it. Does not communicate.
        """
        if self._context.helper is not None:
            self._context.helper.finish()
        where = [self._topology.world.rank, *self._topology.node_sizes]
        return {
            "ranks": where,
            "settings": saving.settings_text(self._context.settings),
            "exchanged": self.exchanged,
            "records": copy.deepcopy(self.records),
            **saving.contents(self._topology, self._context),
        }

    def load_state_dict(self, saved: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on bit for bit from what `state_dict` returned on the same rank of the same nodes.

        On other nodes from what all ranks had in common, by the list of all their states in order:
        z, masks and mean moments are kept, duals begin anew, and so does the interval under way.
        Raises UserError on every rank where it is of other ranks, settings or another model.
        Collective on `comm`.
        """
        world, context = self._topology.world, self._context
        same = isinstance(saved, dict)
        states = [saved] if same else saved
        here = [world.rank, *self._topology.node_sizes] if same else None
        text = saving.settings_text(context.settings)
        run_collectively(world, partial(saving.check, states, here, text, context.state))
        self._stepper.close()
        put_back = saving.put_back if same else saving.put_elsewhere
        put_back(self._topology, saved, context)
        self.records = copy.deepcopy(states[0]["records"])
        self.optimizer.share_()
        self._begin()
        self.exchanged = saved["exchanged"] if same else True

    def close(self) -> None:
        """Leave the loop, as all ranks do after the same step. Collective on `comm`.

        Called at the end of the program where it was not before. Raises UserError where other ranks
        go on.
        """
        if self._open:
            self._open = False
            self._lockstep.leave()
            self._stepper.close()
            self._exits.close()

    def __enter__(self) -> "Replica":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an exception the job ends by that.
        if kind is None:
            self.close()


class SteppedOptimizer(torch.optim.Optimizer):
    """The replica's optimizer for loops of others, such as Trainer's: its step is the replica's."""

    def __init__(self, replica: Replica) -> None:
        own = replica._taken
        self._replica = replica
        super().__init__([{"params": [UNUSED]}], dict(own.defaults))
        self.share_()

    def share_(self) -> None:
        """Take the lists of the optimizer that steps: a scheduler sets the rate of both."""
        # Those that it has now: loading a state replaces them.
        own = self._replica._taken
        self.param_groups, self.state = own.param_groups, own.state

    def step(self, closure: None = None) -> None:
        """Take the replica's step, as long as there are any. Collective."""
        self._replica.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leave gradients to the replica, which makes them zero after each step."""


# --------------------------------------------------------------------------------------------------
# What is asked of `replicate`
# --------------------------------------------------------------------------------------------------

# Settings of the algorithm, which mean here what they mean to the program.
SECTIONS = ("sparsity", "consensus", "penalties", "exchange")
OTHERS = (
    *("preset", "method", "seed", "outer_iterations", "local_steps", "inner_momentum"),
    *("clip_grad", "evaluate_every", "mpi_buffers", "ranks_per_node", "rack_of", "piece_kib"),
)
ACCEPTED = {*OTHERS, *(name for section in SECTIONS for name in OF_SECTION[section])}
INSTEAD = {
    "lr": "that of the optimizer",
    "sparsity": "keep_ratio, the share that stays",
    "lr_schedule": "a scheduler of torch",
    "momentum": "that of the optimizer",
    "weight_decay": "that of the optimizer",
    "optimizer": "an optimizer as the third argument",
    "batch_size": "that of the loader",
    "amp": "torch.autocast around the loss, and scaler= for float16",
    "local_epochs": "local_steps",
    "device": "a model that is there",
    "model_ema_decay": "torch.optim.swa_utils",
}


def settings_of(
    given: Mapping[str, Any], optimizer: object, *, has_example: bool, calibrates: bool
) -> Settings:
    """Return the settings of an own loop; raise UserError for what means nothing to one."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"the third argument of replicate is of type {type(optimizer).__name__}; give a "
            "torch.optim.Optimizer of model.parameters()"
        )
    for name in ("outer_iterations", "local_steps"):
        if type(given.get(name)) is not int or given[name] < 1:
            raise UserError(
                f"replicate needs {name}=, a number from 1 on: the run has outer_iterations times "
                "local_steps steps"
            )
    given = {"evaluate_every": given["outer_iterations"], **given}
    method = BY_NAME.get(given.get("method", "prunex"))
    if method is None:
        # Says which names there are.
        make(method=given["method"])
    own = set(method.option_fields())
    if method.momentum and not method.steps_on_gradient:
        own.add("momentum")
    if exchange_of(method).own_decay:
        own.add("weight_decay")
        given.setdefault("weight_decay", 0.0)
    for name in given.keys() - ACCEPTED - own - OWNER.keys():
        if name in INSTEAD:
            raise UserError(f"{name} is no setting of replicate; give {INSTEAD[name]}")
        if name not in FIELDS:
            guess = method.option_name(name)
            hint = (
                f"; did you mean {guess!r}"
                if guess in own
                else meant(name, ACCEPTED | own, "; prunex_mpi/settings/README.md has the names")
            )
            raise UserError(f"replicate has no setting {name!r}{hint}")
        raise UserError(
            f"{key_of(name)} means nothing in one's own loop, which brings model, data and files; "
            "leave it away"
        )
    if method.by_iteration and not calibrates:
        given.setdefault("bn", "average")
    settings = make(**given)
    if settings.overlap_steps < 0:
        raise UserError(
            "overlap_steps='auto' measures the program's own loop; give overlap_steps=, a number "
            "of steps, 0 for none"
        )
    if method.by_iteration and settings.bn == "recalibrate" and not calibrates:
        raise UserError("bn recalibrate needs batches; give calibrate=, or bn='average'")
    if (method.removes or method.keeps_by_layer) and not has_example:
        raise UserError(
            f"method {method.name} prunes groups, which are found by following a batch through the "
            "model; give example=, a batch as the model takes it"
        )
    plain = isinstance(optimizer, torch.optim.SGD)
    plain = plain and not optimizer.param_groups[0]["momentum"]
    if not method.steps_on_gradient and not plain:
        raise UserError(
            f"{method.name} has a momentum of its own; give torch.optim.SGD without momentum"
        )
    return settings
