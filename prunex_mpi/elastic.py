"""Keep a run going where hosts come and go: `python -m prunex_mpi.elastic [flags] -- mpirun ...`.

It starts the job, and starts it again on the hosts that are left whenever one is lost. It is one
process that knows neither MPI nor torch. Signals are handled before anything is imported that takes
time.
"""

import sys
from collections.abc import Sequence

from prunex_mpi.base.signals import asked_to_end


def main(argv: Sequence[str] | None = None) -> int:
    """Keep the run going and return its exit code."""
    with asked_to_end() as asked:
        from prunex_mpi.base.errors import FAILURE, UserError
        from prunex_mpi.base.single_process import open_closed_streams, say_error
        from prunex_mpi.run.relaunch import NAME, keep_going, parse

        open_closed_streams()
        try:
            return keep_going(parse(sys.argv[1:] if argv is None else argv), asked)
        except UserError as error:
            say_error(NAME, error)
            return error.exit_code
        except OSError as error:
            say_error(NAME, UserError(str(error), FAILURE))
            return FAILURE


if __name__ == "__main__":
    sys.exit(main())
