"""Write the physically smaller network of a run: `python -m prunex_mpi.export RUN`.

RUN/model then holds model.safetensors, plan.json and load_model.py, which loads them with nothing
but torch, torchvision and safetensors. No MPI is started, and torch is loaded after the flags are
parsed.
"""

import sys
from collections.abc import Sequence

from prunex_mpi.base.errors import UserError
from prunex_mpi.tools.export.options import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Export a run and return the exit code."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        from prunex_mpi.tools.export.export import export

        export(options)
    except UserError as error:
        # One line, whatever a name of the user's holds.
        line = " ".join(str(error).split())
        print(f"prunex_mpi.export: error: {line}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
