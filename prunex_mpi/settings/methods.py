"""The training systems that `--method` chooses from, by family, and what is different for each."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from prunex_mpi.settings.values import AUTO

# The methods by family, which is the driver that runs them.
CONSENSUS = ("prunex", "prunex-flat")
LOCAL = ("local-sgd", "diloco", "qsr", "sparseloco", "one-shot")
PER_STEP = (
    *("dense", "topk", "dgc", "powersgd", "omnireduce", "fp16", "bf16"),
    *("terngrad", "lion", "adacgd", "prunetrain", "pactrain"),
)
METHODS = (*CONSENSUS, *PER_STEP, *LOCAL)
# Those whose nodes exchange parameters once per outer iteration.
BY_ITERATION = (*CONSENSUS, *LOCAL)
# Those of them that send what they have changed of the parameters, a few values of many: they run
# by `methods/sparseloco.py`.
SPARSE = ("sparseloco",)
# The others, whose message is the parameters in the format of `--payload`.
AVERAGING = tuple(method for method in BY_ITERATION if method not in SPARSE)
# Those whose interval between exchanges follows from the learning rate.
QUADRATIC = ("qsr",)
# Those of them whose payload is smaller once pruning is done.
SHRINKING = ("prunex", "one-shot")
# Those of PER_STEP that keep nothing of a gradient, nor scale others by it: where it overflows in
# float16, the step is left out and all is as before.
SPARED_BY_OVERFLOW = ("dense", "fp16", "bf16", "prunetrain", "pactrain")
# Those whose step takes the mean gradient as it is.
PLAIN_MEAN = ("dense", "prunetrain")
# Those whose momentum is inside what the workers send, and those of them that decay weights there.
OWN_MOMENTUM = ("dgc", "lion")
OWN_DECAY = ("dgc",)
# Those whose steps, local or of the mean gradient, an optimizer of torch's takes.
WITH_OPTIMIZER = tuple(method for method in METHODS if method not in OWN_MOMENTUM)
# Those whose momentum is `--momentum`.
WITH_MOMENTUM = tuple(method for method in METHODS if method != "lion")
# Those that prune the groups of `--groups`.
BY_GROUPS = (*CONSENSUS, "one-shot")
# Those that prune at the end of one outer iteration.
PRUNING_ONCE = ("one-shot",)
# Those that take coupled channels out of the network while they train it.
REMOVING = ("prunetrain",)
# Those without leaders: every rank is a node of its own, and nothing is left out of a message.
EVERY_RANK_ALONE = ("prunex-flat",)
# Where a method's own default is not the one that its setting has.
METHOD_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # By the length of the run; the files of all other methods go on naming another default.
    "dgc": {"compress_ratio": 0.001, "dgc_warmup_epochs": AUTO},
    "diloco": {"inner_momentum": "reset"},
    "local-sgd": {"bn": "average"},
    "sparseloco": {
        "compress_ratio": 1 / 64,
        "outer_lr": 1.0,
        "payload": "fp32",
        "overlap_steps": 0,
    },
    # What arrives is still to be pruned: no rank could go on training before.
    "prunex-flat": {"overlap_steps": 0},
    "lion": {"lr": 0.001, "weight_decay": 0.05},
    "pactrain": {"prune_iteration": Fraction(0)},
}
# And where an optimizer's is not that of SGD: rates of another size, and what goes by them.
OPTIMIZER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"lr": 0.001, "weight_decay": 0.05, "qsr_alpha": 0.001},
}
# And where a method's is not the one that it has with other presets.
PRESET_DEFAULTS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    # Trained weights say at once what counts, and all of the run is left to heal.
    ("finetune", "one-shot"): {"prune_iteration": Fraction(1)},
    # These take nothing out, and choose by what all ranks know.
    **{
        ("small", method): {"remove_dropped": False, "score": "magnitude"}
        for method in METHODS
        if method not in SHRINKING
    },
}
