"""A step of AdaCGD: each worker mends the estimate of its gradient by as much as it needs.

After Makarenko et al. 2022 (arXiv:2211.00188), with Top-K of several levels. With a worker's
gradient x, the estimate h of it that all know and its gradient y of the step before, level j leads
to the estimate h + C_j(x - h). The coarsest is taken for which

    |x - h - C_j(x - h)|^2 <= zeta |x - y|^2

nothing at all (C = 0) being the coarsest of them; if there is none the finest. C_j keeps the
elements of largest magnitude, so that all are read off one sorted list. The first gradients travel
whole. Nothing is left over for later: the estimates follow (EF21), and the step takes their sum.

With `--adacgd-average` a below 1 the worker's own average of gradients, x = (1 - a) y + a g, stands
for the gradient, y being the average of the step before (EF21-SGDM, Fatkhullin et al. 2023).
"""

import torch
from torch import Tensor

from prunex_mpi.comm.counted import COUNT_BYTES
from prunex_mpi.compress import sparse
from prunex_mpi.core.memory import ALL, TOTAL, Declared, Lasting, summed
from prunex_mpi.core.schedule import steps_taken
from prunex_mpi.core.state import State
from prunex_mpi.core.sums import SparseParts
from prunex_mpi.methods.exchange import Exchange
from prunex_mpi.models.layout import Layout
from prunex_mpi.settings.fields import Settings

# Shares of the gradient that a worker chooses from, ascending.
LEVELS = (0.01, 0.03, 0.1)
# How good an estimate must be, as a share of the gradient's last change (squares).
ZETA = 0.4
ESTIMATE, LAST, SUM = "estimate", "last_gradient", "sum_of_estimates"


class AdaCgd(Exchange):
    """Send what an estimate of the gradient needs to be good enough."""

    OPERATIONS = (
        ("gradient, first step alone", "workers", "Allreduce SUM", "dense"),
        ("how many elements there are", "workers", "Allgather", "one int64"),
        ("elements, in buckets", "workers", "Allgatherv", "values, then int32 positions"),
    )

    def allocate(self) -> None:
        theta = self.state.theta
        self.counts = counts_of(theta.numel())
        self.sent = SparseParts(self.link, theta, self.counts[-1])
        self.magnitudes, self.largest = torch.empty_like(theta), theta.new_empty(self.counts[-1])
        self.places = torch.empty_like(self.largest, dtype=torch.int64)

    @staticmethod
    def memory(settings: Settings, layout: Layout, theta: Tensor) -> Declared:
        """Allocate a worker's estimate and last gradient, and the sum of all workers' estimates."""
        sparse.check_positions(layout)
        own = {key: summed(torch.zeros_like(theta)) for key in (ESTIMATE, LAST)}
        return own | {SUM: Lasting(torch.zeros_like(theta), ALL, TOTAL, of=ESTIMATE)}

    def exchange_(self, flat: Tensor) -> None:
        """Set the gradient to the sum of the workers' mended estimates."""
        estimate, last, total = (self.state.memory[key] for key in (ESTIMATE, LAST, SUM))
        if steps_taken(self.context) == 0:
            estimate.copy_(flat)
            last.copy_(flat)
            self.link.reduce_(flat)
            total.copy_(flat)
            return
        if self.options.average < 1:
            flat.lerp_(last, 1 - self.options.average)
        change = torch.linalg.vector_norm(last.sub_(flat), dtype=torch.float64).square()
        last.copy_(flat)
        count = self.choose_(torch.sub(flat, estimate, out=self.state.scratch), ZETA * change)
        estimate.index_add_(0, self.places[:count], self.sent.values[:count])
        self.sent.add_to_(total, count)
        flat.copy_(total)

    def choose_(self, difference: Tensor, bound: Tensor) -> int:
        """Make ready the elements of `difference` that go; return how many, and leave `places`.

        They are those of the coarsest level that leaves no more than `bound`, a sum of squares.
        """
        sent, places, counts = self.sent, self.places, self.counts
        torch.abs(difference, out=self.magnitudes)
        torch.topk(self.magnitudes, counts[-1], out=(self.largest, places))
        squares = self.largest.double().square_().cumsum_(0)
        whole = torch.linalg.vector_norm(difference, dtype=torch.float64).square()
        ends = torch.tensor(counts, device=squares.device) - 1
        left = torch.cat([whole.view(1), whole - squares[ends]])
        # A NaN is below nothing: all that can be sent is.
        fits = (left <= bound).tolist()
        count = next((n for n, fit in zip([0, *counts], fits, strict=True) if fit), counts[-1])
        torch.index_select(difference, 0, places[:count], out=sent.values[:count])
        sent.positions[:count].copy_(places[:count])
        return count

    @staticmethod
    def metadata_bytes(settings: Settings, state: State, payload: int, rounds: int) -> int:
        """Return how many bytes are positions; the first step is dense."""
        size, steps = state.theta.element_size(), state.position.steps_done
        others = state.layout.numel * size + (steps - 1) * COUNT_BYTES
        return sparse.position_bytes(payload - others, size)

    @staticmethod
    def payload(settings: Settings, layout: Layout, size: int, workers: int) -> tuple[int, str]:
        counts = counts_of(layout.numel)
        levels = ", ".join(f"{count:,}" for count in counts)
        how = f"at most: 0, {levels} values and positions; the first step dense"
        pairs = counts[-1] * (size + sparse.POSITION_BYTES)
        return pairs + COUNT_BYTES, f"{how}, {settings.aggregation}"


def counts_of(numel: int) -> list[int]:
    """Return how many elements each level sends, ascending."""
    return [sparse.share_of(numel, level) for level in LEVELS]
