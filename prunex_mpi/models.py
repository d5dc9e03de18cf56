"""Build the networks that can be trained, by name."""

import importlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from prunex_mpi.errors import USAGE, UserError, one_line
from prunex_mpi.values import nearest

CIFAR_STEM_MAX_SIDE = 64  # "auto" gives images up to this side the stem that keeps their resolution
CIFAR_FAMILY = {f"resnet{depth}": depth for depth in (8, 20, 32, 44, 56, 110)}
STEMS = ("auto", "cifar", "imagenet")
# Without an explicit choice these two add auxiliary heads or warn about their initialisation.
WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


def build_model(name: str, *, num_classes: int, image_size: int, stem: str = "auto") -> nn.Module:
    """Build the classifier `name` with fresh weights, float32 on the CPU.

    `name` is a ResNet of the CIFAR family, a torchvision classifier, or `package.module:factory`,
    called as `factory(num_classes=..., image_size=...)`. The model maps [n, 3, image_size,
    image_size] to [n, num_classes]; this is tried once on a blank image, in evaluation mode.
    The weights are drawn from torch's global generator, which the caller seeds.

    Raises UserError (USAGE) for an unknown name, a stem the model does not have, a factory that
    cannot be imported or called, and a model that cannot take images of this size.
    """
    if stem not in STEMS:
        raise UserError(f"unknown stem {stem!r}: choose from {', '.join(STEMS)}", USAGE)
    build = _builder(name)
    try:
        model = build(num_classes, image_size, stem)
        _try_forward(model, num_classes, image_size)
    except UserError:
        raise
    # A size that does not fit shows as whatever the model's own code raises.
    except Exception as error:
        raise UserError(
            f"model {name} does not fit {num_classes} classes of {image_size}x{image_size} images "
            f"({one_line(error)}): choose another --model or --image-size",
            USAGE,
        ) from error
    return model


def model_names() -> list[str]:
    """Return every name that `build_model` knows, sorted; factories come on top."""
    return sorted({*CIFAR_FAMILY, *torchvision.models.list_models(module=torchvision.models)})


def _builder(name: str) -> Callable[[int, int, str], nn.Module]:
    if ":" in name:
        return lambda classes, side, stem: _from_factory(name, classes, side, stem)
    if name in CIFAR_FAMILY:
        return lambda classes, side, stem: _cifar_family(name, classes, stem)
    if name in model_names():
        return lambda classes, side, stem: _from_torchvision(name, classes, side, stem)
    raise UserError(
        f"unknown model {name!r}: did you mean {nearest(name, model_names())}? "
        "(any torchvision classifier, or package.module:factory)",
        USAGE,
    )


def _cifar_family(name: str, num_classes: int, stem: str) -> nn.Module:
    if stem == "imagenet":
        raise UserError(f"--stem imagenet does not fit {name}, which has a stem of its own", USAGE)
    return CifarResNet(CIFAR_FAMILY[name], num_classes)


def _from_torchvision(name: str, num_classes: int, image_size: int, stem: str) -> nn.Module:
    """Build a torchvision classifier, for small images with the stem of the CIFAR networks."""
    options: dict[str, object] = {}
    if name in WITH_AUXILIARY_HEADS:
        options = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        options = {"image_size": image_size}
    elif name == "maxvit_t":
        options = {"input_size": (image_size, image_size)}
    model = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
    is_resnet = isinstance(model, torchvision.models.ResNet)
    if stem == "cifar" and not is_resnet:
        raise UserError(
            f"--stem cifar fits torchvision's ResNet family, not {name}: leave --stem out", USAGE
        )
    if is_resnet and (stem == "cifar" or (stem == "auto" and image_size <= CIFAR_STEM_MAX_SIDE)):
        _set_cifar_stem(model)
    return model


def _set_cifar_stem(model: torchvision.models.ResNet) -> None:
    """Replace the 7x7 stem and the pooling, which shrink an image 4 times, by one 3x3 conv."""
    width = model.conv1.out_channels
    model.conv1 = nn.Conv2d(3, width, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


def _from_factory(name: str, num_classes: int, image_size: int, stem: str) -> nn.Module:
    if stem != "auto":
        raise UserError(
            f"--stem {stem} fits torchvision's ResNet family, not {name}: leave --stem out", USAGE
        )
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    # Importing runs the user's module, which can raise anything.
    except Exception as error:
        raise UserError(
            f"model {name}: cannot import {module_name!r} ({one_line(error)}): "
            "give package.module:factory with the package on PYTHONPATH",
            USAGE,
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise UserError(
            f"model {name}: {module_name} has no function {attribute!r} to build it", USAGE
        )
    model = factory(num_classes=num_classes, image_size=image_size)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model {name}: the factory returned {type(model).__name__}, not a torch.nn.Module",
            USAGE,
        )
    return model


def _try_forward(model: nn.Module, num_classes: int, image_size: int) -> None:
    """Run one blank image; evaluation mode leaves statistics and the generator untouched."""
    parameter = next(model.parameters(), torch.empty(0))
    blank = torch.zeros(1, 3, image_size, image_size, dtype=parameter.dtype)
    training = model.training
    model.eval()
    with torch.no_grad():
        output = model(blank.to(parameter.device))
    model.train(training)
    if not isinstance(output, Tensor) or output.shape != (1, num_classes):
        found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"it returns {found} for one image, not [1, {num_classes}]")


class BasicBlock(nn.Module):
    """Add two 3x3 convolutions to a shortcut without parameters (option A of the paper)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.new_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map float [n, c_in, h, w] to [n, c_out, h / stride, w / stride]."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride] if self.stride > 1 else x
        # Zeros go after the old channels, so that channel c stays channel c across the shortcut.
        if self.new_channels:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(out + shortcut)


class CifarResNet(nn.Module):
    """Stack 6n+2 layers for small images (He et al. 2016, section 4.2)."""

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.fc = nn.Linear(64, num_classes)
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
