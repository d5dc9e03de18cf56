"""The training methods: each declared once, with its own options, in one visible tuple.

Whoever adds one declares it here; its code is in a file of this folder (`exchanges.py`). Free of
torch and MPI, since flags are read before either is loaded.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from prunex_mpi.base.errors import UserError
from prunex_mpi.settings.fields import Settings, key_of
from prunex_mpi.settings.method import Method, NoOptions
from prunex_mpi.settings.values import AUTO, option

# From this keep ratio on PacTrain's score `auto` is magnitude.
GRASP_BELOW = 0.3

# --------------------------------------------------------------------------------------------------
# H-SADMM
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrunexOptions:
    duals: bool = option(
        "pull theta and z together by duals and penalties; without, masks are chosen of averages, "
        "as in gradual magnitude pruning",
        True,
    )


def check_prunex(settings: Settings) -> None:
    """Refuse what is a matter of duals, or of where each rank is, in a run without them."""
    if settings.options.duals:
        return
    for name, other in {
        "after_freeze": "local-sgd",
        "penalty": "fixed",
        "residuals": "off",
        "theta_start": "z",
        "weight_decay_in": "theta",
        "mask_agreement": "vote",
    }.items():
        if (value := getattr(settings, name)) != other:
            key = key_of(name)
            raise UserError(f"{key} {value} needs duals: give --{key} {other}, or --prunex-duals")


PRUNEX = Method(
    name="prunex",
    help="H-SADMM: prunes the consensus of each node before it leaves the node",
    kind="consensus",
    options=PrunexOptions,
    check=check_prunex,
    prunes="groups",
)


def check_prunex_flat(settings: Settings) -> None:
    """Refuse nodes of several ranks."""
    if settings.ranks_per_node > 1:
        raise UserError(
            f"ranks-per-node {settings.ranks_per_node}: with prunex-flat every rank is a node of "
            "its own; leave it away"
        )


PRUNEX_FLAT = Method(
    name="prunex-flat",
    help="ADMM without nodes: every rank sends all, pruned once all are added up",
    kind="flat consensus",
    check=check_prunex_flat,
    prunes="groups",
)

# --------------------------------------------------------------------------------------------------
# Local training, parameters averaged once per outer iteration
# --------------------------------------------------------------------------------------------------


def _local(name: str, help: str, options: type = NoOptions, **traits: Any) -> Method:
    return Method(name=name, help=help, kind="local", options=options, **traits)


LOCAL_SGD = _local(
    "local-sgd",
    "local SGD: parameters averaged once per outer iteration",
    defaults={"bn": "average"},
)


@dataclass(frozen=True)
class DilocoOptions:
    outer_lr: float = option("learning rate of the step between nodes", 0.7, above=0)
    outer_momentum: float = option("Nesterov momentum of that step", 0.9, low=0, below=1)
    outer_warmup: int = option(
        "outer iterations over which that momentum rises from 0, a count or a share",
        0,
        low=0,
        share=True,
    )
    alpha: float = option(
        "weight of local parameters where z arrives late; auto: z plus what late steps did",
        AUTO,
        low=0,
        high=1,
        auto=True,
    )


DILOCO = _local(
    "diloco",
    "local SGD whose mean change is a step with Nesterov momentum",
    DilocoOptions,
    defaults={"inner_momentum": "reset"},
)


@dataclass(frozen=True)
class QsrOptions:
    alpha: float = option(
        "exchange after (alpha / learning rate)^2 steps, where these are more than local-steps",
        0.2,
        above=0,
    )


QSR = _local(
    "qsr",
    "local SGD whose interval grows as the learning rate falls",
    QsrOptions,
    quadratic_interval=True,
)


@dataclass(frozen=True)
class SparselocoOptions:
    ratio: float = option(
        "share of each 4,096 parameters whose change travels", 1 / 64, above=0, high=1
    )
    outer_lr: float = option("learning rate of the step between nodes", 1.0, above=0)


SPARSELOCO = _local(
    "sparseloco",
    "local SGD that sends the largest changes, 2 bits each",
    SparselocoOptions,
    own_exchange=True,
)


@dataclass(frozen=True)
class OneShotOptions:
    prune_iteration: int = option(
        "outer iteration whose end prunes, a count or a share", Fraction(1, 2), share=True
    )


def check_one_shot(settings: Settings) -> None:
    """Refuse to prune at an iteration that does not come."""
    if not 1 <= settings.options.prune_iteration <= settings.outer_iterations:
        raise UserError(
            f"one-shot.prune-iteration {settings.options.prune_iteration} must be from 1 to the "
            f"{settings.outer_iterations} outer-iterations"
        )


ONE_SHOT = _local(
    "one-shot",
    "local SGD, pruned at the end of one outer iteration",
    OneShotOptions,
    check=check_one_shot,
    prunes="groups",
)

# --------------------------------------------------------------------------------------------------
# Gradients exchanged at each step
# --------------------------------------------------------------------------------------------------


def _per_step(name: str, help: str, options: type = NoOptions, **traits: Any) -> Method:
    traits = {"kind": "per step", "own_exchange": True, **traits}
    return Method(name=name, help=help, options=options, **traits)


DENSE = _per_step("dense", "synchronous SGD: every gradient travels whole", overflow_safe=True)

FP16 = _per_step("fp16", "gradients travel as float16", overflow_safe=True)

BF16 = _per_step("bf16", "gradients travel as bfloat16", overflow_safe=True)


@dataclass(frozen=True)
class TopkOptions:
    ratio: float = option("share of each layer's gradient that travels", 0.01, above=0, high=1)


TOPK = _per_step("topk", "the largest elements of each gradient, with error feedback", TopkOptions)


@dataclass(frozen=True)
class DgcOptions:
    ratio: float = option(
        "share of each layer's gradient that travels, after the warm-up", 0.001, above=0, high=1
    )
    warmup_epochs: Fraction = option(
        "epochs in which the share falls by the same factor each, to the ratio after them; auto: "
        "4, or 1/40 of the run where that is less",
        AUTO,
        low=0,
        auto=True,
    )


DGC = _per_step(
    "dgc",
    "deep gradient compression: elements above a threshold, momentum corrected",
    DgcOptions,
    momentum_in="workers",
)


@dataclass(frozen=True)
class PowersgdOptions:
    rank: int = option("rank of the approximation of each gradient matrix", 2, low=1)


POWERSGD = _per_step(
    "powersgd", "low-rank factors of each gradient, with error feedback", PowersgdOptions
)


@dataclass(frozen=True)
class DionOptions:
    rank_ratio: float = option(
        "rank of an update as a fraction of the shorter side of its matrix", 0.25, above=0, high=1
    )


def check_dion(settings: Settings) -> None:
    if settings.optimizer != "muon":
        raise UserError(
            f"optimizer {settings.optimizer}: dion takes the place of Muon, and AdamW steps all "
            "else; leave it away"
        )


DION = _per_step(
    "dion",
    "low-rank factors of the orthonormal step of Muon, with error feedback",
    DionOptions,
    defaults={"optimizer": "muon"},
    check=check_dion,
    momentum_in="update",
)


@dataclass(frozen=True)
class OmnireduceOptions:
    block_size: int = option("elements of a block that travels or not", 256, low=1)
    block_ratio: float = option(
        "share of its blocks that a worker sends, those of largest norm; 1: all that are not zero",
        0.01,
        above=0,
        high=1,
    )


OMNIREDUCE = _per_step(
    "omnireduce", "blocks of the gradient, those of largest norm", OmnireduceOptions
)


@dataclass(frozen=True)
class SpardlOptions:
    ratio: float = option("share of each worker's block that travels", 0.01, above=0, high=1)


SPARDL = _per_step(
    "spardl", "sums of the largest elements, by shares that stay sparse", SpardlOptions
)

TERNGRAD = _per_step("terngrad", "gradients as -1, 0 or 1 times a shared scale")

LION = _per_step(
    "lion",
    "Distributed Lion: workers vote for signs",
    defaults={"lr": 0.001, "weight_decay": 0.05},
    momentum_in="fixed",
)


@dataclass(frozen=True)
class AdacgdOptions:
    average: float = option(
        "weight of a new gradient in the average that a worker compresses; 1: the gradient alone",
        1.0,
        above=0,
        high=1,
    )


ADACGD = _per_step(
    "adacgd", "adaptive compression: each worker sends as much as its estimate needs", AdacgdOptions
)


@dataclass(frozen=True)
class PrunetrainOptions:
    lasso_ratio: float = option(
        "share of the first batch's loss, penalty included, that the group lasso makes up",
        0.25,
        above=0,
        below=1,
    )
    reconfigure_every: int = option("outer iterations between removals of channels", 8, low=1)
    threshold: float = option("largest weight of a channel that is removed", 1e-4, above=0)


def check_prunetrain(settings: Settings) -> None:
    """Refuse an interval in which nothing would be removed, and compiled models."""
    if settings.compile:
        raise UserError("compile: prunetrain changes the model too often; leave it away")
    if settings.options.reconfigure_every > settings.outer_iterations:
        raise UserError(
            f"prunetrain.reconfigure-every {settings.options.reconfigure_every} is more than the "
            f"{settings.outer_iterations} outer-iterations, so that nothing would be removed; "
            "lower it"
        )


PRUNETRAIN = _per_step(
    "prunetrain",
    "group lasso; emptied channels are taken out of the network",
    PrunetrainOptions,
    check=check_prunetrain,
    prunes="channels",
    overflow_safe=True,
)


@dataclass(frozen=True)
class PactrainOptions:
    prune_iteration: int = option(
        "outer iteration whose end prunes, a count or a share; 0: before the first",
        Fraction(0),
        share=True,
    )
    score: str = option(
        f"score that decides which weights go; auto: grasp below a keep ratio of {GRASP_BELOW}, "
        "else magnitude",
        "auto",
        choices=("auto", "grasp", "magnitude"),
    )
    stable_window: int = option(
        "steps with an unchanged support after which a bucket travels compacted", 10, low=1
    )
    ternary: bool = option("send -1, 0 or 1 times a shared scale", False)


def check_pactrain(settings: Settings) -> None:
    """Refuse ratios of groups, and to prune at an iteration that does not come."""
    own, ratios = settings.options, settings.keep_ratio
    if len(ratios) != 1:
        raise UserError(
            f"keep-ratio has {len(ratios)} values; pactrain prunes single weights, not groups: "
            "give one"
        )
    if own.prune_iteration > settings.outer_iterations:
        raise UserError(
            f"pactrain.prune-iteration {own.prune_iteration} must be from 0 to the "
            f"{settings.outer_iterations} outer-iterations"
        )
    if own.ternary and settings.amp == "fp16":
        raise UserError("amp fp16: the scale of pactrain.ternary must not overflow; use bf16")


@dataclass(frozen=True)
class ClicktrainOptions:
    choose_iteration: int = option(
        "outer iterations before the batch that chooses kernels and patterns, a count or a share",
        Fraction(1, 3),
        share=True,
    )
    prune_iteration: int = option(
        "outer iteration whose end prunes what was not chosen, a count or a share",
        Fraction(3, 4),
        share=True,
    )
    lasso: float = option("coefficient of the group lasso on it until then", 2.5e-4, low=0)


def check_clicktrain(settings: Settings) -> None:
    """Refuse several ratios, and to choose or to prune when it can't be."""
    own, outer = settings.options, settings.outer_iterations
    if len(settings.keep_ratio) != 1:
        raise UserError(
            f"keep-ratio has {len(settings.keep_ratio)} values; that of clicktrain is of kernels: "
            "give one"
        )
    if not own.choose_iteration < own.prune_iteration <= outer:
        raise UserError(
            f"clicktrain.choose-iteration {own.choose_iteration} must be less than "
            f"clicktrain.prune-iteration {own.prune_iteration}, and that at most the {outer} "
            "outer-iterations"
        )


def check_hierarchical(settings: Settings) -> None:
    """Refuse gradients that all ranks send."""
    if settings.aggregation == "flat":
        raise UserError(
            f"aggregation flat: with {settings.method.name} one leader speaks for each node; leave "
            "it away, or make every rank a node with ranks-per-node 1"
        )


GOSSIP = _per_step(
    "gossip",
    "GossipGraD: each node averages its gradient with that of one other at a time",
    defaults={"aggregation": "hierarchical"},
    check=check_hierarchical,
)

PARALLAX = _per_step(
    "parallax",
    "Parallax: of embeddings the rows that a batch touches, all else dense",
    defaults={"aggregation": "hierarchical"},
    check=check_hierarchical,
    overflow_safe=True,
)

EMBRACE = _per_step(
    "embrace",
    "EmbRace: of embeddings the rows that a batch touches, by columns, all else dense",
    overflow_safe=True,
)

CLICKTRAIN = _per_step(
    "clicktrain",
    "ClickTrain: kernels and patterns of them, chosen by one batch and pruned later",
    ClicktrainOptions,
    check=check_clicktrain,
    prunes="kernels",
)

PACTRAIN = _per_step(
    "pactrain",
    "pruned weights, and gradients whose sparsity all workers know",
    PactrainOptions,
    check=check_pactrain,
    prunes="weights",
    overflow_safe=True,
)

METHODS = (
    *(PRUNEX, PRUNEX_FLAT),
    *(DENSE, TOPK, DGC, POWERSGD, DION, OMNIREDUCE, FP16, BF16),
    *(TERNGRAD, LION, ADACGD, PRUNETRAIN, PACTRAIN, CLICKTRAIN),
    *(SPARDL, GOSSIP, PARALLAX, EMBRACE),
    *(LOCAL_SGD, DILOCO, QSR, SPARSELOCO, ONE_SHOT),
)
# Where an optimizer's defaults are not those of SGD: rates of another size, and what goes by them.
_ADAMW = {"lr": 0.001, "weight_decay": 0.05, "qsr_alpha": 0.001, "inner_momentum": "keep"}
OPTIMIZER_DEFAULTS = {"adamw": _ADAMW, "muon": {**_ADAMW, "momentum": 0.95}}
