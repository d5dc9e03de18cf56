"""The mean of all ranks' BatchNorm statistics, about a reference that they share."""

from prunex_mpi.comm.counted import CountedComm, CountedComms
from prunex_mpi.core.state import KNOWN, State
from prunex_mpi.models import batchnorm


def find_reference_(comms: CountedComms, state: State) -> None:
    """Have a first reference, the plain mean of all ranks, if there is none yet.

    In float32: what is far from its reference cannot be sent in fewer bits. Collective on `world`,
    or on `node` and `leader`.
    """
    if state.position.has_reference or not state.bn_modules:
        return
    known = state.memory[KNOWN]
    batchnorm.read_plain_(state.bn_modules, known)
    if not state.alone:
        comms.sum_(known, kind="setup")
        known.div_(comms.everyone.comm.size)
    state.position.has_reference = True


def average_in_node_(node: CountedComm, state: State) -> None:
    """Leave the node's mean statistics, about the reference, in `stats`. Collective on `node`."""
    batchnorm.read_(state.bn_modules, state.stats, state.memory[KNOWN])
    node.reduce_(state.stats)
    state.stats.div_(node.comm.size)


def average_statistics(comms: CountedComms, state: State) -> None:
    """Set the statistics of the model, and the reference, to the mean of all ranks.

    A rank that is `alone` keeps its own, bit for bit. Collective on `world`, or on `node` and
    `leader`.
    """
    find_reference_(comms, state)
    known, modules = state.memory[KNOWN], state.bn_modules
    if state.alone:
        batchnorm.read_plain_(modules, state.stats)
    else:
        batchnorm.read_(modules, state.stats, known)
        comms.sum_(state.stats)
        state.stats.div_(comms.everyone.comm.size)
        batchnorm.as_plain_(modules, state.stats, known)
        batchnorm.write_plain(modules, state.stats)
    known.copy_(state.stats)
