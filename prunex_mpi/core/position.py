"""Where a run stands: what is remembered from one local step to the next, beside its vectors."""

from dataclasses import dataclass, field, fields

from prunex_mpi.comm.traffic import Clock, Traffic

# As what a message travels between nodes.
PLAIN, CODED = "plain", "coded"


@dataclass
class Position:
    """Where a run stands: all that the driver remembers from one local step to the next.

    `step` counts the local steps that outer iteration `iteration` has behind it, `steps_done` those
    of the outer iterations before; the sums of losses, the bytes and the seconds so far are this
    rank's own. `under_way` says as what travels (PLAIN or CODED) that the last outer iteration has
    exchanged and z does not hold yet; empty where there is nothing. `converged_of` is the length of
    a run, in outer iterations, that has converged before it, else 0.
    """

    iteration: int = 1
    step: int = 0
    steps_done: int = 0
    loss_sum: float = 0.0
    loss_count: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    clock: Clock = field(default_factory=Clock)
    drifts: list[float] = field(default_factory=list)
    freeze_next: bool = False
    vote_next: bool = False
    under_way: str = ""
    first_loss: float | None = None
    # Of the best z so far by held-out images, as `best.Judged` has it.
    best: list[float] = field(default_factory=list)
    rollbacks: int = 0
    converged_of: int = 0


def next_iteration(position: Position, loss: float) -> None:
    """Move on to the first step of the next outer iteration; `loss` is this one's mean."""
    if position.first_loss is None:
        position.first_loss = loss
    position.iteration += 1
    position.steps_done += position.step
    begin_iteration(position)


def begin_iteration(position: Position) -> None:
    """Forget what belongs to the steps of an outer iteration."""
    position.step, position.loss_sum, position.loss_count = 0, 0.0, 0.0
    # In place: wires hold on to these objects.
    for part in (position.traffic, position.clock):
        for one in fields(part):
            setattr(part, one.name, type(getattr(part, one.name))())
