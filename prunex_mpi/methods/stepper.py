"""A model that ranks train together, step by step, by any of the methods."""

from typing import Any

from torch import Tensor

from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.state import RunContext
from prunex_mpi.methods import hsadmm, per_step


class Stepper:
    """Take a method's local steps one by one: `resume` without a gradient, then with each.

    `averager`, where there is one, may send the gradient while backward goes on: after its `begin`.
    Once it has `ended` no gradient is wanted any more: the run is over, or the ranks stop.
    """

    def __init__(self, topology: Topology, context: RunContext) -> None:
        driver = per_step if context.settings.method.per_step else hsadmm
        self._rounds = driver.outer_iterations(topology, context)
        self.averager: GradientAverager | None = None
        self.ended = False

    def resume(self, loss: Tensor | None) -> dict[str, Any] | None:
        """Go on to the end of an outer iteration, and return its record, or to the next gradient.

        The gradient of this rank is in that of the model; `loss` is its loss, detached. After a
        record, and at first, there is none. Collective on `topology.world`.
        """
        try:
            found = self._rounds.send(loss)
        except StopIteration:
            self.ended = True
            return None
        if isinstance(found, dict):
            return found
        self.averager = found
        return None

    def close(self) -> None:
        """Let go of the model."""
        self._rounds.close()
