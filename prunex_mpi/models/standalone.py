"""Build a pruned network from its files with nothing but torch, torchvision and safetensors.

    from load_model import load
    network = load("RUN/model")

Export writes this file and `slim` beside the network as one, load_model.py, which imports nothing
of prunex_mpi.
`plan.json` says which network it was and the sizes that pruning left, `model.safetensors` holds the
weights.
"""

import importlib
import inspect
import json
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from prunex_mpi.models.gpt import Gpt, gpt_shape
from prunex_mpi.models.inputs import inputs_from
from prunex_mpi.models.slim import (
    ATTENTIONS,
    BATCH_NORMS,
    CALLS,
    CONVOLUTIONS,
    NORM_FEATURES,
    SlimAttention,
    SlimNorm,
    correct_calls_,
)

# Numbers of modules and shapes of their tensors: {module: {attribute: number or shape}}. Under
# `CALLS` are the numbers for torch calls of the module's code.
Sizes = dict[str, dict[str, Any]]

FORMAT = 8
# Places of a transformer, each with weights of its own.
MOST_PATCHES = 2**18
MODEL, PLAN = "model.safetensors", "plan.json"
# Of the largest output, or of 1: other processors and versions round otherwise.
PROBE_TOLERANCE = 2e-2
# Depth and the channels of the first stage: 16, or W in networks named -wW.
CIFAR_FAMILY = {
    f"resnet{depth}" + f"-w{width}" * (width != 16): (depth, width)
    for depth in (8, 20, 32, 44, 56, 110)
    for width in (2, 3, 4, 6, 8, 11, 12, 16, 24, 32)
}
# torchvision's ResNet-18, of fewer channels than 64 in its first stage.
NARROW_RESNETS = {f"resnet18-w{width}": width for width in (8, 16, 32)}
SMALL_VIT, SMALL_VGG = "vit_tiny", "vgg19_small"
# Channels of the convolutions of VGG-19; between its stages the resolution is halved.
VGG19 = ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4)
# These two need explicit options, or they have auxiliary heads and warn about initialisation.
WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


def load(folder: str | Path) -> nn.Module:
    """Return the network that was exported to `folder`, on the CPU, in evaluation mode.

    It maps [n, 3, image_size, image_size], scaled to 0..1 and normalised by the mean and std of the
    plan, to [n, num_classes]. A network of `package.module:factory` needs that module to be
    importable. Raises ValueError for a plan of another format, for files that are none, such as
    pipes, and for others than were written; RuntimeError for weights that do not fit the plan, and
    where the network computes something else than it did.
    """
    folder = Path(folder)
    for name in (PLAN, MODEL):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is no file")
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    if plan["format"] != FORMAT:
        raise ValueError(f"{folder / PLAN} has format {plan['format']}, this file reads {FORMAT}")
    if plan.get("crc32", found := checksum(folder / MODEL)) != found:
        raise ValueError(f"{folder / MODEL} is damaged, or of another export than {PLAN}")
    model = build(plan["model"])
    resize_(model, plan["layers"])
    fill_(model, load_file(folder / MODEL))
    model.eval()
    if moved := by_how_much(model, plan["model"], plan.get("probe")):
        raise RuntimeError(
            f"{plan['model']['name']} does not compute what it did when it was exported (outputs "
            f"differ by {moved}): put its source back as it was"
        )
    return model


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            found = zlib.crc32(chunk, found)
    return found


def by_how_much(
    model: nn.Module, description: Mapping[str, Any], logits: list[float] | None
) -> str:
    """Return how far outputs are from the `logits` of a fixed input, "" for rounding or no logits.

    The model is in evaluation mode.
    """
    if logits is None:
        return ""
    inputs = inputs_from(description)
    with torch.no_grad():
        now = inputs.fingerprint(model(inputs.ramp(next(model.parameters()))))
    if len(now) != len(logits):
        return "their number"
    found, wanted = (torch.tensor(numbers, dtype=torch.float64) for numbers in (now, logits))
    apart = float((found - wanted).abs().max())
    return "" if apart <= PROBE_TOLERANCE * max(1.0, float(wanted.abs().max())) else f"{apart:.2g}"


def fill_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load a whole state dict into `model`; raise RuntimeError unless names and sizes fit."""
    state = OrderedDict(tensors)
    # Some modules take a state dict without a version for one of an older version.
    state._metadata = model.state_dict()._metadata
    model.load_state_dict(state, strict=True)


# --------------------------------------------------------------------------------------------------
# Networks by name
# --------------------------------------------------------------------------------------------------


def _taken(factory: Callable[..., Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return which of `sizes` a factory of models gets: the first, and the others that it takes."""
    try:
        parameters = inspect.signature(factory).parameters
    # Some functions written in C have no signature.
    except (TypeError, ValueError):
        return dict(sizes)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(sizes)
    first = next(iter(sizes))
    return {name: size for name, size in sizes.items() if name == first or name in parameters}


def build(description: Mapping[str, Any]) -> nn.Module:
    """Return a network of full size with fresh weights, on the CPU, in training mode.

    `description` holds name, the sizes of inputs and stem ("cifar", "imagenet", or "" for networks
    that have only one), and a config where it is of transformers. Raises ValueError for a name or
    sizes that it can't be.
    """
    name, inputs = description["name"], inputs_from(description)
    if "config" in description:
        return OfTransformers(description["config"], inputs.classes)
    if ":" in name:
        module, _, factory = name.partition(":")
        try:
            make = getattr(importlib.import_module(module), factory)
        except ModuleNotFoundError as error:
            lacking = (
                f"{error}: the network is {name}, whose file has to lie in a folder of sys.path"
            )
            raise ModuleNotFoundError(lacking) from None
        model = make(**_taken(make, inputs.sizes()))
        if isinstance(model, nn.Module) and any(
            nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())
        ):
            training = model.training
            model.eval()
            with torch.no_grad():
                model(inputs.zeros(torch.empty(0)))
            model.train(training)
        return model
    if (shape := gpt_shape(name)) is not None:
        return Gpt(shape, description["vocab_size"], description["context"])
    side, classes = inputs.side, inputs.classes
    if name in CIFAR_FAMILY:
        return CifarResNet(*CIFAR_FAMILY[name], classes)
    if name == SMALL_VGG:
        return SmallVgg(VGG19, classes)
    if name == SMALL_VIT:
        if (side // 4) ** 2 > MOST_PATCHES:
            raise ValueError(f"{side} pixels are too many for {name}")
        shape = {"num_layers": 6, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 768}
        return _torchvision().VisionTransformer(side, 4, **shape, num_classes=classes)
    if name in NARROW_RESNETS:
        model = _narrow_resnet18(NARROW_RESNETS[name], classes)
    else:
        model = _of_torchvision(name, side, classes)
    if description["stem"] == "cifar":
        set_cifar_stem_(model)
    return model


def _torchvision() -> Any:
    # Here, for who resizes a model of another library alone.
    import torchvision

    return torchvision.models


def _of_torchvision(name: str, side: int, classes: int) -> nn.Module:
    """Return a classifier of torchvision with fresh weights; raise ValueError for others."""
    # Others, of detection or segmentation, would download weights.
    models = _torchvision()
    if name not in models.list_models(module=models):
        raise ValueError(f"{name} is not a classifier of torchvision")
    options: dict[str, object] = {}
    if name in WITH_AUXILIARY_HEADS:
        options = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": side}
    elif name == "maxvit_t":
        options = {"input_size": (side, side)}
    return models.get_model(name, weights=None, num_classes=classes, **options)


def set_cifar_stem_(model: nn.Module) -> None:
    """Replace the 7x7 stem and the pooling, which shrink an image 4 times, by one 3x3 conv."""
    width = model.conv1.out_channels
    model.conv1 = nn.Conv2d(3, width, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def _narrow_resnet18(width: int, num_classes: int) -> nn.Module:
    """Return a ResNet-18 with `width` channels in its first stage, 2, 4, 8 times as many later.

    torchvision's own option changes the widths inside bottlenecks alone.
    """
    resnet = _torchvision().resnet

    class NarrowResNet18(resnet.ResNet):
        def __init__(self) -> None:
            super().__init__(resnet.BasicBlock, [2, 2, 2, 2])
            self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
            self.bn1 = nn.BatchNorm2d(width)
            self.fc = nn.Linear(8 * width, num_classes)

        def _make_layer(
            self, block: type[nn.Module], planes: int, blocks: int, **options: Any
        ) -> nn.Sequential:
            if planes == 64:
                # What the stem hands over.
                self.inplanes = width
            return super()._make_layer(block, planes * width // 64, blocks, **options)

    return NarrowResNet18()


class OfTransformers(nn.Module):
    """A language model of transformers, of fresh weights in float32, that returns its logits."""

    def __init__(self, config: Mapping[str, Any], vocabulary: int) -> None:
        super().__init__()
        # Here, for who has it not and loads another network.
        from transformers import AutoConfig, AutoModelForCausalLM

        known = AutoConfig.for_model(**config)
        # It runs no code that a config names.
        how = {"dtype": torch.float32, "trust_remote_code": False}
        self.network = AutoModelForCausalLM.from_config(known, **how)
        self.vocabulary = vocabulary

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens int64 [n, length] to logits [n, length, vocabulary] of those that follow."""
        logits = self.network(tokens, use_cache=False).logits
        # Some have more of them than their tokenizer, up to a round number.
        return logits if logits.shape[-1] == self.vocabulary else logits[..., : self.vocabulary]


class BasicBlock(nn.Module):
    """Add two 3x3 convolutions to a shortcut without parameters (option A of the paper)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map float [n, c_in, h, w] to [n, c_out, h / stride, w / stride]."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride] if self.stride > 1 else x
        # Zeros go after the old channels, so that channel c stays channel c across the shortcut. A
        # pruned network has other widths than those it was built with.
        new_channels = out.shape[1] - shortcut.shape[1]
        if new_channels:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, new_channels))
        return F.relu(out + shortcut)


class CifarResNet(nn.Module):
    """Stack 6n+2 layers for small images (He et al. 2016, section 4.2); `width` is 16 there."""

    def __init__(self, depth: int, width: int, num_classes: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, blocks, stride=1)
        self.layer2 = _stage(width, 2 * width, blocks, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, blocks, stride=2)
        self.fc = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map float images [n, 3, h, w] to logits [n, num_classes]."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean(dim=(2, 3)))


def _stage(in_channels: int, out_channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, out_channels, stride)
    rest = [BasicBlock(out_channels, out_channels, 1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)


class SmallVgg(nn.Module):
    """Stack 3x3 convolutions with BatchNorm (Simonyan and Zisserman 2015) for small images.

    One linear layer classifies the mean over what is left of the image, as in GraSP's VGG-19.
    """

    def __init__(self, stages: tuple[tuple[int, ...], ...], num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for number, widths in enumerate(stages):
            if number:
                layers.append(nn.MaxPool2d(2))
            for width in widths:
                conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
                layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map float images [n, 3, h, w] to logits [n, num_classes]; h and w are 16 or more."""
        return self.fc(self.features(x).mean(dim=(2, 3)))


# --------------------------------------------------------------------------------------------------
# Smaller sizes
# --------------------------------------------------------------------------------------------------


def resize_(model: nn.Module, sizes: Sizes, grows: bool = False) -> None:
    """Resize the modules named in `sizes`; tensors of another shape lose their values.

    Attention has num_heads and embed_dim, norms of all channels `NORM_FEATURES`, others shapes of
    their tensors and numbers that do not follow from these. What several modules share they go on
    to share. Raises ValueError where a module lacks what is stated, or would become larger unless
    it `grows`.
    """
    shared = names_of_shared(model.named_parameters(remove_duplicate=False))
    for name, stated in sizes.items():
        module = smaller = model.get_submodule(name)
        stated = dict(stated)
        calls = stated.pop(CALLS, None)
        if isinstance(module, ATTENTIONS):
            smaller = SlimAttention.fitting(module, **stated) if stated else module
        elif NORM_FEATURES in stated:
            smaller = SlimNorm.fitting(module, stated[NORM_FEATURES])
        else:
            _resize_alone_(module, stated, grows)
        if calls is not None:
            correct_calls_(smaller, calls)
        if smaller is not module:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, smaller)
    for first, *others in shared:
        for name in others:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, model.get_parameter(first))


def names_of_shared(named: Iterable[tuple[str, Tensor]]) -> list[list[str]]:
    """Return the names of each tensor that has several among those `named`."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return [every for every in names.values() if len(every) > 1]


def _resize_alone_(
    module: nn.Module, stated: Mapping[str, int | Sequence[int]], grows: bool
) -> None:
    """Give `module` what is stated, and torch's own the numbers that follow from their weight."""
    for key, size in stated.items():
        if not hasattr(module, key):
            raise ValueError(f"a {type(module).__name__} has no {key}")
        old = getattr(module, key)
        if not isinstance(size, int):
            _reallocate_(module, key, tuple(size), grows)
        elif not grows and isinstance(old, int) and size > old:
            raise ValueError(f"a {type(module).__name__} has {key} {old}, not {size}")
        else:
            setattr(module, key, size)
    if isinstance(module, CONVOLUTIONS):
        module.out_channels = len(module.weight)
        module.in_channels = module.weight.shape[1] * module.groups
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.GroupNorm) and module.affine:
        module.num_channels = len(module.weight)
    elif isinstance(module, BATCH_NORMS) and module.affine:
        module.num_features = len(module.weight)
        for statistics in ("running_mean", "running_var"):
            _reallocate_(module, statistics, tuple(module.weight.shape), grows)


def _reallocate_(module: nn.Module, attribute: str, shape: tuple[int, ...], grows: bool) -> None:
    """Replace a parameter or buffer, unless it is None, by one of another shape, of zeros."""
    old = getattr(module, attribute)
    if old is None or tuple(old.shape) == shape:
        return
    if not grows and math.prod(shape) > old.numel():
        raise ValueError(f"{attribute} {list(shape)} is larger than it was, {list(old.shape)}")
    new = old.detach().new_zeros(shape)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    setattr(module, attribute, new)
