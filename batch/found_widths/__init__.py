"""The widths that a run found, with fresh weights: `--model batch.found_widths:slim`.

The run is the row "prunex, widths found" of batch/plan_linux_doc_small.toml with learning rate
0.016 and seed 7; plan.json is what its export wrote.
"""

from pathlib import Path

from torch import nn

from prunex_mpi.models.build import fresh


def slim(**sizes: int) -> nn.Module:
    """Return gpt_nano-w64 cut to 61,642 parameters, of `sizes` of inputs, with fresh weights."""
    return fresh(Path(__file__).parent, **sizes)
