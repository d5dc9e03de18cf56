"""What every method keeps to, so that checkpoints and mixed precision do right by it."""

import pytest
import torch
from nets import new_net

from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.core.state import EACH, OWN, SHARED
from prunex_mpi.methods.declared import METHODS
from prunex_mpi.methods.exchanges import memory_of
from prunex_mpi.models.layout import build_layout


def remembered(method: str, **changes: object) -> dict[str, torch.Tensor]:
    """Return what a method remembers of a small network in float64."""
    layout = build_layout(new_net())
    theta = torch.zeros(layout.numel, dtype=torch.float64)
    return memory_of(make(method=method, **changes), layout, theta)


@pytest.mark.parametrize("method", [m.name for m in METHODS])
def test_what_is_remembered_says_whose_it_is(method: str) -> None:
    """A name of no kind would pass for what all ranks share: the first rank's alone is kept."""
    for name, tensor in remembered(method).items():
        assert name.startswith((OWN, EACH, SHARED)), f"{name}: begin with {OWN}, {EACH} or {SHARED}"
        assert tensor.is_contiguous(), name
        assert not name.startswith(OWN) or tensor.dtype == torch.float64, name


# What is kept of gradients, or of estimates of them.
PER_STEP = [method.name for method in METHODS if method.per_step]
KEEPING = [m for m in PER_STEP if any(name.startswith((OWN, EACH)) for name in remembered(m))]


@pytest.mark.parametrize("method", KEEPING)
def test_what_workers_keep_of_gradients_is_not_for_float16(method: str) -> None:
    """A step whose gradient overflows is left out, but not what it has left in a memory."""
    with pytest.raises(UserError, match="amp fp16"):
        make(method=method, amp="fp16")
