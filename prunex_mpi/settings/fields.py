"""Name the settings of a run: one frozen dataclass, whose fields carry the rules of their values.

Each value has one home. What describes the machine, the data and the output has its default
here; what makes up the training recipe has none here and is set by the preset `recipe`. What one
method alone has is declared with the method (`Settings.options`).
"""

import dataclasses
from fractions import Fraction
from typing import Any

from prunex_mpi.settings.method import Method
from prunex_mpi.settings.values import setting, split_layer_keep_ratio

CROSS_ENTROPY = "cross-entropy"
PRESETS = ("recipe", "paper", "thin", "small", "finetune")
# As data/transforms.py has them.
TRANSFORMS = (
    *("trivial-augment", "rand-augment", "auto-augment", "aug-mix", "color-jitter", "grayscale"),
    *("gaussian-blur", "random-erasing"),
)
# How phase 4 sends: plain float32, other formats, or integers of so many bits with shared scales.
PAYLOADS = ("fp32", "fp16", "bf16", "int8", "int8sum", "int4", "int2")
# Of which --dry-run estimates what exchanges take.
NODES = (2, 8, 64, 4096)
NOT_A_SETTING = {"section": ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Carry every setting of a run, checked and resolved.

    Field `a_b` is the flag `--a-b` and the TOML key `a-b`. `options` holds what the method has
    alone, an instance of `method.options`: its field `c` is the flag `--METHOD-c` and the key `c`
    of the table `[METHOD]`. `estimate` is what a dry run is asked beside the settings. Build one
    with `resolve.make`, `resolve.with_overrides` or `cli.parse`: these convert, check and resolve,
    the constructor does not.
    """

    _S = "model"
    preset: str = setting(_S, "file of settings to start from", "recipe", choices=PRESETS)
    method: Method = dataclasses.field(metadata=NOT_A_SETTING)
    model: str = setting(
        _S,
        "resnet20 (resnet20-w8: half as wide), resnet18, ..., a torchvision classifier, or "
        "package.module:factory",
        "resnet20",
    )
    stem: str = setting(
        _S,
        "first layers of the torchvision ResNets; auto: cifar up to 64 pixels",
        "auto",
        choices=("auto", "cifar", "imagenet"),
    )
    seed: int = setting(_S, "seed of weights, shuffles and augmentation", 0, low=0)
    init_from: str = setting(
        _S,
        "trained weights to begin with: a file, the folder of a run, or torchvision for its own",
        "",
        optional=True,
    )
    init_digest: str = setting(
        _S,
        "SHA-256 that the file of --init-from must have; the run fills it in",
        "",
        optional=True,
        found=True,
    )

    _S = "data"
    dataset: str = setting(
        _S,
        "images to train on; digits needs no files, a function of yours makes what torch calls a "
        "map-style data set",
        "digits",
        choices=("digits", "cifar10", "cifar100", "imagefolder", "webdataset", "synthetic"),
        named="package.module:factory",
    )
    data_dir: str = setting(_S, "folder of the data", "data")
    download: bool = setting(_S, "fetch cifar10 or cifar100 when missing", False)
    train_samples: int = setting(_S, "images of the training set to use, 0 for all", 0, low=0)
    test_samples: int = setting(_S, "images of the test set to use, 0 for all", 0, low=0)
    val_split: float = setting(
        _S,
        "share of the training images of each class to hold out: the best network by them is "
        "delivered, and tested once",
        0.0,
        low=0,
        below=1,
    )
    image_size: int = setting(_S, "side in pixels, 0 for the data's own", 0, low=0, high=4096)
    image_mean: tuple[float, ...] = setting(
        _S,
        "mean of red, green and blue, in 0..1, to normalise images by; none: that of --init-from, "
        "where a run or torchvision has trained it, else that of the data",
        (),
        optional=True,
        found=True,
    )
    image_std: tuple[float, ...] = setting(
        _S, "standard deviation to go with it", (), optional=True, above=0, found=True
    )
    data_mode: str = setting(
        _S,
        "decode image files into memory at the start, or while training; auto: while training "
        "where they would not fit into memory",
        "auto",
        choices=("memory", "stream", "auto"),
    )
    workers: int = setting(
        _S, "threads that decode, 0 for the rank's share of the cores", 0, low=0, high=256
    )
    skip_corrupt: bool = setting(
        _S,
        "replace a damaged image file by the next one of its class, and count it in a warning",
        False,
    )
    normalise_samples: int = setting(
        _S,
        "images of each rank that mean and deviation of the colours are taken from, 0 for all",
        16384,
        low=0,
    )
    augment: str = setting(
        _S,
        "auto: crops of padded images, and flips; resized-crop: crops of any size, and flips",
        "auto",
        choices=("auto", "off", "resized-crop"),
    )
    transforms: tuple[str, ...] = setting(
        _S,
        "transforms of torchvision v2 for training images, in this order",
        (),
        optional=True,
        choices=TRANSFORMS,
    )

    _S = "training"
    outer_iterations: int = setting(_S, "number of consensus rounds", low=1, high=10**6)
    local_epochs: Fraction = setting(_S, "epochs per outer iteration, such as 5 or 1/4", low=0)
    local_steps: int = setting(
        _S,
        "steps per outer iteration instead of epochs, 0 for off; auto: as --comm-share allows, "
        "where nodes exchange once per outer iteration (else epochs count)",
        low=0,
        auto=True,
    )
    frozen_local_steps: int = setting(
        _S,
        "steps per outer iteration once pruning is done, 0 for as many as before",
        low=0,
        of="shrinks",
        off=0,
    )
    comm_share: float = setting(
        _S,
        "share of the time that phases 2 to 5 may take, for --local-steps auto",
        above=0,
        below=1,
        of="by_iteration",
    )
    batch_size: int = setting(_S, "images per rank and step", low=1)
    lr: float = setting(_S, "peak learning rate (adamw: 0.001)", above=0)
    lr_schedule: str = setting(_S, "learning rate curve", choices=("constant", "cosine", "step"))
    warmup_ratio: float = setting(_S, "linear warm-up, as a fraction of all steps", low=0, below=1)
    min_lr_ratio: float = setting(_S, "end of the cosine, as a fraction of lr", low=0, high=1)
    momentum: float = setting(_S, "momentum of SGD, beta 1 of AdamW", low=0, below=1, of="momentum")
    weight_decay: float = setting(_S, "L2 penalty lambda (adamw, decoupled: 0.05)", low=0)
    optimizer: str = setting(
        _S,
        "what takes the local steps, or those of the mean gradient",
        "sgd",
        choices=("sgd", "adamw"),
        of="optimizer",
    )
    inner_momentum: str = setting(
        _S,
        "what becomes of its momentum at an exchange (diloco: reset)",
        "keep",
        choices=("keep", "reset"),
        of="local_sgd",
    )
    lr_scaling: str = setting(
        _S,
        "multiply lr by the number of ranks, or by its root",
        "off",
        choices=("off", "linear", "sqrt"),
        of="fixed_interval",
    )
    loss: str = setting(
        _S,
        "cross-entropy, or package.module:function of outputs and labels",
        CROSS_ENTROPY,
    )
    teacher: str = setting(
        _S,
        "trained network whose outputs are learned beside the labels: the folder of a run, or a "
        "file of weights of --model",
        "",
        optional=True,
    )
    teacher_digest: str = setting(
        _S,
        "SHA-256 that the file of --teacher must have; the run fills it in",
        "",
        optional=True,
        found=True,
    )
    distillation_alpha: float = setting(
        _S, "share of the loss that is the teacher's", 0.5, above=0, high=1
    )
    distillation_tau: float = setting(
        _S, "what both networks' outputs are divided by to compare them", 4.0, above=0
    )
    smoothing: float = setting(
        _S, "share of each label that is spread over all classes", 0.0, low=0, below=1
    )
    mixup: float = setting(
        _S,
        "mix images: alpha of the Beta distribution of shares, 0 for not",
        0.0,
        low=0,
    )
    cutmix: float = setting(
        _S,
        "the same with a window of another image; with both a coin decides",
        0.0,
        low=0,
    )
    clip_grad: float = setting(
        _S,
        "norm to which a step's gradient is clipped, 0 for not",
        0.0,
        low=0,
        of="optimizer",
    )
    model_ema_decay: float = setting(
        _S,
        "decay per outer iteration of the average of z that is evaluated and delivered, 0 for z "
        "itself",
        0.0,
        low=0,
        below=1,
    )
    grad_accum_steps: int = setting(
        _S,
        "parts in which a step's batch goes through the network, for less memory",
        1,
        low=1,
        of="fixed_network",
    )
    weight_decay_on: str = setting(
        _S,
        "what it shrinks: all parameters, or weights without biases and BatchNorm, as in the paper",
        choices=("all", "weights"),
    )

    _S = "sparsity"
    groups: tuple[str, ...] = setting(
        _S,
        "what is removed whole, composed in this order",
        choices=("filter", "channel", "shape", "coupled"),
        of="prunes_groups",
    )
    keep_ratio: tuple[float, ...] = setting(
        _S,
        "fraction of the groups to keep, one for all or one per group",
        above=0,
        high=1,
        of="keeps_a_share",
    )
    layer_keep_ratio: tuple[str, ...] = setting(
        _S,
        "PATTERN=RATIO for matching parameter names, for all groups; the last match wins",
        optional=True,
        of="prunes_groups",
    )
    round_to: int = setting(
        _S, "round kept groups up to a multiple of this", low=1, of="prunes_groups"
    )
    mask_agreement: str = setting(
        _S,
        "how nodes agree on a mask",
        choices=("or", "vote"),
        of="consensus nodes",
    )
    keep_by: str = setting(
        _S,
        "what --keep-ratio is a fraction of: the groups of each layer or set, or, of coupled "
        "groups, all parameters or multiply-adds of the model",
        choices=("groups", "parameters", "multiply-adds"),
        of="prunes_groups",
    )
    keep_floor: float = setting(
        _S,
        "least fraction of the groups of each layer or set that a ratio of the model leaves",
        low=0,
        high=1,
        of="prunes_groups",
    )
    score: str = setting(
        _S,
        "score by which groups are kept: their magnitude, or the squared gradient of a factor on "
        "each channel, summed over the local steps (gates)",
        choices=("magnitude", "gates"),
        of="prunes_groups nodes",
        off="magnitude",
    )
    dropped: str = setting(
        _S,
        "groups that z drops before the masks freeze: cut from theta at once, or shrunk in it to "
        "nothing by the freeze, so that they may come back",
        "cut",
        choices=("cut", "shrink"),
        of="consensus nodes",
    )
    warmup_iterations: int = setting(
        _S,
        "dense outer iterations at first, a count or a share such as 7/16",
        share=True,
        of="consensus",
    )
    keep_ramp_iterations: int = setting(
        _S,
        "outer iterations to reach the keep ratio, a count or a share",
        share=True,
        of="consensus",
    )
    freeze_iteration: int = setting(
        _S,
        "outer iteration that freezes the masks, a count or a share, 0 for never",
        share=True,
        of="consensus",
    )
    freeze_drift: float = setting(
        _S,
        "freeze once the fraction of changed groups is at most this; negative for never",
        of="consensus",
    )
    freeze_window: int = setting(
        _S, "outer iterations in a row for --freeze-drift", low=1, of="consensus"
    )
    after_freeze: str = setting(
        _S, "training on the fixed support", choices=("local-sgd", "admm"), of="consensus"
    )
    remove_dropped: bool = setting(
        _S,
        "take what is dropped out of the network itself once masks are final, so that steps cost "
        "less from then on (coupled groups)",
        of="shrinks",
        off=False,
    )

    _S = "consensus"
    theta_start: str = setting(
        _S, "start of each local phase", choices=("z", "theta"), of="consensus"
    )
    node_sync: str = setting(
        _S,
        "average inside the node at each step or once per iteration",
        choices=("step", "outer"),
        of="by_iteration nodes",
    )
    weight_decay_in: str = setting(
        _S,
        "weight decay in the local gradient or in the consensus (after a local-sgd freeze: theta)",
        choices=("theta", "z"),
        of="consensus",
    )
    bn: str = setting(
        _S,
        "BatchNorm statistics of z: averages, or estimated again: while pruning, and where nothing "
        "is pruned for each evaluation and in the end (local-sgd: average)",
        choices=("average", "recalibrate"),
        of="by_iteration",
    )

    _S = "exchange"
    payload: str = setting(
        _S,
        "format of what leaders exchange; other than fp32: differences, with error feedback",
        choices=PAYLOADS,
        of="averages",
        off="fp32",
    )
    overlap_steps: int = setting(
        _S,
        "local steps that the exchange runs behind, 0 for none",
        low=0,
        auto=True,
        of="averages nodes",
        off=0,
    )

    _S = "penalties"
    penalty: str = setting(
        _S, "course of rho", choices=("fixed", "ramp", "balance"), of="consensus"
    )
    rho1: float = setting(_S, "penalty inside a node at the start", above=0, of="consensus")
    rho2: float = setting(_S, "penalty between nodes at the start", above=0, of="consensus nodes")
    rho_max: float = setting(_S, "largest penalty", above=0, of="consensus")
    rho_min: float = setting(_S, "smallest penalty", above=0, of="consensus")
    rho_factor: float = setting(_S, "factor of one change of a penalty", above=1, of="consensus")
    eps_abs: float = setting(_S, "absolute tolerance of the residuals", low=0, of="consensus")
    eps_rel: float = setting(_S, "relative tolerance of the residuals", low=0, of="consensus")
    residuals: str = setting(
        _S,
        "when residuals are computed, as long as there are duals",
        choices=("every", "evaluate", "off"),
        of="consensus",
    )

    _S = "exchange"
    aggregation: str = setting(
        _S,
        "who sends gradients between nodes: all ranks, or each node the sum of its ranks",
        "flat",
        choices=("flat", "hierarchical"),
        of="per_step",
    )

    _S = "machine"
    device: str = setting(_S, "where to compute", "auto", choices=("auto", "cpu", "cuda"))
    amp: str = setting(_S, "mixed precision", "off", choices=("off", "bf16", "fp16"))
    channels_last: bool = setting(_S, "keep images in NHWC order", False)
    compile: bool = setting(_S, "compile the model with torch.compile", False)
    bucket_mib: float = setting(_S, "size of a message buffer in MiB", 32.0, low=1e-4, high=2048)
    piece_kib: int = setting(
        _S,
        "KiB for each node in a message between nodes, 0 for whole buckets",
        60,
        low=0,
        high=2**21,
    )
    mpi_buffers: str = setting(
        _S, "memory handed to MPI", "auto", choices=("auto", "host", "device")
    )
    ranks_per_node: int = setting(
        _S, "make virtual nodes of this many ranks, 0 for the real nodes", 0, low=0
    )
    leaders_per_node: int = setting(
        _S,
        "ranks of each node that share what it sends between nodes, each over links of its own",
        1,
        low=1,
        of="averages",
        off=1,
    )

    _S = "safety"
    resume: bool = setting(_S, "go on with the run in --run-dir, or begin it", False)
    checkpoint_every: str = setting(
        _S,
        "outer iterations between checkpoints; auto: below 2 % of the time; off: when preempted",
        "auto",
        words=("auto", "off"),
    )
    timeout: float = setting(
        _S, "seconds without progress on any rank before the job is ended", 1800.0, low=1
    )
    time_limit: float = setting(
        _S,
        "seconds after which to have left with a checkpoint, 0 for the end of the Slurm job",
        0.0,
        low=0,
    )
    preempt_signals: tuple[str, ...] = setting(
        _S,
        "signals to leave on with a checkpoint (INT: Ctrl-C)",
        ("TERM", "USR1", "INT"),
        choices=("TERM", "USR1", "USR2", "INT", "HUP", "XCPU"),
    )
    on_divergence: str = setting(
        _S,
        "end the run, or go back to the last checkpoint with half the learning rate",
        "stop",
        choices=("stop", "rollback"),
    )
    divergence_factor: float = setting(
        _S,
        "a loss of this many times the first iteration's, or that of guessing if it is more, "
        "counts as a divergence; 0: only one that is not finite",
        10.0,
        low=0,
    )

    _S = "output"
    run_dir: str = setting(
        _S, "folder of the results; empty: a new one in runs/", "", optional=True
    )
    progress: str = setting(
        _S,
        "auto: a bar on a terminal, lines elsewhere; on: a bar; off: nothing",
        "auto",
        choices=("auto", "on", "off"),
    )
    evaluate_every: int = setting(_S, "outer iterations between evaluations", low=1)
    tensorboard: bool = setting(_S, "write the metrics for TensorBoard as well", False)
    trace: bool = setting(_S, "write trace.json: what all ranks do when, for Perfetto", False)
    dry_run: bool = setting(_S, "print sizes and bytes, then stop without training", False)

    del _S
    options: Any = dataclasses.field(default=None, metadata=NOT_A_SETTING)
    estimate: "Estimate | None" = dataclasses.field(default=None, metadata=NOT_A_SETTING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Carry what `--dry-run` estimates the seconds of exchanges from."""

    _S = "dry-run"
    link_gbit: float = setting(
        _S, "estimate exchanges on links of this many Gbit/s, 0 for not", 0.0, low=0, of="averages"
    )
    latency_us: float = setting(_S, "us per message", 50.0, low=0, of="averages")
    copy_gbs: float = setting(_S, "GB/s of copies", 7.0, above=0, of="averages")
    nodes: tuple[int, ...] = setting(_S, "numbers of nodes", NODES, low=1, of="averages")
    step_ms: float = setting(
        _S, "ms of a local step, to tell the share of the time", 0.0, low=0, of="averages"
    )
    del _S


# What means something to image files alone, and the data sets that are such files.
OF_FILES = ("data_mode", "workers", "skip_corrupt")
FROM_FILES = ("imagefolder", "webdataset")
# The data sets that --download fetches.
FETCHED = ("cifar10", "cifar100")
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
    "workers",
    "skip_corrupt",
    "device",
    "mpi_buffers",
    "ranks_per_node",
    "leaders_per_node",
    "progress",
    "tensorboard",
    "trace",
    "dry_run",
)
# The settings that all methods share, by name.
SHARED = {f.name: f for f in dataclasses.fields(Settings) if f.metadata["section"]}


# The shared settings of each group of --help.
OF_SECTION = {
    section: tuple(name for name, f in SHARED.items() if f.metadata["section"] == section)
    for section in dict.fromkeys(f.metadata["section"] for f in SHARED.values())
}


def key_of(name: str) -> str:
    """Return the flag of a setting without its dashes; of shared ones it is the TOML key too."""
    return name.replace("_", "-")


def layer_keep_ratios(settings: Settings) -> tuple[tuple[str, float], ...]:
    """Return the (pattern, ratio) pairs of `layer_keep_ratio` in order."""
    return tuple(split_layer_keep_ratio(item) for item in settings.layer_keep_ratio)


def known_freeze(settings: Settings) -> int:
    """Return the outer iteration that freezes the masks, 0 where that is not known before."""
    return settings.freeze_iteration if settings.freeze_drift < 0 else 0
