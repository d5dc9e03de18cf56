"""How a tensor that one step hands to the next is declared: once, where it is allocated.

| owner | who holds it           | who writes it in a checkpoint |
|-------|------------------------|-------------------------------|
| RANK  | each rank its own      | each rank                     |
| NODE  | the ranks of a node    | leaders                       |
| ALL   | all ranks, bit for bit | world rank 0                  |

On the same nodes all of it is put back bit for bit (on the CPU). On other nodes a run goes on from
what the ranks have in common, by `elsewhere`:

| elsewhere | the tensor is then                                                             |
|-----------|--------------------------------------------------------------------------------|
| FIRST     | world rank 0's                                                                 |
| MEAN      | the mean over all ranks, as of squares of gradients                            |
| SUM       | a share by weight of the sum over all ranks, as of gradients not sent yet      |
| TOTAL     | the sum over all ranks of the tensor named by `of`                             |
| FROM_Z    | z                                                                              |
| ZERO      | 0: duals begin anew, so that sum_i P_i v_i = 0                                 |

When channels leave the network, `cut` says what becomes of it: vectors of PARAMETERS are cut,
STATISTICS of BatchNorm too, a MESSAGE is compact already; what has no size of the network's
(ITSELF) stays as it is.
"""

from collections.abc import ItemsView
from typing import NamedTuple

from torch import Tensor

RANK, NODE, ALL = "rank", "node", "all"
FIRST, MEAN, SUM, TOTAL, FROM_Z, ZERO = "first", "mean", "sum", "total", "from z", "zero"
PARAMETERS, STATISTICS, MESSAGE, ITSELF = "parameters", "statistics", "message", "itself"


class Lasting(NamedTuple):
    """A tensor, no copy: who owns it, what becomes of it elsewhere and when channels leave."""

    tensor: Tensor
    owner: str
    elsewhere: str
    cut: str = ITSELF
    of: str = ""

    def is_written(self, leader: bool, first: bool) -> bool:
        """Return whether a `leader`, the `first` of all ranks or another one writes it."""
        return first or self.owner == RANK or (self.owner == NODE and leader)


def summed(tensor: Tensor) -> Lasting:
    """Declare this rank's part of a sum over all ranks, such as a residual; of theta's dtype."""
    return Lasting(tensor, RANK, SUM)


def shared(tensor: Tensor, cut: str = ITSELF) -> Lasting:
    """Declare what is the same on all ranks that use it, of any dtype."""
    return Lasting(tensor, ALL, FIRST, cut)


Declared = dict[str, Lasting]


class Memory:
    """What methods, scores and evaluation remember: tensors by name, and how each is declared."""

    def __init__(self, declared: Declared) -> None:
        self._declared = dict(declared)

    def __getitem__(self, name: str) -> Tensor:
        return self._declared[name].tensor

    def __contains__(self, name: str) -> bool:
        return name in self._declared

    def items(self) -> ItemsView[str, Lasting]:
        """Return names and declarations."""
        return self._declared.items()

    def declare(self, declared: Declared) -> None:
        """Take in more tensors, in place of those of the same names."""
        self._declared |= declared
