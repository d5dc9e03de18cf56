"""Keep a run going where hosts come and go: `python -m prunex_mpi.elastic [flags] -- mpirun ...`.

It starts the job, and starts it again on the hosts that are left whenever one is lost. It is one
process that knows neither MPI nor torch. Signals are handled before anything is imported that takes
time.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence

from prunex_mpi.base.signals import asked_to_end


def main(argv: Sequence[str] | None = None) -> int:
    """Keep the run going and return its exit code."""
    with asked_to_end() as asked:
        from prunex_mpi.base.errors import FAILURE, UserError
        from prunex_mpi.run.program import run_single_process
        from prunex_mpi.run.relaunch import NAME, keep_going, parse

        def keep(options: Namespace) -> int:
            try:
                return keep_going(options, asked)
            except OSError as error:
                raise UserError(str(error), FAILURE) from None

        return run_single_process(NAME, parse, keep, argv)


if __name__ == "__main__":
    sys.exit(main())
