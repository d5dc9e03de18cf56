"""The base of the methods' own exchanges: one class each, in a file of its own.

An exchange takes part in training step by step (`per_step.py`), or once per outer iteration where
the message is not the mean of the parameters (`hsadmm.py`). What is asked before there are
communicators are static methods; the rest works in memory that `allocate` has made, so that no step
allocates. The base sums gradients as they are; a method overrides what it does otherwise.
"""

from torch import Tensor

from prunex_mpi.comm.counted import CountedComms
from prunex_mpi.core.memory import Declared
from prunex_mpi.core.state import RunContext, State
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

# Where methods keep what they have not sent yet, for a later step.
RESIDUAL = "residual"


class Exchange:
    """Exchange gradients over the workers, whose communicator is that of `link`.

    On the other ranks it allocates nothing, unless it works `everywhere`. Where the network has
    changed it is made anew.
    """

    # Messages, as rows (what, communicator, MPI operation, operand).
    OPERATIONS: tuple[tuple[str, str, str, str], ...] = ()
    everywhere = False
    # The driver adds up the gradients, while backward goes on where it can, without `exchange_`.
    plain_mean = False
    # A node steps along a gradient of its own, from its own mean: z is the mean of the nodes.
    drifts = False
    # Weights are decayed inside the exchange.
    own_decay = False

    def __init__(self, comms: CountedComms, context: RunContext) -> None:
        self.comms, self.link, self.context = comms, comms.workers, context
        self.state, self.settings = context.state, context.settings
        self.options = context.settings.options
        if self.everywhere or self.link.is_member:
            self.allocate()

    # Before there are communicators ---------------------------------------------------------------

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate and declare what one step hands to the next, all that a checkpoint holds of it.

        Raises UserError.
        """
        return {}

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        """Return the bytes that a worker hands over in a step, or the most, and what they are."""
        return layout.numel * size, settings.aggregation

    @staticmethod
    def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
        """Return how many of a run's `payload` bytes, without statistics, say where values go."""
        return 0

    # In a step ------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Allocate what each step writes anew."""

    def exchange_(self, flat: Tensor) -> None:
        """Replace a worker's weighted gradient by the sum over all workers, the same bits on each.

        Once per outer iteration `flat` is z instead. Collective on the workers.
        """
        self.link.reduce_(flat)

    def add_penalty_(self, loss: Tensor) -> None:
        """Add the gradient of a penalty to this rank's, whose batch had this `loss`."""

    def follow_(self) -> None:
        """Look at the gradient that all ranks have received. May be collective on `world`."""

    def prune_(self, done: int) -> float | None:
        """Prune after `done` outer iterations, if that is when; return the drift of the mask.

        None where it is that of the mask of groups. May be collective on `world`.
        """
        return None

    def reshape_(self, done: int) -> bool:
        """Take out of the network what is of no use; return whether any was.

        Then this exchange is of no use any more, either. May be collective on `world`.
        """
        return False


class Dense(Exchange):
    """Leave the mean gradient, as it is, to the driver: synchronous SGD."""

    OPERATIONS = (("gradient", "workers", "Allreduce SUM", "dense, overlapped with backward"),)
    plain_mean = True
