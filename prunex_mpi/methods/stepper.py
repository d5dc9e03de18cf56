"""A model that ranks train together, step by step, by any of the methods."""

from typing import Any

from torch import Tensor

from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.state import RunContext
from prunex_mpi.methods import flat_consensus, hsadmm, local_sgd, per_step

DRIVERS = {
    "hsadmm": hsadmm.outer_iterations,
    "flat_consensus": flat_consensus.outer_iterations,
    "local_sgd": local_sgd.outer_iterations,
    "per_step": per_step.outer_iterations,
}


class Stepper:
    """Take a method's local steps one by one: `begin`, a gradient, `finish`, and so on.

    `averager`, where there is one, may send the gradient while backward goes on: after its `begin`.
    Collective on `topology.world`.
    """

    def __init__(self, topology: Topology, context: RunContext) -> None:
        self._rounds = DRIVERS[context.settings.method.driver](topology, context)
        self._ready = False
        self.averager: GradientAverager | None = None

    def begin(self) -> bool:
        """Go on to where a gradient is needed; return False at the end, or where ranks stop."""
        if not self._ready:
            self._resume(None)
        return self._ready

    def finish(self, loss: Tensor) -> dict[str, Any] | None:
        """Take the step, and what is due after it; return the record of an outer iteration's end.

        The gradient of this rank is in that of the model; `loss` is its loss, detached.
        """
        return self._resume(loss)

    def _resume(self, loss: Tensor | None) -> dict[str, Any] | None:
        self._ready = False
        try:
            found = self._rounds.send(loss)
        except StopIteration:
            return None
        if isinstance(found, dict):
            return found
        self.averager, self._ready = found, True
        return None

    def close(self) -> None:
        """Let go of the model."""
        self._rounds.close()
