"""Export: the files of a run load without the package; what is wrong is one line and a code."""

import copy
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from jobs import run_job_here
from launch import run_python
from safetensors.torch import load_file, save_file
from torch import nn

from prunex_mpi import export
from prunex_mpi.base.errors import FAILURE, UNREADABLE, USAGE, UserError
from prunex_mpi.base.files import FORMAT
from prunex_mpi.config import cli
from prunex_mpi.models import standalone
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images
from prunex_mpi.pruning import removable
from prunex_mpi.run import finished_run
from prunex_mpi.tools import export_run
from prunex_mpi.tools.export_proof import EXACT, ROUNDINGS, count_multiply_adds, prove

FACTORY = """
from torch import nn
def net(*, num_classes, image_size):
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.ACTIVATION(), nn.Conv2d(WIDTH, 6, 3),
        nn.ACTIVATION(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, num_classes))
"""
# A process that has torch, torchvision and safetensors but not this package.
STRANGER = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("prunex_mpi", "mpi4py"):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Refuse())
folder, images, outputs = sys.argv[1:]
sys.path.insert(0, folder)
import torch
from safetensors.torch import load_file, save_file
from load_model import load
with torch.no_grad():
    # How much float32 costs is the processor's affair.
    save_file({"outputs": load(folder).double()(load_file(images)["images"])}, outputs)
"""


def factory(width: int = 8, activation: str = "ReLU") -> str:
    return FACTORY.replace("WIDTH", str(width)).replace("ACTIVATION", activation)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a network of a user's for some steps, with coupled groups."""
    flags = [
        *("--groups", "coupled", "--warmup-iterations", "1"),
        *("--keep-ramp-iterations", "1", "--freeze-iteration", "2"),
    ]
    return train(tmp_path_factory.mktemp("export"), flags)


@pytest.fixture(scope="module")
def smaller_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one that becomes smaller while it is trained."""
    flags = ["--method", "prunetrain", "--prunetrain-reconfigure-every", "2"]
    flags += ["--prunetrain-threshold", "0.26"]
    return train(tmp_path_factory.mktemp("smaller"), flags)


def train(folder: Path, flags: list[str]) -> Path:
    (folder / "exported_models.py").write_text(factory())
    flags = [
        *("--run-dir", str(folder / "run"), "--model", "exported_models:net"),
        *("--outer-iterations", "3", "--local-steps", "8", "--test-samples", "60"),
        *("--progress", "off", *flags),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        assert run_job_here(cli.parse(flags)) == 0
    sys.modules.pop("exported_models", None)
    return folder / "run"


@pytest.mark.parametrize(
    "model", ["sizes_from_the_first_image", "old_weight_norm", "train_returns_nothing"]
)
def test_what_takes_shape_or_keeps_results_as_it_runs_is_exported(model, tmp_path, capsys):
    """Lazy modules have no weights before the first image; a tensor with a gradient has no copy."""
    flags = ["--model", f"odd_models:{model}", "--groups", "channel", "--image-size", "8"]
    exported(train(tmp_path, flags), *flags[:2])
    assert "outputs differ by at most" in capsys.readouterr().out


@pytest.fixture(params=["run"])
def own_run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Give a copy of the run, or of another by its name, with its model's factory importable."""
    shutil.copytree(request.getfixturevalue(request.param), tmp_path / "run")
    (tmp_path / "exported_models.py").write_text(factory())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "exported_models", raising=False)
    yield tmp_path / "run"
    sys.modules.pop("exported_models", None)


def exported(run: Path, *flags: str, repeat: str = "0") -> None:
    flags = ("--repeat", repeat, "--model", "exported_models:net", *flags)
    assert export.main([str(run), *flags]) == 0


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """Export with `arguments`; return the one line that it says."""
    assert export.main([*arguments, "--repeat", "0", "--model", "exported_models:net"]) == code
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("prunex_mpi.export: error: ")
    assert said.out == ""
    return line


@torch.no_grad()
def test_a_run_becomes_smaller_and_says_so(own_run, tmp_path, capsys):
    # An older network is replaced, and what an export left that was killed.
    (own_run / "model").mkdir()
    (own_run / "model/model.onnx").write_text("old")
    (own_run / "model.partial").write_text("")
    exported(own_run, "--images", "0", repeat="1")
    said = capsys.readouterr().out
    # 8 and 6 channels, half of each.
    assert "removed: 7 of 14 groups of channels" in said
    assert "on 60 test images the outputs differ by at most " in said
    accuracy = json.loads((own_run / "summary.json").read_text())["test_accuracy"]
    share = f"{100 * accuracy:.2f} %"
    assert f"accuracy {share} masked, {share} smaller" in said
    for line in ("cpu, batch 1: ms", "cpu, batch 128: images/s", "written to ", "gone: model.onnx"):
        assert line in said
    # 3 * 9 * 8 + 8 + 16 + 8 * 9 * 6 + 6 + 60 + 10, and 3 * 9 * 4 + 4 + 8 + 4 * 9 * 3 + 3 + 30 + 10
    assert "parameters" in said and " 748 " in said and " 271 " in said
    # 6x6 and 4x4 positions
    assert f"{36 * 216 + 16 * 432 + 60:,}" in said
    assert f"{36 * 108 + 16 * 108 + 30:,}" in said

    plan = json.loads((own_run / "model/plan.json").read_text())
    assert plan["format"] == standalone.FORMAT == FORMAT
    assert plan["model"]["name"] == "exported_models:net"
    assert plan["layers"]["0"] == {"weight": [4, 3, 3, 3], "bias": [4], "groups": 1}
    assert plan["layers"]["7"] == {"weight": [10, 3]}
    assert plan["test_accuracy"] == accuracy
    assert plan["stays"] == []
    assert len(plan["forward_s"]) == 2 and min(plan["forward_s"]) > 0
    assert [entry["removed"] for entry in plan["removed"]] == [4, 3]
    names = {path.name for path in own_run.iterdir() if path.name.startswith("model")}
    assert names == {"model"}
    assert {path.name for path in (own_run / "model").iterdir()} == {
        "load_model.py",
        "model.safetensors",
        "plan.json",
    }


@torch.no_grad()
@pytest.mark.parametrize("own_run", ["smaller_run"], indirect=True)
def test_a_network_that_became_smaller_in_training_is_exported(own_run, capsys):
    summary = json.loads((own_run / "summary.json").read_text())
    tensors = load_file(own_run / "state.safetensors")
    # Some of the 8 and 6 channels have gone.
    layers = summary["delivered"]["layers"]
    widths = layers["0"]["weight"][0], layers["3"]["weight"][0]
    assert 14 > sum(widths) >= 2
    assert tensors["3.weight"].shape == (widths[1], widths[0], 3, 3)
    parameters = [t.numel() for key, t in tensors.items() if key.endswith(("weight", "bias"))]
    assert summary["parameters_kept"] == sum(parameters) < summary["parameters"] == 748
    exported(own_run)
    said = capsys.readouterr().out
    assert f"of {sum(widths)} groups of channels" in said
    # What was gained is told beside the network of the beginning.
    assert f"removed in training: {748 - sum(parameters)} of 748 parameters" in said
    assert ["at", "first", "smaller", "times"] in [line.split() for line in said.splitlines()]
    assert " 748 " in said
    how = "in the run" if "removed: 0 of" in said else "masked"
    assert f"accuracy {100 * summary['test_accuracy']:.2f} % {how}" in said
    full = finished_run.read_finished_run(own_run, given=("exported_models:net",))
    loaded = standalone.load(own_run / "model").double()
    images = torch.rand(5, 3, 8, 8, dtype=torch.float64)
    wanted = full.model.double()(images)
    torch.testing.assert_close(loaded(images), wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("own_run", ["smaller_run"], indirect=True)
@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({}, "is not the one of the run"),
        ({"0": {"weight": [5, 3, 3, 3]}}, "is not the one of the run"),
        ({"0": {"weight": [9, 3, 3, 3]}}, "does not take the sizes of the run"),
        ({"0": {"groups": "x"}}, "layers.0.groups"),
        ({"nowhere": {}}, "does not take the sizes of the run"),
        ({"2": {"norm_features": 4}}, "does not take the sizes of the run"),
        ({"0": 3}, "(layers.0)"),
        (3, "(layers)"),
    ],
)
def test_other_sizes_than_the_runs_are_refused(own_run, capsys, layers, words):
    found = json.loads((own_run / "summary.json").read_text())
    found["delivered"]["layers"] = layers
    (own_run / "summary.json").write_text(json.dumps(found))
    assert words in refused(capsys, UNREADABLE, str(own_run))


@torch.no_grad()
def test_it_loads_where_only_torch_is(own_run, tmp_path):
    exported(own_run)
    plan = json.loads((own_run / "model/plan.json").read_text())
    masked = build_model("exported_models:net", Images(8, 10)).eval()
    masked.load_state_dict(load_file(own_run / "state.safetensors"))
    # The factory is the stranger's own.
    shutil.copy(tmp_path / "exported_models.py", own_run / "model")
    pixels = torch.rand(5, 3, 8, 8)
    mean, std = (torch.tensor(v)[:, None, None] for v in plan["normalisation"].values())
    images = ((pixels - mean) / std).double()
    save_file({"images": images}, tmp_path / "images.safetensors")
    paths = [own_run / "model", tmp_path / "images.safetensors", tmp_path / "outputs.safetensors"]
    result = run_python(["-I", "-c", STRANGER, *map(str, paths)], Path("/"))
    assert result.returncode == 0, result.stderr
    outputs = load_file(tmp_path / "outputs.safetensors")["outputs"]
    torch.testing.assert_close(outputs, masked.double()(images), rtol=0, atol=EXACT)


def test_what_is_not_equal_is_not_written(own_run, monkeypatch, capsys):
    (own_run / "model").mkdir()
    (own_run / "model/model.onnx").write_text("old")
    find_removable = removable.find_removable

    def too_much(*arguments: object) -> removable.Verdict:
        verdict = find_removable(*arguments)
        removed = verdict.removed.copy()
        removed[(~removed).nonzero()[0][0]] = True
        return removable.Verdict(removed, ())

    monkeypatch.setattr("prunex_mpi.tools.export_run.find_removable", too_much)
    line = refused(capsys, FAILURE, str(own_run))
    assert "the smaller network is not the same" in line
    assert "nothing was written" in line
    assert [path.name for path in own_run.glob("model*")] == ["model"]
    assert (own_run / "model/model.onnx").exists()


def unzipped(path: Path) -> bytes:
    with zipfile.ZipFile(path) as file:
        return b"".join(file.read(name) for name in file.namelist())


@torch.no_grad()
def test_other_formats_compute_the_same_and_hold_no_test_image_and_no_path(own_run, capsys):
    exported(own_run, "--onnx", "--torch-export")
    said = capsys.readouterr().out
    assert "model.onnx: outputs differ by at most" in said
    assert "model.pt2: outputs differ by at most" in said
    program = torch.export.load(own_run / "model/model.pt2")
    images = torch.rand(7, 3, 8, 8)
    model = standalone.load(own_run / "model")
    wanted = model(images)
    # Another program of the same float32 operations: a few times what they cost this one.
    cost = float((wanted - model.double()(images.double())).abs().max())
    torch.testing.assert_close(program.module()(images), wanted, rtol=0, atol=ROUNDINGS * cost)
    example = program.example_inputs[0][0]
    run = finished_run.read_finished_run(own_run, given=("exported_models:net",))
    tested, _ = next(export_run.test_of(run, 0)(60))
    assert not any(torch.equal(one, image) for one in example for image in tested)
    written = unzipped(own_run / "model/model.pt2"), (own_run / "model/model.onnx").read_bytes()
    package = str(Path(standalone.__file__).parents[1]).encode()
    for found in written:
        for path in (package, b"exported_models.py", b"torch/nn/modules"):
            assert len(found) > 1000 and path not in found


def test_what_no_export_wrote_is_not_removed(own_run, capsys):
    exported(own_run)
    capsys.readouterr()
    (own_run / "model/notes.txt").write_text("mine")
    assert "holds notes.txt" in refused(capsys, USAGE, str(own_run))
    assert (own_run / "model/notes.txt").read_text() == "mine"


def test_another_network_than_was_exported_is_not_loaded(own_run, capsys, monkeypatch):
    exported(own_run)
    folder = own_run / "model"
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 64]))
    with pytest.raises(ValueError, match="damaged"):
        standalone.load(folder)
    (folder / "model.safetensors").write_bytes(weights)
    standalone.load(folder)
    monkeypatch.setattr(sys.modules["exported_models"].nn, "ReLU", nn.Softplus)
    with pytest.raises(RuntimeError, match="does not compute what it did"):
        standalone.load(folder)


@torch.no_grad()
def test_one_image_gives_a_network_for_batches_of_any_size(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    one = torch.rand(1, 3, 8, 8)
    name = export_run.TORCH_EXPORT
    assert "at most 0" in export_run.write_graph(tmp_path, name, model, Images(8, 2), one, 0.0)
    loaded = torch.export.load(tmp_path / name).module()
    images = torch.rand(3, 3, 8, 8)
    torch.testing.assert_close(loaded(images), model(images))


def test_missing_packages_for_onnx_are_named(own_run, monkeypatch, capsys):
    monkeypatch.setattr(export_run, "ONNX_PACKAGES", ("json", "no_such_onnx"))
    line = refused(capsys, USAGE, str(own_run), "--onnx")
    assert "--onnx needs no_such_onnx: pip install" in line


# --------------------------------------------------------------------------------------------------
# What is wrong
# --------------------------------------------------------------------------------------------------


def cut(name: str) -> Callable[[Path], object]:
    return lambda run: os.truncate(run / name, (run / name).stat().st_size // 2)


def flip(name: str, place: int) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[place] ^= 1
        (run / name).write_bytes(data)

    return damage


def remove(name: str) -> Callable[[Path], object]:
    return lambda run: (run / name).unlink()


def summary(**changes: object) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        found = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**found, **changes}))

    return damage


def source(text: str) -> Callable[[Path], object]:
    return lambda run: (run.parent / "exported_models.py").write_text(text)


def config(old: str, new: str) -> Callable[[Path], object]:
    def damage(run: Path) -> None:
        text = (run / "config.toml").read_text()
        assert old in text
        (run / "config.toml").write_text(text.replace(old, new))

    return damage


BAD = {
    "no folder": (shutil.rmtree, UNREADABLE, "there is no run in"),
    "no config": (remove("config.toml"), UNREADABLE, "not the folder of a run: it has no config"),
    "config cut": (cut("config.toml"), UNREADABLE, "config.toml"),
    "did not end": (remove("summary.json"), UNREADABLE, "did not end well"),
    "preempted": (summary(status="preempted"), UNREADABLE, "it was preempted; go on with it"),
    "summary cut": (cut("summary.json"), UNREADABLE, "summary.json can't be read"),
    "nothing delivered": (
        summary(delivered={}),
        UNREADABLE,
        "is not what the run wrote (delivered.bytes)",
    ),
    "no state": (remove("state.safetensors"), UNREADABLE, "No such file"),
    "state cut": (cut("state.safetensors"), UNREADABLE, "bytes of"),
    "state header": (flip("state.safetensors", 9), UNREADABLE, "checksum"),
    "state bit": (flip("state.safetensors", -9), UNREADABLE, "checksum"),
    "other widths": (source(factory(width=9)), UNREADABLE, "is not the one of the run: 0.bias"),
    "other function": (source(factory(activation="Tanh")), UNREADABLE, "does not compute what"),
    "no source": (source("net = 3\n"), USAGE, "has no function 'net'"),
    "no data": (
        config('dataset = "digits"', 'dataset = "cifar10"'),
        UNREADABLE,
        "no complete cifar10",
    ),
    "other data": (config('dataset = "digits"', 'dataset = "synthetic"'), UNREADABLE, "--data-dir"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_run_is_one_line_and_a_code(own_run, capsys, case):
    damage, code, words = BAD[case]
    damage(own_run)
    assert words in refused(capsys, code, str(own_run))
    assert not list(own_run.glob("model*"))


def test_a_run_that_goes_on_is_left_alone(own_run, capsys):
    with FileLock(own_run / "lock"):
        assert "in use by another job" in refused(capsys, USAGE, str(own_run))


def test_a_gpu_that_is_not_there_is_said(own_run, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in refused(capsys, USAGE, str(own_run), "--device", "cuda")


def test_a_full_disk_is_one_line(own_run, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_run, "save_tensors", full)
    assert "can't be written: No space left on device" in refused(capsys, FAILURE, str(own_run))
    assert not list(own_run.glob("model*"))


# --------------------------------------------------------------------------------------------------
# Proof and counts
# --------------------------------------------------------------------------------------------------


def shifted(by: float) -> nn.Module:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
        model.bias.copy_(torch.tensor([by, 0.0]))
    return model


BATCH = [(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), torch.tensor([0, 0, 1]))]


def test_proof_counts_right_answers_and_ties():
    proof = prove(shifted(0.0), shifted(-1e-10), iter(BATCH))
    assert (proof.images, proof.masked_right, proof.smaller_right) == (3, 1, 2)
    assert proof.answers_differ == 1
    assert proof.scale == 2.0
    assert proof.exact == pytest.approx(1e-10)
    assert proof.difference == pytest.approx(1e-10)
    assert proof.rounding == 0
    assert "1 answers differ by ties" in proof.line()


@pytest.mark.parametrize("by", [1e-8, 3e-5, float("nan"), float("inf")])
def test_proof_refuses_what_differs(by):
    with pytest.raises(UserError, match="not the same"):
        prove(shifted(0.0), shifted(by), iter(BATCH))


class Rounds(nn.Module):
    """Add and take away `size`: nothing but rounding, most of it in float32."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 3 + self.size - self.size


def test_proof_allows_a_few_times_what_float32_costs():
    proof = prove(Rounds(64.0), Rounds(0.0), iter(BATCH))
    assert 1e-7 < proof.difference <= 2 * proof.rounding
    assert proof.exact < 1e-13
    with pytest.raises(UserError, match="not the same"):
        prove(Rounds(1.0), Rounds(4096.0), iter(BATCH))


class Single(nn.Linear):
    """Compute in float32 whatever comes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


def test_what_does_not_run_in_float64_is_proven_in_its_own_dtype():
    network = Single(2, 2)
    proof = prove(network, copy.deepcopy(network), iter(BATCH))
    assert proof.exact is None and proof.allowed < 1e-4 and "no float64" in proof.line()
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.bias += 1e-3
    with pytest.raises(UserError, match="not the same"):
        prove(network, other, iter(BATCH))


def test_multiply_adds_count_attention_too():
    model = build_model("vit_tiny", Images(8, 10)).eval()
    tokens, width = 5, 192
    block = tokens * width * (4 * width + 2 * 768) + 2 * tokens * tokens * width
    counted = count_multiply_adds(model, torch.zeros(2, 3, 8, 8))
    assert counted == 4 * 48 * width + 6 * block + 10 * width


def test_a_model_that_the_run_alone_names_is_not_imported(own_run, capsys):
    (own_run.parent / "exported_models.py").write_text("raise SystemExit('this was executed')")
    assert export.main([str(own_run), "--repeat", "0"]) == USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("repeat it as --model exported_models:net")
