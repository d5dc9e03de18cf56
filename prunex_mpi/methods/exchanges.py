"""Which exchange a method has, and what is asked of any method before it trains."""

from prunex_mpi.core.exchange import outer_memory
from prunex_mpi.core.mask_choice import memory_of_scores
from prunex_mpi.core.memory import Declared
from prunex_mpi.core.state import State
from prunex_mpi.methods.adacgd import AdaCgd
from prunex_mpi.methods.clicktrain import ClickTrain
from prunex_mpi.methods.dgc import Dgc
from prunex_mpi.methods.dion import Dion
from prunex_mpi.methods.embeddings import EmbRace, Parallax
from prunex_mpi.methods.exchange import Dense, Exchange
from prunex_mpi.methods.gossip import Gossip
from prunex_mpi.methods.half import Bf16, Fp16
from prunex_mpi.methods.lion import Lion
from prunex_mpi.methods.omnireduce import OmniReduce
from prunex_mpi.methods.pactrain import PacTrain
from prunex_mpi.methods.powersgd import PowerSgd
from prunex_mpi.methods.prunetrain import PruneTrain
from prunex_mpi.methods.spardl import SparDl
from prunex_mpi.methods.sparseloco import SparseLoco
from prunex_mpi.methods.terngrad import TernGrad
from prunex_mpi.methods.topk import TopK
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.method import Method

EXCHANGES: dict[str, type[Exchange]] = {
    "dense": Dense,
    "topk": TopK,
    "dgc": Dgc,
    "powersgd": PowerSgd,
    "dion": Dion,
    "omnireduce": OmniReduce,
    "fp16": Fp16,
    "bf16": Bf16,
    "terngrad": TernGrad,
    "lion": Lion,
    "adacgd": AdaCgd,
    "prunetrain": PruneTrain,
    "pactrain": PacTrain,
    "clicktrain": ClickTrain,
    "spardl": SparDl,
    "gossip": Gossip,
    "parallax": Parallax,
    "embrace": EmbRace,
    "sparseloco": SparseLoco,
}


def exchange_of(method: Method) -> type[Exchange]:
    """Return the class of a method's own exchange; the base where it averages parameters."""
    return EXCHANGES[method.name] if method.own_exchange else Exchange


def metadata_bytes(settings: Settings, state: State, counted: dict[str, int], rounds: int) -> int:
    """Return how many of a run's inter-node bytes, as `counted`, say where values belong."""
    statistics = rounds * state.stats.numel() * state.theta.element_size()
    pairs = counted["payload"] - statistics
    own = exchange_of(settings.method).metadata_bytes(settings, state, pairs, rounds)
    return counted["mask"] + own


def memory_of(settings: Settings, state: State) -> Declared:
    """Allocate what the method and its scores remember, as it is before the first step."""
    scores, theta = memory_of_scores(settings, state), state.theta
    if settings.method.outer_step:
        return outer_memory(theta) | scores
    return exchange_of(settings.method).memory(settings, state.layout, theta) | scores
