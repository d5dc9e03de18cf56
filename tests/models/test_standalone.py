"""The file that loads a smaller network: attention with fewer heads, sizes, broken plans."""

import ast
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from prunex_mpi.models import standalone
from prunex_mpi.models.slim import SlimAttention
from prunex_mpi.models.standalone import load, resize_
from prunex_mpi.tools.export_run import loader_source

RESNET8 = {"name": "resnet8", "num_classes": 10, "image_size": 8, "stem": ""}


def test_it_imports_only_what_a_stranger_has():
    tree = ast.parse(loader_source())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module.split(".")[0])
    # The last one for networks of its own.
    wanted = {"torch", "torchvision", "safetensors", "transformers"}
    assert names - set(sys.stdlib_module_names) == wanted


def attention(bias: bool = True) -> tuple[nn.MultiheadAttention, SlimAttention]:
    """Return an attention of 3 heads of 4, and the same in the other class, in float64."""
    torch.manual_seed(0)
    full = nn.MultiheadAttention(12, 3, bias=bias, batch_first=True).eval().double()
    with torch.no_grad():
        for p in full.parameters():
            p.normal_(0, 0.5)
    slim = SlimAttention(12, 3, 4, bias).eval().double()
    slim.load_state_dict(full.state_dict())
    return full, slim


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_attention_with_all_heads_is_torchs_own(bias):
    full, slim = attention(bias)
    x, y, z = torch.randn(3, 2, 5, 12, dtype=torch.float64)
    for q, k, v in ((x, x, x), (x, y, z)):
        wanted, _ = full(q, k, v, need_weights=False)
        found, nothing = slim(q, k, v, need_weights=False)
        assert nothing is None
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@torch.no_grad()
def test_attention_without_a_head_is_that_of_a_zero_head():
    full, _ = attention()
    rows = torch.arange(36).view(3, 3, 4)[:, [0, 2]].flatten()
    for part in (full.in_proj_weight, full.in_proj_bias):
        part.view(3, 3, 4, -1)[:, 1] = 0
    slim = SlimAttention.fitting(full, 2)
    state = {
        "in_proj_weight": full.in_proj_weight[rows],
        "in_proj_bias": full.in_proj_bias[rows],
        "out_proj.weight": full.out_proj.weight[:, rows[:8]],
        "out_proj.bias": full.out_proj.bias,
    }
    slim.load_state_dict(state, strict=True)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    wanted = full(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(slim(x, x, x)[0], wanted, rtol=0, atol=1e-12)
    assert slim(x, x, x, need_weights=True)[1] is None


@pytest.mark.parametrize(
    "options", [{"kdim": 6}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str
)
def test_variants_of_attention_are_refused(options):
    model = nn.Sequential(nn.MultiheadAttention(12, 3, **{"batch_first": True, **options}))
    with pytest.raises(ValueError, match="only attention of one width"):
        resize_(model, {"0": {"num_heads": 2}})


def test_modules_take_their_sizes():
    model = nn.Sequential(
        nn.Conv2d(3, 8, (3, 1), bias=False),
        nn.Conv2d(8, 16, 3, groups=8),
        nn.BatchNorm2d(16),
        nn.GroupNorm(8, 16),
        nn.Linear(16, 4),
        nn.MultiheadAttention(12, 3, batch_first=True),
    )
    model[4].weight.requires_grad_(False)
    resize_(
        model,
        {
            "0": {"weight": [5, 3, 3, 1], "groups": 1},
            "1": {"weight": [10, 1, 3, 3], "bias": [10], "groups": 5},
            "2": {"weight": [10], "bias": [10]},
            "3": {"weight": [10], "bias": [10], "num_groups": 5},
            "4": {"weight": [4, 10]},
            "5": {"num_heads": 3},
        },
    )
    shapes = [tuple(p.shape) for p in model[:5].parameters()]
    assert shapes == [(5, 3, 3, 1), (10, 1, 3, 3), *[(10,)] * 5, (4, 10), (4,)]
    assert model[0].out_channels == model[1].groups == model[1].in_channels == 5
    assert model[2].running_var.shape == (10,)
    assert model[2].num_features == model[3].num_channels == model[4].in_features == 10
    assert not model[4].weight.requires_grad
    assert isinstance(model[5], nn.MultiheadAttention)
    with pytest.raises(ValueError, match="a LayerNorm can't be made 2 wide"):
        resize_(nn.Sequential(nn.LayerNorm((2, 3))), {"0": {"norm_features": 2}})
    with pytest.raises(ValueError, match="a ReLU has no heads"):
        resize_(nn.Sequential(nn.ReLU()), {"0": {"heads": 2}})


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (nn.Linear(4, 2), {"weight": [2, 10**12]}),
        (nn.Conv2d(4, 4, 1), {"groups": 10**9}),
        (nn.LayerNorm(4), {"norm_features": 10**12}),
        (nn.MultiheadAttention(4, 2), {"num_heads": 10**12}),
    ],
    ids=["linear", "groups", "norm", "attention"],
)
def test_nothing_grows_by_a_plan_of_others(module, sizes):
    with pytest.raises(ValueError, match=r"not 10{9}|larger than it was|can't (be made|have) 10"):
        resize_(nn.Sequential(module), {"0": sizes})


def write(folder: Path, **changes: object) -> None:
    model = standalone.build(RESNET8)
    plan = {"format": standalone.FORMAT, "model": RESNET8, "layers": {}, **changes}
    (folder / standalone.PLAN).write_text(json.dumps(plan))
    save_file(model.state_dict(), folder / standalone.MODEL)


def test_another_format_and_weights_of_other_sizes_are_refused(tmp_path):
    write(tmp_path, format=99)
    with pytest.raises(ValueError, match="format 99"):
        load(tmp_path)
    write(tmp_path, layers={"fc": {"weight": [10, 60]}})
    with pytest.raises(RuntimeError, match=r"fc\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("name", [standalone.PLAN, standalone.MODEL])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, name):
    write(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is no file"):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "fasterrcnn_resnet50_fpn"},
        {"name": "fcn_resnet50"},
        {"num_classes": 2 * 10**9},
        {"num_classes": 10.0},
        {"image_size": 10**6},
        {"image_size": 0},
        {"name": "vit_tiny", "image_size": 8192},
    ],
)
def test_a_description_of_no_classifier_or_of_impossible_sizes_is_refused(changes):
    description = {"name": "resnet18", "num_classes": 10, "image_size": 32, "stem": "cifar"}
    with pytest.raises(ValueError, match=r"not (a classifier of torchvision|from 1 to)|too many"):
        standalone.build({**description, **changes})
