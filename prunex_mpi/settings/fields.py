"""Name the settings of a run: one frozen dataclass, whose fields carry the rules of their values.

Each value has one home. What describes the machine, the data and the output has its default
here; what makes up the training recipe has none here and is set by the preset file.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from prunex_mpi.settings.methods import (
    AVERAGING,
    BY_GROUPS,
    BY_ITERATION,
    CONSENSUS,
    LOCAL,
    METHODS,
    OWN_MOMENTUM,
    PER_STEP,
    QUADRATIC,
    REMOVING,
    SHRINKING,
    SPARSE,
    WITH_MOMENTUM,
    WITH_OPTIMIZER,
)

CROSS_ENTROPY = "cross-entropy"
PRESETS = ("recipe", "paper", "thin", "small", "finetune")
# From this keep ratio on `--prune-by auto` is magnitude.
GRASP_BELOW = 0.3
# As data/transforms.py has them.
TRANSFORMS = (
    *("trivial-augment", "rand-augment", "auto-augment", "aug-mix", "color-jitter", "grayscale"),
    *("gaussian-blur", "random-erasing"),
)
# Where prunex-flat has no nodes between ranks and z.
ONE_LEVEL = ("flat_consensus", "direct")
# How phase 4 sends: plain float32, other formats, or integers of so many bits with shared scales.
PAYLOADS = ("fp32", "fp16", "bf16", "int8", "int8sum", "int4", "int2")
# Stands in `dgc_clip` for runs of when dgc compressed other tensors and decayed weights elsewhere.
FORMER_DGC = -1.0
# Of which --dry-run estimates what exchanges take.
NODES = (2, 8, 64, 4096)
_NO_DEFAULT = dataclasses.MISSING


def _setting(section: str, text: str, default: Any = _NO_DEFAULT, **rules: Any) -> Any:
    """Make a field; `rules` are choices, low, high (inclusive), above, below, share, optional.

    `named` shows the form of what may be given beside the choices: what has a colon.
    With the rule `auto` a number may be left to the run, to be measured or to follow from its
    length, with `found` an empty value is filled in by the run. The rule `methods` names those
    that the setting has a meaning for: with any other it can't be given, nor can it with `unless`,
    the value of another setting of the method prunex-flat. `before` is what runs did before there
    was the setting, which their files do not name, and `past` another default of former days, which
    the files of all methods name. `joined` holds (methods, name of a later setting, value): what
    these methods did before the setting meant something to them, in runs whose files do not name
    the later one. `former` is the key by which older files name the setting.
    """
    return dataclasses.field(default=default, metadata={"section": section, "help": text, **rules})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Carry every setting of a run, checked and resolved.

    Field `a_b` is the flag `--a-b` and the TOML key `a-b`. Build one with `resolve.make`,
    `resolve.with_overrides` or `cli.parse`: these convert, check and resolve, the constructor does
    not.
    """

    _S = "what to train"
    preset: str = _setting(_S, "file of settings to start from", "recipe", choices=PRESETS)
    method: str = _setting(_S, "training system", "prunex", choices=METHODS)
    model: str = _setting(
        _S,
        "resnet20 (resnet20-w8: half as wide), resnet18, ..., a torchvision classifier, or "
        "package.module:factory",
        "resnet20",
    )
    stem: str = _setting(
        _S,
        "first layers of the torchvision ResNets; auto: cifar up to 64 pixels",
        "auto",
        choices=("auto", "cifar", "imagenet"),
    )
    seed: int = _setting(_S, "seed of weights, shuffles and augmentation", 0, low=0)
    init_from: str = _setting(
        _S,
        "trained weights to begin with: a file, the folder of a run, or torchvision for its own",
        "",
        before="",
        optional=True,
    )
    init_digest: str = _setting(
        _S,
        "SHA-256 that the file of --init-from must have; the run fills it in",
        "",
        before="",
        optional=True,
        found=True,
    )

    _S = "data"
    dataset: str = _setting(
        _S,
        "images to train on; digits needs no files, a function of yours makes what torch calls a "
        "map-style data set",
        "digits",
        choices=("digits", "cifar10", "cifar100", "imagefolder", "webdataset", "synthetic"),
        named="package.module:factory",
    )
    data_dir: str = _setting(_S, "folder of the data", "data")
    download: bool = _setting(_S, "fetch cifar10 or cifar100 when missing", False)
    train_samples: int = _setting(_S, "images of the training set to use, 0 for all", 0, low=0)
    test_samples: int = _setting(_S, "images of the test set to use, 0 for all", 0, low=0)
    val_share: float = _setting(
        _S,
        "share of the training images of each class to hold out: the best network by them is "
        "delivered, and tested once",
        0.0,
        before=0.0,
        low=0,
        below=1,
    )
    image_size: int = _setting(_S, "side in pixels, 0 for the data's own", 0, low=0, high=4096)
    image_mean: tuple[float, ...] = _setting(
        _S,
        "mean of red, green and blue, in 0..1, to normalise images by; none: that of --init-from, "
        "where a run or torchvision has trained it, else that of the data",
        (),
        before=(),
        optional=True,
        found=True,
    )
    image_std: tuple[float, ...] = _setting(
        _S, "standard deviation to go with it", (), before=(), optional=True, above=0, found=True
    )
    data_mode: str = _setting(
        _S,
        "decode image files into memory at the start, or while training; auto: while training "
        "where they would not fit into memory",
        "auto",
        before="auto",
        choices=("memory", "stream", "auto"),
    )
    data_workers: int = _setting(
        _S, "threads that decode, 0 for the rank's share of the cores", 0, before=0, low=0, high=256
    )
    data_cache: str = _setting(
        _S,
        "folder, best on a local disk, where decoded images are kept for later epochs and jobs",
        "",
        before="",
        optional=True,
    )
    skip_corrupt: bool = _setting(
        _S,
        "replace a damaged image file by the next one of its class, and count it in a warning",
        False,
        before=False,
    )
    normalise_samples: int = _setting(
        _S,
        "images of each rank that mean and deviation of the colours are taken from, 0 for all",
        16384,
        before=0,
        low=0,
    )
    augment: str = _setting(
        _S,
        "auto: crops of padded images, and flips; resized-crop: crops of any size, and flips",
        "auto",
        choices=("auto", "off", "resized-crop"),
    )
    transforms: tuple[str, ...] = _setting(
        _S,
        "transforms of torchvision v2 for training images, in this order",
        (),
        before=(),
        optional=True,
        choices=TRANSFORMS,
    )

    _S = "local training"
    outer_iterations: int = _setting(_S, "number of consensus rounds", low=1, high=10**6)
    local_epochs: Fraction = _setting(_S, "epochs per outer iteration, such as 5 or 1/4", low=0)
    local_steps: int = _setting(
        _S,
        "steps per outer iteration instead of epochs, 0 for off; auto: as --comm-share allows, "
        "where nodes exchange once per outer iteration (else epochs count)",
        low=0,
        auto=True,
    )
    frozen_local_steps: int = _setting(
        _S,
        "steps per outer iteration once pruning is done, 0 for as many as before",
        before=0,
        low=0,
        methods=SHRINKING,
    )
    comm_share: float = _setting(
        _S,
        "share of the time that phases 2 to 5 may take, for --local-steps auto",
        before=0.05,
        above=0,
        below=1,
        methods=BY_ITERATION,
    )
    batch_size: int = _setting(_S, "images per rank and step", low=1)
    lr: float = _setting(_S, "peak learning rate (adamw: 0.001)", above=0)
    lr_schedule: str = _setting(_S, "learning rate curve", choices=("constant", "cosine", "step"))
    lr_warmup: float = _setting(_S, "linear warm-up, as a fraction of all steps", low=0, below=1)
    lr_final: float = _setting(_S, "end of the cosine, as a fraction of lr", low=0, high=1)
    lr_restart: float = _setting(
        _S,
        "peak of a second course of the learning rate, once pruning is done, as a fraction of lr; "
        "0: one course for the whole run",
        0.0,
        before=0.0,
        low=0,
        methods=(*CONSENSUS, "one-shot"),
    )
    momentum: float = _setting(
        _S, "momentum of SGD, beta 1 of AdamW", low=0, below=1, methods=WITH_MOMENTUM
    )
    weight_decay: float = _setting(_S, "L2 penalty lambda (adamw, decoupled: 0.05)", low=0)
    optimizer: str = _setting(
        _S,
        "what takes the local steps, or those of the mean gradient",
        "sgd",
        before="sgd",
        choices=("sgd", "adamw"),
        methods=WITH_OPTIMIZER,
        former="inner-optimizer",
    )
    inner_momentum: str = _setting(
        _S,
        "what becomes of its momentum at an exchange (diloco: reset)",
        "keep",
        before="keep",
        choices=("keep", "reset"),
        methods=LOCAL,
    )
    lr_scaling: str = _setting(
        _S,
        "multiply lr by the number of ranks, or by its root",
        "off",
        before="off",
        choices=("off", "linear", "sqrt"),
        methods=tuple(method for method in METHODS if method not in QUADRATIC),
    )
    loss: str = _setting(
        _S,
        "cross-entropy, or package.module:function of outputs and labels",
        CROSS_ENTROPY,
        before=CROSS_ENTROPY,
    )
    teacher: str = _setting(
        _S,
        "trained network whose outputs are learned beside the labels: the folder of a run, or a "
        "file of weights of --model",
        "",
        before="",
        optional=True,
    )
    teacher_digest: str = _setting(
        _S,
        "SHA-256 that the file of --teacher must have; the run fills it in",
        "",
        before="",
        optional=True,
        found=True,
    )
    teacher_share: float = _setting(
        _S, "share of the loss that is the teacher's", 0.5, before=0.5, above=0, high=1
    )
    teacher_temperature: float = _setting(
        _S, "what both networks' outputs are divided by to compare them", 4.0, before=4.0, above=0
    )
    label_smoothing: float = _setting(
        _S, "share of each label that is spread over all classes", 0.0, before=0.0, low=0, below=1
    )
    mixup: float = _setting(
        _S,
        "mix images: alpha of the Beta distribution of shares, 0 for not",
        0.0,
        before=0.0,
        low=0,
    )
    cutmix: float = _setting(
        _S,
        "the same with a window of another image; with both a coin decides",
        0.0,
        before=0.0,
        low=0,
    )
    clip_norm: float = _setting(
        _S,
        "norm to which a step's gradient is clipped, 0 for not",
        0.0,
        before=0.0,
        low=0,
        methods=tuple(method for method in METHODS if method not in OWN_MOMENTUM),
    )
    ema: float = _setting(
        _S,
        "decay per outer iteration of the average of z that is evaluated and delivered, 0 for z "
        "itself",
        0.0,
        before=0.0,
        low=0,
        below=1,
    )
    accumulate: int = _setting(
        _S,
        "parts in which a step's batch goes through the network, for less memory",
        1,
        before=1,
        low=1,
        methods=tuple(method for method in METHODS if method not in REMOVING),
    )
    weight_decay_on: str = _setting(
        _S,
        "what it shrinks: all parameters, or weights without biases and BatchNorm, as in the paper",
        before="all",
        choices=("all", "weights"),
    )

    _S = "sparsity"
    groups: tuple[str, ...] = _setting(
        _S,
        "what is removed whole, composed in this order",
        choices=("filter", "channel", "shape", "coupled"),
        methods=BY_GROUPS,
    )
    keep_ratio: tuple[float, ...] = _setting(
        _S,
        "fraction of the groups to keep, one for all or one per group",
        above=0,
        high=1,
        methods=(*BY_GROUPS, "pactrain"),
    )
    layer_keep_ratio: tuple[str, ...] = _setting(
        _S,
        "PATTERN=RATIO for matching parameter names, for all groups; the last match wins",
        optional=True,
        methods=BY_GROUPS,
    )
    round_to: int = _setting(
        _S, "round kept groups up to a multiple of this", low=1, methods=BY_GROUPS
    )
    mask_agreement: str = _setting(
        _S,
        "how nodes agree on a mask",
        choices=("or", "vote"),
        methods=CONSENSUS,
        unless=ONE_LEVEL,
    )
    keep_by: str = _setting(
        _S,
        "what --keep-ratio is a fraction of: the groups of each layer or set, or, of coupled "
        "groups, all parameters or multiply-adds of the model",
        choices=("groups", "parameters", "multiply-adds"),
        methods=BY_GROUPS,
    )
    keep_floor: float = _setting(
        _S,
        "least fraction of the groups of each layer or set that a ratio of the model leaves",
        before=0.0,
        low=0,
        high=1,
        methods=BY_GROUPS,
    )
    score: str = _setting(
        _S,
        "what decides which groups are kept: their magnitude, or what training would feel of their "
        "loss, by gradients squared at each local step, of each weight (fisher) or of a factor on "
        "each channel (gates), or added up (taylor)",
        before="magnitude",
        choices=("magnitude", "fisher", "taylor", "gates"),
        methods=BY_GROUPS,
        unless=ONE_LEVEL,
    )
    dropped: str = _setting(
        _S,
        "groups that z drops before the masks freeze: cut from theta at once, or shrunk in it to "
        "nothing by the freeze, so that they may come back",
        "cut",
        before="cut",
        choices=("cut", "shrink"),
        methods=("prunex",),
    )
    coupled_through: str = _setting(
        _S,
        "what coupled groups are found through: all that is known, or plain: convolutions, linear "
        "layers and BatchNorm alone, and no LayerNorm, grouped convolutions or cut tensors",
        "all",
        before="plain",
        choices=("all", "plain"),
        methods=BY_GROUPS,
    )
    warmup_iterations: int = _setting(
        _S,
        "dense outer iterations at first, a count or a share such as 7/16",
        share=True,
        past=Fraction(7, 16),
        methods=CONSENSUS,
    )
    keep_ramp_iterations: int = _setting(
        _S,
        "outer iterations to reach the keep ratio, a count or a share",
        share=True,
        past=Fraction(2, 16),
        methods=CONSENSUS,
    )
    freeze_iteration: int = _setting(
        _S,
        "outer iteration that freezes the masks, a count or a share, 0 for never",
        share=True,
        past=Fraction(10, 16),
        methods=CONSENSUS,
    )
    freeze_drift: float = _setting(
        _S,
        "freeze once the fraction of changed groups is at most this; negative for never",
        methods=CONSENSUS,
    )
    freeze_window: int = _setting(
        _S, "outer iterations in a row for --freeze-drift", low=1, methods=CONSENSUS
    )
    after_freeze: str = _setting(
        _S, "training on the fixed support", choices=("local-sgd", "admm"), methods=CONSENSUS
    )
    remove_dropped: bool = _setting(
        _S,
        "take what is dropped out of the network itself once masks are final, so that steps cost "
        "less from then on (coupled groups)",
        before=False,
        methods=SHRINKING,
    )

    _S = "consensus"
    theta_start: str = _setting(
        _S, "start of each local phase", choices=("z", "theta"), methods=CONSENSUS
    )
    node_sync: str = _setting(
        _S,
        "average inside the node at each step or once per iteration",
        choices=("step", "outer"),
        methods=("prunex", *LOCAL),
    )
    flat_consensus: str = _setting(
        _S,
        "what ranks agree with: z itself, pruned once all are added up (the paper's Fig. 1b), or "
        "a z_i of each rank's own, pruned before, and those with z",
        "direct",
        before="two-level",
        choices=("direct", "two-level"),
        methods=("prunex-flat",),
    )
    weight_decay_in: str = _setting(
        _S,
        "weight decay in the local gradient or in the consensus (after a local-sgd freeze: theta)",
        choices=("theta", "z"),
        methods=CONSENSUS,
    )
    bn: str = _setting(
        _S,
        "BatchNorm statistics of z: averages, or estimated again: while pruning, and where nothing "
        "is pruned for each evaluation and in the end (local-sgd: average)",
        choices=("average", "recalibrate"),
        joined=((("local-sgd", "diloco"), "inner_momentum", "average"),),
        methods=(*CONSENSUS, *LOCAL),
    )

    _S = "exchange between nodes"
    payload: str = _setting(
        _S,
        "format of what leaders exchange; other than fp32: differences, with error feedback",
        before="fp32",
        choices=PAYLOADS,
        methods=AVERAGING,
    )
    overlap_steps: int = _setting(
        _S,
        "local steps that the exchange runs behind, 0 for none",
        before=0,
        low=0,
        auto=True,
        methods=AVERAGING,
        unless=ONE_LEVEL,
    )

    _S = "penalties and stopping"
    penalty: str = _setting(
        _S, "course of rho", choices=("fixed", "ramp", "balance"), methods=CONSENSUS
    )
    rho1: float = _setting(_S, "penalty inside a node at the start", above=0, methods=CONSENSUS)
    rho2: float = _setting(
        _S, "penalty between nodes at the start", above=0, methods=CONSENSUS, unless=ONE_LEVEL
    )
    rho_max: float = _setting(_S, "largest penalty", above=0, methods=CONSENSUS)
    rho_min: float = _setting(_S, "smallest penalty", above=0, methods=CONSENSUS)
    rho_factor: float = _setting(
        _S, "factor of one change of a penalty", above=1, methods=CONSENSUS
    )
    eps_abs: float = _setting(
        _S, "absolute tolerance of the residuals", low=0, methods=CONSENSUS, past=1e-4
    )
    eps_rel: float = _setting(
        _S, "relative tolerance of the residuals", low=0, methods=CONSENSUS, past=1e-3
    )
    residuals: str = _setting(
        _S,
        "when residuals are computed, as long as there are duals",
        before="every",
        choices=("every", "evaluate", "off"),
        methods=CONSENSUS,
    )

    _S = "rivals"
    aggregation: str = _setting(
        _S,
        "who sends gradients between nodes: all ranks, or each node the sum of its ranks",
        "flat",
        choices=("flat", "hierarchical"),
        methods=PER_STEP,
    )
    compress_ratio: float = _setting(
        _S,
        "share of each layer's gradient that travels (dgc: 0.001, after its warm-up; sparseloco: "
        "1/64 of each 4,096 parameters)",
        0.01,
        above=0,
        high=1,
        methods=("topk", "dgc", *SPARSE),
    )
    dgc_warmup_epochs: Fraction = _setting(
        _S,
        "epochs in which the share falls by the same factor each, to --compress-ratio after them; "
        "auto: 4, or 1/40 of the run where that is less",
        Fraction(4),
        low=0,
        auto=True,
        methods=("dgc",),
    )
    dgc_sample: float = _setting(
        _S,
        "share of a layer's gradient that its threshold is estimated from",
        0.01,
        above=0,
        high=1,
        methods=("dgc",),
    )
    dgc_nesterov: bool = _setting(
        _S, "accumulate Nesterov's momentum", False, before=False, methods=("dgc",)
    )
    dgc_clip: float = _setting(
        _S,
        "norm to clip the mean gradient to: 1 / sqrt(workers) of it for each worker's; 0 for not",
        0.0,
        before=FORMER_DGC,
        low=0,
        methods=("dgc",),
    )
    powersgd_rank: int = _setting(
        _S, "rank of the approximation of each gradient matrix", 2, low=1, methods=("powersgd",)
    )
    block_size: int = _setting(
        _S, "elements of a block that travels or not", 256, low=1, methods=("omnireduce",)
    )
    block_top: float = _setting(
        _S,
        "share of its blocks that a worker sends, those of largest norm; 1: all that are not zero",
        0.01,
        before=1.0,
        above=0,
        high=1,
        methods=("omnireduce",),
    )
    clip_sigma: float = _setting(
        _S,
        "standard deviations of a tensor's gradient that its scale is at most, 0 for no bound",
        2.5,
        before=2.5,
        low=0,
        methods=("terngrad",),
    )
    lion_beta1: float = _setting(
        _S,
        "weight of the momentum in a worker's vote",
        0.9,
        before=0.9,
        low=0,
        below=1,
        methods=("lion",),
    )
    lion_beta2: float = _setting(
        _S, "decay of that momentum", 0.99, before=0.99, low=0, below=1, methods=("lion",)
    )
    ada_levels: tuple[float, ...] = _setting(
        _S,
        "shares of the gradient that a worker chooses from, ascending",
        (0.01, 0.03, 0.1),
        before=(0.01, 0.03, 0.1),
        above=0,
        high=1,
        methods=("adacgd",),
    )
    ada_zeta: float = _setting(
        _S,
        "how good an estimate must be, as a share of the gradient's last change (squares)",
        0.4,
        before=0.4,
        low=0,
        methods=("adacgd",),
    )
    ada_average: float = _setting(
        _S,
        "weight of a new gradient in the average that a worker compresses; 1: the gradient alone",
        1.0,
        before=1.0,
        above=0,
        high=1,
        methods=("adacgd",),
    )
    outer_lr: float = _setting(
        _S,
        "learning rate of the step between nodes (sparseloco: 1)",
        0.7,
        above=0,
        methods=("diloco", *SPARSE),
    )
    outer_momentum: float = _setting(
        _S, "Nesterov momentum of that step", 0.9, low=0, below=1, methods=("diloco",)
    )
    qsr_alpha: float = _setting(
        _S,
        "exchange after (alpha / learning rate)^2 steps, where these are more than local-steps",
        0.2,
        before=0.2,
        above=0,
        methods=QUADRATIC,
    )
    error_decay: float = _setting(
        _S,
        "factor of what has not been sent yet, at each exchange",
        0.95,
        before=0.95,
        low=0,
        high=1,
        methods=SPARSE,
    )
    prune_iteration: int = _setting(
        _S,
        "outer iteration whose end prunes, a count or a share (pactrain: 0, before the first)",
        Fraction(1, 2),
        share=True,
        methods=("one-shot", "pactrain"),
    )
    prune_by: str = _setting(
        _S,
        f"score that decides what is pruned; auto: grasp below a keep ratio of {GRASP_BELOW}, "
        "else magnitude",
        "auto",
        choices=("auto", "grasp", "magnitude"),
        methods=("pactrain",),
    )
    grasp_batches: int = _setting(
        _S,
        "draws of --grasp-samples for the score grasp; without them batches of every rank",
        1,
        low=1,
        methods=("pactrain",),
    )
    grasp_samples: int = _setting(
        _S,
        "images of each class in a draw, of all ranks together, 0 for batches as they come",
        10,
        before=0,
        low=0,
        methods=("pactrain",),
    )
    grasp_temperature: float = _setting(
        _S,
        "what logits are divided by for the score grasp",
        200.0,
        before=1.0,
        above=0,
        methods=("pactrain",),
    )
    stable_window: int = _setting(
        _S,
        "steps with an unchanged support after which a bucket travels compacted",
        10,
        low=1,
        methods=("pactrain",),
    )
    ternary: bool = _setting(
        _S, "send -1, 0 or 1 times a shared scale", False, methods=("pactrain",)
    )
    adaptive: bool = _setting(
        _S,
        "compact (and, with --ternary, quantise) only where it is measured to pay",
        False,
        methods=("pactrain",),
    )
    lasso_ratio: float = _setting(
        _S,
        "share of the first batch's loss, penalty included, that the group lasso makes up",
        0.25,
        above=0,
        below=1,
        methods=("prunetrain",),
    )
    lasso_groups: str = _setting(
        _S,
        "groups of the lasso: a channel's outputs and inputs in each layer apart, or all together",
        "layer",
        before="coupled",
        choices=("layer", "coupled"),
        methods=("prunetrain",),
    )
    reconfigure_every: int = _setting(
        _S,
        "outer iterations between removals of channels",
        8,
        low=1,
        methods=("prunetrain",),
    )
    prune_threshold: float = _setting(
        _S,
        "largest weight of a channel that is removed",
        1e-4,
        above=0,
        methods=("prunetrain",),
    )

    _S = "machine"
    device: str = _setting(_S, "where to compute", "auto", choices=("auto", "cpu", "cuda"))
    amp: str = _setting(_S, "mixed precision", "off", choices=("off", "bf16", "fp16"))
    channels_last: bool = _setting(_S, "keep images in NHWC order", False)
    compile: bool = _setting(_S, "compile the model with torch.compile", False)
    bucket_mib: float = _setting(_S, "size of a message buffer in MiB", 32.0, low=1e-4, high=2048)
    piece_kib: int = _setting(
        _S,
        "KiB for each node in a message between nodes, 0 for whole buckets",
        60,
        before=0,
        low=0,
        high=2**21,
    )
    mpi_buffers: str = _setting(
        _S, "memory handed to MPI", "auto", choices=("auto", "host", "device")
    )
    ranks_per_node: int = _setting(
        _S, "make virtual nodes of this many ranks, 0 for the real nodes", 0, low=0
    )
    leaders_per_node: int = _setting(
        _S,
        "ranks of each node that share what it sends between nodes, each over links of its own",
        1,
        before=1,
        low=1,
        methods=AVERAGING,
    )
    link_gbit: float = _setting(
        _S,
        "for --dry-run: estimate exchanges on links of so many Gbit/s, 0 for not",
        0.0,
        before=0.0,
        low=0,
        methods=AVERAGING,
    )
    latency_us: float = _setting(
        _S,
        "for --link-gbit: us per message",
        50.0,
        before=50.0,
        low=0,
        methods=AVERAGING,
    )
    copy_gbs: float = _setting(
        _S,
        "for --link-gbit: GB/s of copies",
        7.0,
        before=7.0,
        above=0,
        methods=AVERAGING,
    )
    nodes: tuple[int, ...] = _setting(
        _S, "for --link-gbit: numbers of nodes", NODES, before=NODES, low=1, methods=AVERAGING
    )
    step_ms: float = _setting(
        _S,
        "for --link-gbit: ms of a local step, to tell the share of the time",
        0.0,
        before=0.0,
        low=0,
        methods=AVERAGING,
    )

    _S = "safety"
    resume: bool = _setting(_S, "go on with the run in --run-dir, or begin it", False)
    checkpoint_every: str = _setting(
        _S,
        "outer iterations between checkpoints; auto: below 2 % of the time; off: when preempted",
        "auto",
        words=("auto", "off"),
    )
    timeout: float = _setting(
        _S, "seconds without progress on any rank before the job is ended", 1800.0, low=1
    )
    time_limit: float = _setting(
        _S,
        "seconds after which to have left with a checkpoint, 0 for the end of the Slurm job",
        0.0,
        low=0,
    )
    preempt_signals: tuple[str, ...] = _setting(
        _S,
        "signals to leave on with a checkpoint (INT: Ctrl-C)",
        ("TERM", "USR1", "INT"),
        choices=("TERM", "USR1", "USR2", "INT", "HUP", "XCPU"),
    )
    on_divergence: str = _setting(
        _S,
        "end the run, or go back to the last checkpoint with half the learning rate",
        "stop",
        choices=("stop", "rollback"),
    )
    divergence_factor: float = _setting(
        _S,
        "a loss of so many times the first iteration's, or that of guessing if it is more, counts "
        "as a divergence; 0: only one that is not finite",
        10.0,
        before=10.0,
        low=0,
    )

    _S = "output"
    run_dir: str = _setting(
        _S, "folder of the results; empty: a new one in runs/", "", optional=True
    )
    progress: str = _setting(
        _S,
        "auto: a bar on a terminal, lines elsewhere; on: a bar; off: nothing",
        "auto",
        choices=("auto", "on", "off"),
    )
    evaluate_every: int = _setting(_S, "outer iterations between evaluations", low=1)
    tensorboard: bool = _setting(
        _S, "write the metrics for TensorBoard as well", False, before=False
    )
    trace: bool = _setting(
        _S, "write trace.json: what all ranks do when, for Perfetto", False, before=False
    )
    dry_run: bool = _setting(_S, "print sizes and bytes, then stop without training", False)

    del _S


# What means something to image files alone, and the data sets that are such files.
OF_FILES = ("data_mode", "data_workers", "data_cache", "skip_corrupt")
FROM_FILES = ("imagefolder", "webdataset")
# The data sets that --download fetches.
FETCHED = ("cifar10", "cifar100")
# What --dry-run alone looks at.
ESTIMATED = ("link_gbit", "latency_us", "copy_gbs", "nodes", "step_ms")
# What may change when a run is resumed: it describes the job and the machine, not the run.
OF_THE_JOB = (
    "run_dir",
    "resume",
    "checkpoint_every",
    "timeout",
    "time_limit",
    "preempt_signals",
    "on_divergence",
    "divergence_factor",
    "data_dir",
    "download",
    "data_mode",
    "data_workers",
    "data_cache",
    "skip_corrupt",
    "device",
    "mpi_buffers",
    "ranks_per_node",
    "leaders_per_node",
    "progress",
    "tensorboard",
    "trace",
    "dry_run",
    *ESTIMATED,
)
FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
OF_SECTION = {
    section: tuple(n for n, field in FIELDS.items() if field.metadata["section"] == section)
    for section in dict.fromkeys(field.metadata["section"] for field in FIELDS.values())
}


def key_of(name: str) -> str:
    """Return the TOML key, and the flag without its dashes, of a field."""
    return name.replace("_", "-")


def concerns(name: str, values: Mapping[str, Any]) -> bool:
    """Say whether a setting has a meaning for a run of `values`, resolved or not."""
    other, value = FIELDS[name].metadata.get("unless", ONE_LEVEL)
    spared = "unless" in FIELDS[name].metadata and values["method"] in methods_of(other)
    return values["method"] in methods_of(name) and not (spared and values[other] == value)


def methods_of(name: str) -> Sequence[str]:
    """Return the methods that a setting has a meaning for."""
    return FIELDS[name].metadata.get("methods", METHODS)
