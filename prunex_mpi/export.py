"""Write the physically smaller network of a run: `python -m prunex_mpi.export RUN`.

RUN/model then holds model.safetensors, plan.json and load_model.py, which loads them with nothing
but torch, torchvision and safetensors. No MPI is started, and torch is loaded after the flags are
parsed.
"""

import sys
from collections.abc import Sequence

from prunex_mpi.base.single_process import run_single_process
from prunex_mpi.tools.export_options import Options, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Export a run and return the exit code."""
    return run_single_process("prunex_mpi.export", parse, export, argv)


def export(options: Options) -> None:
    """Read the run, take out what can go, write and prove it."""
    from prunex_mpi.tools.export_run import export

    export(options)


if __name__ == "__main__":
    sys.exit(main())
