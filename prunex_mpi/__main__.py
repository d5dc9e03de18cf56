"""Name the programs of the package: `python -m prunex_mpi`."""

import sys

from prunex_mpi import __version__
from prunex_mpi.base.errors import USAGE

PROGRAMS = {
    "train": "train a network on several ranks and prune it while it trains",
    "elastic": "start training again on the hosts that are left when one is lost",
    "doctor": "tell whether and how well a job would train, before it does",
    "bench": "measure what training costs; compare trains with one method after the other",
    "export": "write the smaller network of a run, proven and measured",
    "evaluate": "tell loss and accuracy of a run's or an exported network, of each class too",
    "report": "show what happened in runs on one page with pictures",
}


def main() -> int:
    """Print a line for each program and return the exit code; refuse what is meant for one."""
    meant = [word for word in sys.argv[1:] if word not in ("-h", "--help", "--version")]
    if meant:
        name = meant[0] if meant[0] in PROGRAMS else "PROGRAM"
        line = f"prunex_mpi takes no arguments: start a program as python -m prunex_mpi.{name}"
        print(f"prunex_mpi: error: {line}", file=sys.stderr)
        return USAGE
    print(f"prunex_mpi {__version__}: data-parallel training that prunes, over MPI\n")
    for name, what in PROGRAMS.items():
        print(f"  python -m prunex_mpi.{name:<8}  {what}")
    print("\nEach of them tells its flags with --help.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
