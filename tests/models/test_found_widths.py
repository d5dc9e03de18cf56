"""Networks of the widths that an export has found, from scratch."""

import json
from pathlib import Path

import pytest
import torch

from prunex_mpi.base.errors import UserError
from prunex_mpi.models.build import build_model
from prunex_mpi.models.found_widths import fresh
from prunex_mpi.models.inputs import Images, Tokens
from prunex_mpi.models.standalone import FORMAT

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
