"""Names, sizes and stems of the networks."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from prunex_mpi.base.errors import USAGE, UserError
from prunex_mpi.models import standalone
from prunex_mpi.models.build import build_model, fresh, model_names
from prunex_mpi.models.gpt import GptShape, gpt_shape
from prunex_mpi.models.inputs import Images, Tokens
from prunex_mpi.models.standalone import FORMAT, BasicBlock


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def refuse(name: str, *, image_size: int = 32, stem: str = "auto") -> str:
    with pytest.raises(UserError) as caught:
        build_model(name, Images(image_size, 10), stem=stem)
    assert caught.value.exit_code == USAGE
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "stem", "parameters"),
    [
        ("resnet8", "auto", 75_290),
        # 288 w^2 + 97 w + 10 with w = 8 in place of 16.
        ("resnet8-w8", "auto", 19_218),
        ("resnet20", "auto", 269_722),
        ("resnet56", "auto", 853_018),
        ("vit_tiny", "auto", 2_693_578),
        # 16 convolutions without biases, with BatchNorm, and one linear layer of 512 inputs.
        ("vgg19_small", "auto", 20_035_018),
        ("resnet18", "cifar", 11_173_962),
        ("resnet18-w32", "cifar", 2_797_610),
        ("resnet152", "imagenet", 58_164_298),
    ],
)
def test_parameter_counts_are_those_of_the_literature(name, stem, parameters):
    assert count(build_model(name, Images(32, 10), stem=stem)) == parameters


def test_shortcut_keeps_old_channels_and_adds_zeros():
    block = BasicBlock(2, 4, stride=2).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(1, 2, 6, 6)
    out = block(x)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2])
    assert torch.equal(out[:, 2:], torch.zeros(1, 2, 3, 3))


@pytest.mark.parametrize(
    ("image_size", "stem", "kernel"),
    [(64, "auto", 3), (65, "auto", 7), (32, "imagenet", 7), (96, "cifar", 3)],
)
def test_stem_follows_image_size_unless_given(image_size, stem, kernel):
    model = build_model("resnet18", Images(image_size, 10), stem=stem)
    assert model.conv1.kernel_size == (kernel, kernel)
    assert isinstance(model.maxpool, nn.Identity) == (kernel == 3)


@pytest.mark.parametrize(
    ("name", "image_size"),
    [("mobilenet_v2", 32), ("vit_b_16", 32), ("googlenet", 64), ("shufflenet_v2_x0_5", 32)],
)
def test_other_torchvision_classifiers_return_plain_logits_silently(name, image_size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build_model(name, Images(image_size, 10))
    assert model.train()(torch.zeros(2, 3, image_size, image_size)).shape == (2, 10)


def test_names_are_classifiers_only():
    names = model_names()
    assert {"resnet20", "resnet18", "wide_resnet50_2", "vgg19_bn", "inception_v3"} <= set(names)
    assert "fcn_resnet50" not in names
    assert "fcn_resnet50" in refuse("fcn_resnet50")


def test_unknown_name_gets_the_nearest_one():
    assert "resnet20" in refuse("resnet-20")
    assert "wide_resnet50_2" in refuse("wideresnet50_2")


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("mobilenet_v2", "cifar"),
        ("resnet20", "imagenet"),
        ("vit_tiny", "imagenet"),
        ("vgg19_small", "cifar"),
    ],
)
def test_a_stem_that_does_not_fit_is_refused(name, stem):
    assert stem in refuse(name, stem=stem)


@pytest.mark.parametrize("name", ["alexnet", "vit_b_16"])
def test_images_too_small_for_the_model_are_refused(name):
    message = refuse(name, image_size=8)
    assert "8x8" in message
    assert name in message


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "LIMIT = 3\n"
        "def net(*, num_classes, image_size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))\n"
        "def of_any_size(num_classes, width=2):\n"
        "    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)\n"
        "    return nn.Sequential(nn.Conv2d(3, width, 1), *ends)\n"
        "def with_options(num_classes, **options): return net(num_classes=num_classes, **options)\n"
        "def number(*, num_classes, image_size): return num_classes\n"
        "def positional(): return nn.Identity()\n"
        "def headless(*, num_classes, image_size): return nn.Identity()\n"
    )
    (tmp_path / "broken_models.py").write_text("def net(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_models", None)


@pytest.mark.usefixtures("own_models")
def test_own_factory_is_called_with_classes_and_the_size_if_it_takes_it():
    model = build_model("own_models:net", Images(4, 5))
    assert count(model) == 5 * 48 + 5
    assert count(build_model("own_models:with_options", Images(4, 5))) == 245
    assert count(build_model("own_models:of_any_size", Images(4, 5))) == 8 + 15


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_package.models:net", "no_such_package"),
        ("broken_models:net", "SyntaxError"),
        ("own_models:missing", "missing"),
        ("own_models:LIMIT", "LIMIT"),
        ("own_models:", "no function"),
        (":net", "cannot import"),
        ("nets.py:small", "did you mean nets:small?"),
        ("own_models:number", "int"),
        ("own_models:positional", "num_classes"),
        ("own_models:headless", "[1, 3, 32, 32]"),
    ],
)
def test_bad_factories_are_refused_in_one_line(name, says):
    assert says in refuse(name)


def test_an_exported_network_names_the_module_that_it_lacks():
    with pytest.raises(ModuleNotFoundError, match="the network is nowhere:net, whose file has"):
        standalone.build({"name": "nowhere:net", **Images(8, 10).sizes(), "stem": ""})


@pytest.mark.usefixtures("own_models")
def test_a_factory_has_no_stem():
    assert "--stem cifar" in refuse("own_models:net", stem="cifar")


def test_a_narrow_transformer_has_fewer_heads_of_the_same_width():
    assert gpt_shape("gpt_nano-w64-gqa") == GptShape(4, 2, 64, frozenset({"gqa"}))
    assert gpt_shape("gpt_nano-w96") == GptShape(4, 3, 96)
    # Twelve matrices of 64 x 64 per block and nine norms; tokens, tied, and positions.
    assert count(build_model("gpt_nano-w64", Tokens(65, 64))) == 4 * 12 * 64**2 + 9 * 64 + 129 * 64


@pytest.mark.parametrize(
    "suffixes", ["w48", "w32-gqa", "w96-gqa", "w128", "w64-w64", "rms-rms", "x"]
)
def test_other_transformers_are_unknown(suffixes):
    assert gpt_shape(f"gpt_nano-{suffixes}") is None


# --------------------------------------------------------------------------------------------------
# A network of the widths that pruning has found
# --------------------------------------------------------------------------------------------------

# As export has it for a resnet8 whose last stage kept 5 of 64 channels inside its block.
LAYERS = {
    "layer3.0.conv1": {"weight": [5, 32, 3, 3], "groups": 1},
    "layer3.0.bn1": {"weight": [5], "bias": [5]},
    "layer3.0.conv2": {"weight": [64, 5, 3, 3], "groups": 1},
}
MODEL = {"name": "resnet8", "num_classes": 10, "image_size": 32, "stem": ""}


def write_plan(folder: Path, **changes: object) -> Path:
    plan = {"format": FORMAT, "model": MODEL, "layers": LAYERS, **changes}
    colours = [] if "vocab_size" in plan["model"] else [0.5, 0.5, 0.5]
    plan["normalisation"] = {"mean": colours, "std": colours}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def test_fresh_weights_are_those_of_the_whole_network_cut_and_scaled(tmp_path):
    write_plan(tmp_path)
    torch.manual_seed(3)
    found = fresh(tmp_path, num_classes=10, image_size=32)
    torch.manual_seed(3)
    whole = build_model("resnet8", Images(32, 10)).state_dict()
    left = found.state_dict()
    changed = {name for name in left if left[name].shape != whole[name].shape}
    assert {name.rpartition(".")[0] for name in changed} == LAYERS.keys()
    for name in left.keys() - changed:
        assert torch.equal(left[name], whole[name])
    block = whole["layer3.0.conv1.weight"][:5]
    assert torch.equal(left["layer3.0.conv1.weight"], block)
    # 64 inputs have become 5.
    wanted = whole["layer3.0.conv2.weight"][:, :5] * (64 / 5) ** 0.5
    torch.testing.assert_close(left["layer3.0.conv2.weight"], wanted)
    assert torch.equal(left["layer3.0.bn1.running_var"], torch.ones(5))
    assert found.training
    loss = found(torch.randn(4, 3, 32, 32)).square().mean()
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in found.parameters())


def test_fresh_embeddings_are_cut_and_not_scaled(tmp_path):
    layers = {
        "embedding": {"weight": [11, 64]},
        "positions": {"weight": [8, 64]},
        "blocks.0.mlp.up": {"weight": [512, 64]},
    }
    model = {"name": "gpt_nano", "vocab_size": 11, "context": 8}
    write_plan(tmp_path, model=model, layers=layers)
    torch.manual_seed(3)
    left = fresh(tmp_path, vocab_size=11, context=8).state_dict()
    torch.manual_seed(3)
    whole = build_model("gpt_nano", Tokens(11, 8)).state_dict()
    for name in ("embedding.weight", "positions.weight"):
        assert torch.equal(left[name], whole[name][:, :64])
    wanted = whole["blocks.0.mlp.up.weight"][:, :64] * 2**0.5
    torch.testing.assert_close(left["blocks.0.mlp.up.weight"], wanted)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 99}, "format 99"),
        ({"model": {**MODEL, "num_classes": 100}}, "is of 100 classes"),
        ({"model": {**MODEL, "image_size": 28}}, "of 28x28 images"),
    ],
)
def test_other_classes_or_images_are_refused(tmp_path, changes, reason):
    with pytest.raises(UserError, match=reason):
        fresh(write_plan(tmp_path, **changes), num_classes=10, image_size=32)


def test_a_folder_without_a_plan_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"plan\.json can't be read .* name an exported model"):
        fresh(tmp_path, num_classes=10, image_size=32)
