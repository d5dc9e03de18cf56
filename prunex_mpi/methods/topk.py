"""A step of top-k sparsification: every worker's largest elements, gathered by all."""

import torch
from torch import Tensor

from prunex_mpi.compress import sparse
from prunex_mpi.core.memory import Declared, summed
from prunex_mpi.core.state import State
from prunex_mpi.core.sums import EqualParts
from prunex_mpi.methods.exchange import RESIDUAL, Exchange
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings


class TopK(Exchange):
    """Send of each layer the largest of residual + gradient (Stich et al. 2018)."""

    OPERATIONS = (
        ("values", "workers", "Allgatherv", "the largest of each layer"),
        ("positions", "workers", "Allgatherv", "int32, one per value"),
    )

    def allocate(self) -> None:
        self.counts = sparse.kept_per_layer(self.state.layout.segments, self.options.ratio)
        values = self.state.theta.new_empty(sum(self.counts))
        self.sent = EqualParts(self.link, values, torch.empty_like(values, dtype=torch.int32))

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate what has not been sent yet."""
        sparse.check_positions(layout)
        return {RESIDUAL: summed(torch.zeros_like(theta))}

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the sum of what the workers send; the rest is the new residual."""
        residual, sent = self.state.memory[RESIDUAL].add_(flat), self.sent
        layers = self.state.layout.segments
        parts = sent.values.split(self.counts), sent.positions.split(self.counts)
        for segment, values, positions in zip(layers, *parts, strict=True):
            sparse.move_top_(residual[segment.place], values, positions)
            positions.add_(segment.offset)
        sent.sum_(flat)

    @staticmethod
    def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
        return sparse.position_bytes(payload, state.theta.element_size())

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        count = sum(sparse.kept_per_layer(layout.segments, settings.options.ratio))
        how = f"{count:,} values and positions, {settings.aggregation}"
        return count * (size + sparse.POSITION_BYTES), how
