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
TEXT = "text"
PRESETS = ("recipe", "paper", "thin", "small", "finetune")
# As data/transforms.py has them.
TRANSFORMS = (
    *("trivial-augment", "rand-augment", "auto-augment", "aug-mix", "color-jitter", "grayscale"),
    *("gaussian-blur", "random-erasing"),
)
# How phase 4 sends: plain float32, other formats, or integers of so many bits with shared scales.
PAYLOADS = ("fp32", "fp16", "bf16", "int8", "int8sum", "int4", "int2")
# Below it no penalty is halved: repeated halving would end at zero.
RHO_MIN = 1e-6
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
    preset: str = setting(
        _S, "named set of defaults, see --help presets", "recipe", choices=PRESETS
    )
    method: Method = dataclasses.field(metadata=NOT_A_SETTING)
    model: str = setting(
        _S,
        "resnet20 (resnet20-w8: half as wide), resnet18, ..., a torchvision classifier, or "
        "package.module:factory",
        "resnet20",
    )
    stem: str = setting(
        _S,
        "first layers of torchvision's ResNets; auto: cifar for images of up to 64 pixels",
        "auto",
        choices=("auto", "cifar", "imagenet"),
    )
    seed: int = setting(_S, "seed of initial weights, shuffles and augmentation", 0, low=0)
    init_from: str = setting(
        _S,
        "trained weights to start from: a file, the folder of a run, or torchvision for its own",
        "",
        optional=True,
        metavar="FILE|DIR|torchvision",
    )
    init_digest: str = setting(
        _S,
        "SHA-256 that the file of --init-from must have; filled in by the run",
        "",
        optional=True,
        found=True,
    )

    _S = "data"
    dataset: str = setting(
        _S,
        "data set; digits and text are embedded, a function returns a map-style torch Dataset",
        "digits",
        choices=("digits", "cifar10", "cifar100", "imagefolder", "webdataset", "synthetic", TEXT),
        named="package.module:factory",
    )
    data_dir: str = setting(
        _S,
        "folder of the data; of text it may be a file, and without it the embedded one is taken",
        "data",
        optional=True,
        metavar="DIR|FILE",
    )
    download: bool = setting(_S, "fetch cifar10 or cifar100 where it is missing", False)
    train_samples: int = setting(
        _S, "number of training images, or windows of text, to use, 0 for all", 0, low=0
    )
    test_samples: int = setting(
        _S, "number of test images, or windows of text, to use, 0 for all", 0, low=0
    )
    val_split: float = setting(
        _S,
        "fraction of the training images of each class, or of the text's end, held out for "
        "validation: the best network on them is delivered, and tested once",
        0.0,
        low=0,
        below=1,
    )
    tokenizer: str = setting(
        _S,
        "what text is cut into: bytes, chars, or as a tokenizer.json of Hugging Face says",
        "bytes",
        metavar="bytes|chars|FILE",
    )
    context: int = setting(_S, "tokens of a window of text", 256, low=1, high=2**20)
    image_size: int = setting(_S, "image side in pixels, 0 for the data's own", 0, low=0, high=4096)
    image_mean: tuple[float, ...] = setting(
        _S,
        "mean of red, green and blue in 0..1 for normalisation; none: that of --init-from, else "
        "of the data",
        (),
        optional=True,
        found=True,
    )
    image_std: tuple[float, ...] = setting(
        _S,
        "standard deviation for normalisation, with --image-mean",
        (),
        optional=True,
        above=0,
        found=True,
    )
    data_mode: str = setting(
        _S,
        "decode image files into memory at the start, or while training (stream); auto: stream "
        "where they do not fit",
        "auto",
        choices=("memory", "stream", "auto"),
    )
    workers: int = setting(
        _S, "decoding threads per rank, 0 for the rank's share of the cores", 0, low=0, high=256
    )
    skip_corrupt: bool = setting(
        _S,
        "replace a damaged image by the next one of its class, with a warning",
        False,
    )
    augment: str = setting(
        _S,
        "auto: padded random crops and flips; resized-crop: random resized crops and flips",
        "auto",
        choices=("auto", "off", "resized-crop"),
    )
    transforms: tuple[str, ...] = setting(
        _S,
        "torchvision v2 transforms of training images, in this order",
        (),
        optional=True,
        choices=TRANSFORMS,
    )

    _S = "training"
    outer_iterations: int = setting(
        _S,
        "length of the run in outer iterations: local steps, then one exchange",
        low=1,
        high=10**6,
    )
    local_epochs: Fraction = setting(_S, "epochs per outer iteration, such as 5 or 1/4", low=0)
    local_steps: int = setting(
        _S,
        "local steps per outer iteration, in place of --local-epochs (0: off); auto: as few as "
        "--comm-share allows",
        low=0,
        auto=True,
    )
    frozen_local_steps: int = setting(
        _S,
        "local steps per outer iteration after the masks are frozen, 0 for the same",
        low=0,
        of="shrinks",
        off=0,
    )
    comm_share: float = setting(
        _S,
        "fraction of the time that the exchange may take, for --local-steps auto",
        above=0,
        below=1,
        of="by_iteration",
    )
    batch_size: int = setting(_S, "images, or windows of text, per rank and local step", low=1)
    lr: float = setting(_S, "peak learning rate (adamw, muon: 0.001)", above=0)
    lr_schedule: str = setting(_S, "learning rate schedule", choices=("constant", "cosine", "step"))
    warmup_ratio: float = setting(
        _S, "linear warm-up of the learning rate, as a fraction of all steps", low=0, below=1
    )
    min_lr_ratio: float = setting(
        _S, "final learning rate of the cosine schedule, as a fraction of --lr", low=0, high=1
    )
    momentum: float = setting(
        _S, "momentum of SGD and Muon, beta 1 of AdamW", low=0, below=1, of="momentum"
    )
    beta2: float = setting(
        _S,
        "beta 2 of AdamW, and of what Muon leaves to it; language models take 0.95 to 0.99",
        0.999,
        low=0,
        below=1,
        of="optimizer",
    )
    weight_decay: float = setting(_S, "weight decay lambda (adamw, muon, decoupled: 0.05)", low=0)
    optimizer: str = setting(
        _S,
        "optimizer of the local steps, or of the step on the mean gradient",
        "sgd",
        choices=("sgd", "adamw", "muon"),
        of="optimizer",
    )
    inner_momentum: str = setting(
        _S,
        "keep or reset the optimizer's momentum at each exchange (diloco with sgd: reset)",
        "keep",
        choices=("keep", "reset"),
        of="local_sgd",
    )
    lr_scaling: str = setting(
        _S,
        "scale --lr by the number of ranks (linear) or its square root",
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
        "trained network for distillation: the folder of a run, or a weights file of --model",
        "",
        optional=True,
        metavar="FILE|DIR",
    )
    teacher_digest: str = setting(
        _S,
        "SHA-256 that the file of --teacher must have; filled in by the run",
        "",
        optional=True,
        found=True,
    )
    distillation_alpha: float = setting(_S, "weight of the distillation loss", 0.5, above=0, high=1)
    distillation_tau: float = setting(_S, "temperature of the distillation loss", 4.0, above=0)
    smoothing: float = setting(_S, "label smoothing", 0.0, low=0, below=1)
    mixup: float = setting(
        _S,
        "mixup alpha, 0 for off",
        0.0,
        low=0,
    )
    cutmix: float = setting(
        _S,
        "cutmix alpha, 0 for off; with both, one of them is drawn per batch",
        0.0,
        low=0,
    )
    clip_grad: float = setting(
        _S,
        "clip the gradient norm of each step to this value, 0 for off",
        0.0,
        low=0,
        of="optimizer",
    )
    model_ema_decay: float = setting(
        _S,
        "decay per outer iteration of the moving average of z that is evaluated and delivered, "
        "0 for off",
        0.0,
        low=0,
        below=1,
    )
    grad_accum_steps: int = setting(
        _S,
        "parts in which a step's batch is processed, to save memory",
        1,
        low=1,
        of="fixed_network",
    )
    weight_decay_on: str = setting(
        _S,
        "parameters that decay: all, or weights without biases and BatchNorm (the paper)",
        choices=("all", "weights"),
    )

    _S = "sparsity"
    groups: tuple[str, ...] = setting(
        _S,
        "structured groups to prune: filters, input channels, GEMM columns (shape), or coupled "
        "channels, which can be removed; several are composed in this order",
        choices=("filter", "channel", "shape", "coupled"),
        of="prunes_groups",
    )
    keep_ratio: tuple[float, ...] = setting(
        _S,
        "fraction to keep (see --keep-by), one for all groups or one per kind",
        above=0,
        high=1,
        of="keeps_a_share",
    )
    layer_keep_ratio: tuple[str, ...] = setting(
        _S,
        "PATTERN=RATIO for parameters whose name matches; the last match wins",
        optional=True,
        of="prunes_groups",
        metavar="PATTERN=RATIO",
    )
    round_to: int = setting(
        _S, "round the number of kept groups up to a multiple of this", low=1, of="prunes_groups"
    )
    mask_agreement: str = setting(
        _S,
        "vote: keep the groups with the largest summed energy; or: union of the nodes' masks "
        "(the paper)",
        choices=("or", "vote"),
        of="consensus nodes",
    )
    keep_by: str = setting(
        _S,
        "what --keep-ratio counts: groups of each layer, or (coupled groups) parameters or "
        "multiply-adds of the model",
        choices=("groups", "parameters", "multiply-adds"),
        of="prunes_groups",
    )
    keep_floor: float = setting(
        _S,
        "minimum fraction of groups kept in each layer, with a budget over the model",
        low=0,
        high=1,
        of="prunes_groups",
    )
    score: str = setting(
        _S,
        "importance score of groups: magnitude, or squared gradients of a gate on each coupled "
        "channel",
        choices=("magnitude", "gates"),
        of="prunes_groups nodes",
        off="magnitude",
    )
    dropped: str = setting(
        _S,
        "groups dropped before the freeze: cut from theta at once, or shrunk to zero until the "
        "freeze, so that they may return",
        "cut",
        choices=("cut", "shrink"),
        of="consensus nodes",
    )
    warmup_iterations: int = setting(
        _S,
        "dense outer iterations at the start, a count or a fraction such as 7/16",
        share=True,
        of="consensus",
    )
    keep_ramp_iterations: int = setting(
        _S,
        "outer iterations in which the keep ratio falls to its target, a count or a fraction",
        share=True,
        of="consensus",
    )
    freeze_iteration: int = setting(
        _S,
        "outer iteration that freezes the masks, a count or a fraction, 0 for never",
        share=True,
        of="consensus",
    )
    freeze_drift: float = setting(
        _S,
        "freeze early once the fraction of changed groups is at most this; negative: off",
        of="consensus",
    )
    freeze_window: int = setting(
        _S, "consecutive outer iterations for --freeze-drift", low=1, of="consensus"
    )
    after_freeze: str = setting(
        _S,
        "training on the frozen masks: averaging (local-sgd) or with duals (admm)",
        choices=("local-sgd", "admm"),
        of="consensus",
    )
    remove_dropped: bool = setting(
        _S,
        "remove dropped coupled channels from the network after the freeze, for faster steps",
        of="shrinks",
        off=False,
    )

    _S = "consensus"
    theta_start: str = setting(
        _S,
        "where local parameters theta start each outer iteration: from the consensus z, or from "
        "theta (the paper)",
        choices=("z", "theta"),
        of="consensus",
    )
    node_sync: str = setting(
        _S,
        "average inside a node: gradients at each step, or parameters once per outer iteration "
        "(the paper)",
        choices=("step", "outer"),
        of="by_iteration nodes",
    )
    weight_decay_in: str = setting(
        _S,
        "apply weight decay to the local gradient (theta) or in the consensus (z)",
        choices=("theta", "z"),
        of="consensus",
    )
    bn: str = setting(
        _S,
        "BatchNorm statistics of z: averaged over ranks, or estimated anew while pruning and "
        "for evaluation (local-sgd: average)",
        choices=("average", "recalibrate"),
        of="by_iteration",
    )

    _S = "exchange"
    payload: str = setting(
        _S,
        "format of the exchange between nodes; below fp32: quantised differences with error "
        "feedback",
        choices=PAYLOADS,
        of="averages",
        off="fp32",
    )
    fragments: int = setting(
        _S,
        "parts of the message, sent at even distances between local steps (prunex: once frozen)",
        1,
        low=1,
        high=10**4,
        of="averages nodes",
        off=1,
    )
    overlap_steps: int = setting(
        _S,
        "local steps that overlap with the exchange between nodes, 0 for none",
        low=0,
        auto=True,
        of="averages nodes",
        off=0,
    )

    _S = "penalties"
    penalty: str = setting(
        _S,
        "schedule of the penalties rho1 and rho2",
        choices=("fixed", "ramp", "balance"),
        of="consensus",
    )
    rho1: float = setting(_S, "initial penalty inside a node", above=0, of="consensus")
    rho2: float = setting(_S, "initial penalty between nodes", above=0, of="consensus nodes")
    rho_max: float = setting(_S, "upper bound of the penalties", above=0, of="consensus")
    rho_factor: float = setting(_S, "factor of one change of a penalty", above=1, of="consensus")
    eps_abs: float = setting(_S, "absolute tolerance of the residuals", low=0, of="consensus")
    eps_rel: float = setting(_S, "relative tolerance of the residuals", low=0, of="consensus")
    residuals: str = setting(
        _S,
        "when residuals are computed",
        choices=("every", "evaluate", "off"),
        of="consensus",
    )

    _S = "exchange"
    aggregation: str = setting(
        _S,
        "gradients between nodes are sent by all ranks (flat) or by one leader per node",
        "flat",
        choices=("flat", "hierarchical"),
        of="per_step",
    )

    _S = "machine"
    device: str = setting(_S, "device to train on", "auto", choices=("auto", "cpu", "cuda"))
    amp: str = setting(_S, "mixed precision", "off", choices=("off", "bf16", "fp16"))
    channels_last: bool = setting(_S, "use NHWC memory format", False)
    compile: bool = setting(_S, "compile the model with torch.compile", False)
    bucket_mib: float = setting(_S, "bucket size of messages in MiB", 32.0, low=1e-4, high=2048)
    piece_kib: int = setting(
        _S,
        "piece size of messages between nodes, KiB per node, 0 for whole buckets",
        60,
        low=0,
        high=2**21,
    )
    mpi_buffers: str = setting(
        _S, "memory that MPI reads and writes", "auto", choices=("auto", "host", "device")
    )
    ranks_per_node: int = setting(
        _S, "make virtual nodes of this many consecutive ranks, 0 for the real nodes", 0, low=0
    )

    _S = "safety"
    resume: bool = setting(_S, "continue the run in --run-dir where there is one", False)
    checkpoint_every: str = setting(
        _S,
        "outer iterations between checkpoints; auto: below 2 % of the time; off: only on "
        "preemption",
        "auto",
        words=("auto", "off"),
    )
    timeout: float = setting(
        _S, "seconds without progress on any rank after which the job is aborted", 1800.0, low=1
    )
    time_limit: float = setting(
        _S,
        "seconds until the job checkpoints and exits, 0 for the end of the Slurm job",
        0.0,
        low=0,
    )
    on_node_loss: str = setting(
        _S,
        "stop, or continue with the other nodes from the last outer iteration, where the MPI can "
        "(Open MPI: mpirun --with-ft ulfm)",
        "stop",
        choices=("stop", "continue"),
    )
    min_nodes: int = setting(
        _S, "nodes below which a run that lost one writes a checkpoint and ends", 1, low=1
    )

    _S = "output"
    run_dir: str = setting(
        _S, "folder of the results; empty: a new one in runs/", "", optional=True, metavar="DIR"
    )
    progress: str = setting(
        _S,
        "auto: a bar on a terminal, lines elsewhere; on: a bar; off: nothing",
        "auto",
        choices=("auto", "on", "off"),
    )
    evaluate_every: int = setting(_S, "outer iterations between evaluations", low=1)
    tensorboard: bool = setting(_S, "also write the metrics for TensorBoard", False)
    trace: bool = setting(_S, "write trace.json, a timeline of all ranks for Perfetto", False)
    dry_run: bool = setting(
        _S, "print settings and message sizes, then exit without training", False
    )

    del _S
    options: Any = dataclasses.field(default=None, metadata=NOT_A_SETTING)
    estimate: "Estimate | None" = dataclasses.field(default=None, metadata=NOT_A_SETTING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Carry what `--dry-run` estimates the seconds of exchanges from."""

    _S = "dry-run"
    link_gbit: float = setting(
        _S,
        "estimate exchange times for links of this many Gbit/s, 0 for off",
        0.0,
        low=0,
        of="averages",
    )
    latency_us: float = setting(_S, "latency per message in us", 50.0, low=0, of="averages")
    copy_gbs: float = setting(
        _S,
        "memory bandwidth of copies in GB/s, 0 for a default by device",
        0.0,
        low=0,
        of="averages",
    )
    nodes: tuple[int, ...] = setting(
        _S, "numbers of nodes to estimate for", NODES, low=1, of="averages"
    )
    step_ms: float = setting(
        _S,
        "duration of a local step in ms, to estimate the communication share",
        0.0,
        low=0,
        of="averages",
    )
    del _S


# What means something to image files alone, and the data sets that are such files.
OF_FILES = ("data_mode", "workers", "skip_corrupt")
FROM_FILES = ("imagefolder", "webdataset")
# What means something to images alone, and to text alone.
OF_IMAGES = (
    *("stem", "image_size", "image_mean", "image_std", "augment"),
    *("transforms", "mixup", "cutmix", "channels_last"),
)
OF_TEXT = ("tokenizer", "context")
# What a data set has for a default where others have another: "" is the embedded text.
DATASET_DEFAULTS = {
    TEXT: {
        "data_dir": "",
        "model": "gpt_nano",
        "optimizer": "adamw",
        # With momentum, where AdamW is not taken: of 0.02 to 0.5 it learned most, 0.5 diverged.
        "lr": 0.05,
        "weight_decay_on": "weights",
        "groups": ("coupled",),
    }
}
# The data sets that --download fetches.
FETCHED = ("cifar10", "cifar100")
# What may change when a run is resumed: it describes the job and the machine, not the run.
OF_THE_JOB = (
    "run_dir",
    "resume",
    "checkpoint_every",
    "timeout",
    "time_limit",
    "on_node_loss",
    "min_nodes",
    "data_dir",
    "download",
    "data_mode",
    "workers",
    "skip_corrupt",
    "device",
    "mpi_buffers",
    "ranks_per_node",
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
