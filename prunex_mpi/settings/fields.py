"""Name the settings of a run: one frozen dataclass, whose fields carry the rules of their values.

Each value has one home. What describes the machine, the data and the output has its default
here; what makes up the training recipe has none here and is set by the preset `recipe`. What one
method alone has is declared with the method (`Settings.options`).
"""

import dataclasses
from fractions import Fraction
from functools import partial
from typing import Any

from prunex_mpi.settings.method import Method
from prunex_mpi.settings.values import setting

CROSS_ENTROPY = "cross-entropy"
TEXT = "text"
PRESETS = ("recipe", "paper", "thin", "small", "finetune", "text")
# As data/batches.py has them.
TRANSFORMS = (
    *("trivial-augment", "rand-augment", "auto-augment", "color-jitter", "grayscale"),
    *("gaussian-blur", "random-erasing"),
)
# How phase 4 sends: plain float32, other formats, or integers of so many bits with shared scales.
PAYLOADS = ("fp32", "fp16", "bf16", "int8", "int4", "int2")
# Below it no penalty is halved: repeated halving would end at zero.
RHO_MIN, RHO_MAX = 1e-6, 10.0
# What a run's settings hold beside the settings that methods share.
NOT_A_SETTING = {"section": ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Carry every setting of a run, checked and resolved.

    Field `a_b` is the flag `--a-b` and the TOML key `a-b`. `options` holds what the method has
    alone, an instance of `method.options`: its field `c` is the flag `--METHOD-c` and the key `c`
    of the table `[METHOD]`. What means nothing to the method is as the recipe has it. Build one
    with `resolve.make`, `resolve.with_overrides` or `cli.parse`: these convert, check and resolve,
    the constructor does not.
    """

    _setting = partial(setting, "model")
    preset: str = _setting("named set of defaults", "recipe", choices=PRESETS)
    method: Method = dataclasses.field(metadata=NOT_A_SETTING)
    model: str = _setting(
        "resnet20 (resnet20-w8: half as wide), resnet18, ..., a torchvision classifier, "
        "package.module:factory, or hf:FOLDER that transformers has saved",
        "resnet20",
    )
    stem: str = _setting(
        "first layers of torchvision's ResNets; auto: cifar for images of up to 64 pixels",
        "auto",
        choices=("auto", "cifar", "imagenet"),
    )
    seed: int = _setting("seed of initial weights, shuffles and augmentation", 0, low=0)
    init_from: str = _setting(
        "trained weights to start from: a file, the folder of a run, or torchvision for its own",
        "",
        optional=True,
        metavar="FILE|DIR|torchvision",
    )
    init_digest: str = _setting(
        "SHA-256 that the file of --init-from must have; filled in by the run", "", optional=True
    )

    _setting = partial(setting, "data")
    dataset: str = _setting(
        "data set; digits and text are embedded, a function returns a map-style torch Dataset",
        "digits",
        choices=("digits", "cifar10", "cifar100", "imagefolder", "webdataset", "synthetic", TEXT),
        named="package.module:factory",
    )
    data_dir: str = _setting(
        "folder of the data; of text it may be a file, and without it the embedded one is taken",
        "data",
        optional=True,
        metavar="DIR|FILE",
    )
    download: bool = _setting("fetch cifar10 or cifar100 where it is missing", False)
    train_samples: int = _setting(
        "number of training images, or windows of text, to use, 0 for all", 0, low=0
    )
    test_samples: int = _setting(
        "number of test images, or windows of text, to use, 0 for all", 0, low=0
    )
    val_split: float = _setting(
        "fraction of the training images of each class, or of the text's end, held out for "
        "validation: the best network on them is delivered, and tested once",
        0.0,
        low=0,
        below=1,
    )
    test_data: bool = _setting(
        "open the test data; without them, the best network on --val-split is left to evaluate",
        True,
    )
    tokenizer: str = _setting(
        "what text is cut into: bytes, chars, or as a tokenizer.json of Hugging Face says",
        "bytes",
        metavar="bytes|chars|FILE",
    )
    context: int = _setting("tokens of a window of text", 256, low=1, high=2**20)
    image_size: int = _setting("image side in pixels, 0 for the data's own", 0, low=0, high=4096)
    image_mean: tuple[float, ...] = _setting(
        "mean of red, green and blue in 0..1 for normalisation; none: that of --init-from, else "
        "of the data",
        (),
        optional=True,
    )
    image_std: tuple[float, ...] = _setting(
        "standard deviation for normalisation, with --image-mean", (), optional=True, above=0
    )
    data_mode: str = _setting(
        "decode image files into memory at the start, or while training (stream); auto: stream "
        "where those of a machine's ranks take more than 4 GiB",
        "auto",
        choices=("memory", "stream", "auto"),
    )
    workers: int = _setting(
        "decoding threads per rank, 0 for the rank's share of the cores", 0, low=0, high=256
    )
    augment: str = _setting(
        "auto: padded random crops and flips; resized-crop: random resized crops and flips",
        "auto",
        choices=("auto", "off", "resized-crop"),
    )
    transforms: tuple[str, ...] = _setting(
        "torchvision v2 transforms of training images, in this order",
        (),
        optional=True,
        choices=TRANSFORMS,
    )

    _setting = partial(setting, "training")
    outer_iterations: int = _setting(
        "length of the run in outer iterations: local steps, then one exchange", low=1, high=10**6
    )
    local_epochs: Fraction = _setting("epochs per outer iteration, such as 5 or 1/4", low=0)
    local_steps: int = _setting(
        "local steps per outer iteration, in place of --local-epochs (0: off); auto: as few as "
        "--comm-share allows",
        low=0,
        auto=True,
    )
    comm_share: float = _setting(
        "fraction of the time that the exchange may take, for --local-steps auto",
        above=0,
        below=1,
        of="by_iteration",
    )
    batch_size: int = _setting("images, or windows of text, per rank and local step", low=1)
    lr: float = _setting("peak learning rate (adamw, muon: 0.001)", above=0)
    lr_schedule: str = _setting("learning rate schedule", choices=("constant", "cosine", "step"))
    warmup_ratio: float = _setting(
        "linear warm-up of the learning rate, as a fraction of all steps", low=0, below=1
    )
    min_lr_ratio: float = _setting(
        "final learning rate of the cosine schedule, as a fraction of --lr", low=0, high=1
    )
    momentum: float = _setting(
        "momentum of SGD and Muon, beta 1 of AdamW", low=0, below=1, of="momentum"
    )
    beta2: float = _setting(
        "beta 2 of AdamW, and of what Muon leaves to it; language models take 0.95 to 0.99",
        0.999,
        low=0,
        below=1,
        of="optimizer",
    )
    weight_decay: float = _setting("weight decay lambda (adamw, muon, decoupled: 0.05)", low=0)
    optimizer: str = _setting(
        "optimizer of the local steps, or of the step on the mean gradient",
        "sgd",
        choices=("sgd", "adamw", "muon"),
        of="optimizer",
    )
    inner_momentum: str = _setting(
        "keep or reset the optimizer's momentum at each exchange (diloco with sgd: reset)",
        "keep",
        choices=("keep", "reset"),
        of="local_sgd",
    )
    loss: str = _setting(
        "cross-entropy, or package.module:function of outputs and labels", CROSS_ENTROPY
    )
    teacher: str = _setting(
        "trained network for distillation: the folder of a run, or a weights file of --model",
        "",
        optional=True,
        metavar="FILE|DIR",
    )
    teacher_digest: str = _setting(
        "SHA-256 that the file of --teacher must have; filled in by the run", "", optional=True
    )
    distillation_alpha: float = _setting("weight of the distillation loss", 0.5, above=0, high=1)
    distillation_tau: float = _setting("temperature of the distillation loss", 4.0, above=0)
    clip_grad: float = _setting(
        "clip the gradient norm of each step to this value, 0 for off",
        0.0,
        low=0,
        of="steps_on_gradient",
    )
    model_ema_decay: float = _setting(
        "decay per outer iteration of the moving average of z that is evaluated and delivered, "
        "0 for off",
        0.0,
        low=0,
        below=1,
    )
    weight_decay_on: str = _setting(
        "parameters that decay: all, or weights without biases and BatchNorm (the paper)",
        choices=("all", "weights"),
    )

    _setting = partial(setting, "sparsity")
    groups: tuple[str, ...] = _setting(
        "structured groups to prune: filters, input channels, GEMM columns (shape), kernels, 5 of "
        "9 weights of 3x3 kernels (pattern), or coupled channels, which can be removed; several "
        "are composed in this order",
        choices=("filter", "channel", "shape", "kernel", "pattern", "coupled"),
        of="prunes_groups",
    )
    keep_ratio: tuple[float, ...] = _setting(
        "fraction to keep (see --keep-by), one for all groups or one per kind but pattern",
        above=0,
        high=1,
        of="keeps_a_share",
    )
    mask_agreement: str = _setting(
        "vote: keep the groups with the largest summed energy; or: union of the nodes' masks "
        "(the paper)",
        choices=("or", "vote"),
        of="consensus nodes",
    )
    keep_by: str = _setting(
        "what --keep-ratio counts: groups of each layer, or (coupled groups) parameters or "
        "multiply-adds of the model",
        choices=("groups", "parameters", "multiply-adds"),
        of="prunes_groups",
    )
    keep_floor: float = _setting(
        "minimum fraction of groups kept in each layer, with a budget over the model",
        low=0,
        high=1,
        of="prunes_groups",
    )
    score: str = _setting(
        "importance score of groups: magnitude, or squared gradients of a gate on each coupled "
        "channel",
        choices=("magnitude", "gates"),
        of="prunes_groups nodes",
    )
    warmup_iterations: int = _setting(
        "dense outer iterations at the start, a count or a fraction such as 1/8",
        share=True,
        of="consensus",
    )
    keep_ramp_iterations: int = _setting(
        "outer iterations in which the keep ratio falls to its target, a count or a fraction",
        share=True,
        of="consensus",
    )
    freeze_iteration: int = _setting(
        "outer iteration that freezes the masks, a count or a fraction, 0 for never",
        share=True,
        of="consensus",
    )
    freeze_drift: float = _setting(
        "freeze early once the fraction of changed groups is at most this; negative: off",
        of="consensus",
    )
    after_freeze: str = _setting(
        "training on the frozen masks: averaging (local-sgd) or with duals (admm)",
        choices=("local-sgd", "admm"),
        of="consensus",
    )
    remove_dropped: bool = _setting(
        "remove dropped coupled channels from the network after the freeze, for faster steps",
        of="shrinks",
    )

    _setting = partial(setting, "consensus")
    theta_start: str = _setting(
        "where local parameters theta start each outer iteration: from the consensus z, or from "
        "theta (the paper)",
        choices=("z", "theta"),
        of="consensus",
    )
    node_sync: str = _setting(
        "average inside a node: gradients at each step, or parameters once per outer iteration "
        "(the paper)",
        choices=("step", "outer"),
        of="by_iteration nodes",
    )
    weight_decay_in: str = _setting(
        "apply weight decay to the local gradient (theta) or in the consensus (z)",
        choices=("theta", "z"),
        of="consensus",
    )
    bn: str = _setting(
        "BatchNorm statistics of z: averaged over ranks, or estimated anew while pruning and "
        "for evaluation (local-sgd: average)",
        choices=("average", "recalibrate"),
        of="by_iteration",
    )

    _setting = partial(setting, "exchange")
    payload: str = _setting(
        "format of the exchange between nodes; below fp32: quantised differences with error "
        "feedback",
        choices=PAYLOADS,
        of="averages",
    )
    fragments: int = _setting(
        "parts of the message, sent at even distances between local steps (prunex: once frozen)",
        1,
        low=1,
        high=10**4,
        of="averages nodes",
    )
    overlap_steps: int = _setting(
        "local steps that overlap with the exchange between nodes, 0 for none",
        low=0,
        auto=True,
        of="averages nodes",
    )
    aggregation: str = _setting(
        "gradients between nodes are sent by all ranks (flat) or by one leader per node",
        "flat",
        choices=("flat", "hierarchical"),
        of="per_step",
    )

    _setting = partial(setting, "penalties")
    penalty: str = _setting(
        "schedule of the penalties rho1 and rho2", choices=("fixed", "balance"), of="consensus"
    )
    rho1: float = _setting("initial penalty inside a node", above=0, of="consensus")
    rho2: float = _setting("initial penalty between nodes", above=0, of="consensus nodes")
    eps_abs: float = _setting("absolute tolerance of the residuals", low=0, of="consensus")
    eps_rel: float = _setting("relative tolerance of the residuals", low=0, of="consensus")
    residuals: str = _setting(
        "when residuals are computed", choices=("every", "evaluate", "off"), of="consensus"
    )

    _setting = partial(setting, "machine")
    device: str = _setting("device to train on", "auto", choices=("auto", "cpu", "cuda"))
    amp: str = _setting("mixed precision", "off", choices=("off", "bf16", "fp16"))
    channels_last: bool = _setting("use NHWC memory format", False)
    compile: bool = _setting("compile the model with torch.compile", False)
    piece_kib: int = _setting(
        "piece size of messages between nodes, KiB per node, 0 for whole buckets",
        60,
        low=0,
        high=2**21,
    )
    mpi_buffers: str = _setting(
        "memory that MPI reads and writes", "auto", choices=("auto", "host", "device")
    )
    ranks_per_node: int = _setting(
        "make virtual nodes of this many consecutive ranks, 0 for the real nodes", 0, low=0
    )
    rack_of: str = _setting(
        "add up in racks first, for a link between them that is thinner still: a pattern of host "
        "names whose group is the rack, such as (.*)-node, consecutive nodes per rack, or slurm "
        "for its topology",
        "",
        optional=True,
        metavar="PATTERN|N|slurm",
        of="averages nodes",
    )

    _setting = partial(setting, "safety")
    resume: bool = _setting("continue the run in --run-dir where there is one", False)
    checkpoint_every: str = _setting(
        "outer iterations between checkpoints; auto: below 2 % of the time; off: only on "
        "preemption",
        "auto",
        words=("auto", "off"),
    )
    timeout: float = _setting(
        "seconds without progress on any rank after which the job is aborted", 1800.0, low=1
    )
    time_limit: float = _setting(
        "seconds until the job checkpoints and exits, 0 for the end of the Slurm job", 0.0, low=0
    )
    on_node_loss: str = _setting(
        "stop, or continue with the other nodes, where the MPI can "
        "(Open MPI: mpirun --with-ft ulfm)",
        "stop",
        choices=("stop", "continue"),
    )
    min_nodes: int = _setting(
        "nodes below which a run that lost one writes a checkpoint and ends", 1, low=1
    )

    _setting = partial(setting, "output")
    run_dir: str = _setting(
        "folder of the results; empty: a new one in runs/", "", optional=True, metavar="DIR"
    )
    progress: str = _setting(
        "auto: log a line per outer iteration, and one each half minute within; off: none",
        "auto",
        choices=("auto", "off"),
    )
    evaluate_every: int = _setting("outer iterations between evaluations", low=1)
    trace: bool = _setting("write trace.json, and one per other rank, by torch's profiler", False)
    dry_run: bool = _setting("print settings and message sizes, then exit without training", False)

    del _setting
    options: Any = dataclasses.field(default=None, metadata=NOT_A_SETTING)


# What means something to image files alone, and the data sets that are such files.
OF_FILES = ("data_mode", "workers")
FROM_FILES = ("imagefolder", "webdataset")
# What means something to images alone, and to text alone.
OF_IMAGES = (
    *("stem", "image_size", "image_mean", "image_std", "augment", "transforms"),
    "channels_last",
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
    *("run_dir", "resume", "checkpoint_every", "timeout", "time_limit", "on_node_loss"),
    *("min_nodes", "trace", "dry_run"),
    *("data_dir", "download", "data_mode", "workers", "device", "mpi_buffers"),
    *("ranks_per_node", "rack_of", "progress"),
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


def freezes(settings: Settings) -> bool:
    """Return whether the masks freeze, in an outer iteration that is known before or not."""
    return settings.freeze_iteration > 0 or settings.freeze_drift >= 0
