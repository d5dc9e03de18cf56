"""Write the physically smaller network of a run: `python -m prunex_mpi.export RUN`.

RUN/model then holds model.safetensors, plan.json and load_model.py, which loads them with nothing
but torch, torchvision and safetensors. No MPI is started, and torch is loaded after the flags are
parsed.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prunex_mpi.base.single_process import run_single_process
from prunex_mpi.tools.export_options import Options, parse

if TYPE_CHECKING:
    from torch import Tensor, nn


def main(argv: Sequence[str] | None = None) -> int:
    """Export a run and return the exit code."""
    return run_single_process("prunex_mpi.export", parse, export, argv)


def export(options: Options) -> None:
    """Read the run, take out what can go, write and prove it."""
    from prunex_mpi.tools.export_run import export

    export(options)


def smaller(model: "nn.Module", images: "Tensor") -> "nn.Module":
    """Return a copy of a masked model without what its masks removed, see tools/export_run.py.

    `images`, float [n, 3, S, S], are such as it is made for: what stays constant on them can go.
    """
    from prunex_mpi.tools.export_run import smaller

    return smaller(model, images)


if __name__ == "__main__":
    sys.exit(main())
