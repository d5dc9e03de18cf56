"""Trained weights from files: what is understood, what is replaced, and what is refused."""

import json
import os
import re
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.torch_version import TorchVersion

from prunex_mpi.base.errors import UNREADABLE, USAGE, UserError
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images, Tokens
from prunex_mpi.models.trained import (
    SAFE_TORCH,
    digest_of,
    find_torchvision_file,
    fit_,
    read_tensors,
    saved_in,
)

SIDE = 8


READS_TORCH_FILES = pytest.mark.skipif(
    torch.__version__ < SAFE_TORCH, reason="this torch may execute what is in a file"
)


def resnet(classes: int = 10, name: str = "resnet8", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(name, Images(SIDE, classes))


def trained(classes: int = 10, name: str = "resnet8") -> nn.Module:
    """Return a model whose weights and statistics are those of no fresh one."""
    model = resnet(classes, name, seed=5)
    model.train()
    model(torch.randn(4, 3, SIDE, SIDE))
    return model


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@READS_TORCH_FILES
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {f"module._orig_mod.{key}": value for key, value in state.items()},
        lambda state: {"state_dict": state, "epoch": 3, "best": 0.5},
        lambda state: {"model": {f"module.{key}": value for key, value in state.items()}},
        lambda state: {"model_state_dict": state, "optimizer": {"state": {}}},
    ],
)
def test_torch_files_of_every_kind_give_the_same_weights(wrap, tmp_path):
    state = trained().state_dict()
    torch.save(wrap(state), tmp_path / "weights.pt")
    model = resnet()
    assert fit_(model, read_tensors(tmp_path / "weights.pt"), Images(SIDE), "it") == ""
    assert same(model.state_dict(), state)


@pytest.mark.parametrize("read", [digest_of, read_tensors])
def test_a_pipe_and_nothing_are_no_file_of_weights(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "cannot read weights"), ("none.pt", "No such file")):
        with pytest.raises(UserError, match=reason):
            read(tmp_path / name)


def test_safetensors_of_half_precision_and_without_counters(tmp_path):
    state = trained().state_dict()
    halves = {k: t.half() for k, t in state.items() if "num_batches" not in k}
    # The name does not say what kind of file it is.
    save_file(halves, tmp_path / "weights.pt")
    model = resnet()
    fit_(model, read_tensors(tmp_path / "weights.pt"), Images(SIDE), "it")
    mine = model.state_dict()
    assert all(torch.equal(mine[k], t.float()) for k, t in halves.items())
    assert mine["bn1.running_mean"].dtype == torch.float32


def test_a_head_of_other_classes_begins_anew():
    model, theirs = resnet(7), trained(10).state_dict()
    fresh = {k: t.clone() for k, t in model.state_dict().items()}
    said = fit_(model, theirs, Images(SIDE), "digits.pt")
    assert said == "digits.pt has 10 classes and the data 7: layer fc begins anew"
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, fresh[key] if key.startswith("fc.") else theirs[key])


def test_as_many_other_classes_begin_anew_as_well():
    model, theirs = resnet(10), trained(10).state_dict()
    said = fit_(model, theirs, Images(SIDE), "digits.pt", others=True)
    assert said == "digits.pt has other classes than the data: layer fc begins anew"
    assert not torch.equal(model.fc.weight, theirs["fc.weight"])
    assert torch.equal(model.conv1.weight, theirs["conv1.weight"])


@READS_TORCH_FILES
def test_a_model_whose_own_names_begin_like_those_of_a_wrapper(tmp_path):
    theirs, model = (torch.nn.ModuleDict({"module": resnet()}) for _ in range(2))
    theirs.forward = model.forward = lambda images: model["module"](images)
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    for p in model.parameters():
        p.data.zero_()
    assert fit_(model, read_tensors(tmp_path / "weights.pt"), Images(SIDE), "it") == ""
    assert all(torch.equal(t, model.state_dict()[k]) for k, t in theirs.state_dict().items())


def test_other_shapes_are_refused_with_the_first_few_names():
    with pytest.raises(UserError) as caught:
        fit_(resnet(name="resnet8-w8"), trained().state_dict(), Images(SIDE), "wide.pt")
    text = str(caught.value)
    assert caught.value.exit_code == UNREADABLE and len(text.splitlines()) == 1
    wanted = "conv1.weight is [16, 3, 3, 3] there and [8, 3, 3, 3] in the model"
    assert text.startswith(f"wide.pt does not fit the model: {wanted}; ")
    assert "more" in text and len(text) < 400


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda s: s.pop("layer1.0.conv1.weight"), "layer1.0.conv1.weight is missing there"),
        (lambda s: s.update(extra=torch.ones(2)), "extra is [2] there and missing in the model"),
        (lambda s: s["bn1.running_var"].fill_(torch.nan), "not finite: bn1.running_var"),
        # More classes alone make a head begin anew, not other inputs.
        (lambda s: s.update({"fc.weight": torch.ones(9, 32)}), "fc.weight is [9, 32] there"),
    ],
)
def test_what_does_not_fit_is_named(change, word):
    state = trained().state_dict()
    change(state)
    with pytest.raises(UserError, match=r"^it ") as caught:
        fit_(resnet(), state, Images(SIDE), "it")
    assert word in str(caught.value)


class Wrapped(nn.Module):
    """What a factory makes of a model of another library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)


def test_names_may_lack_or_have_what_a_wrapper_puts_before_them():
    theirs = trained()
    wrapped, bare = Wrapped(Wrapped(resnet())), resnet()
    assert fit_(wrapped, theirs.state_dict(), Images(SIDE), "it") == ""
    assert same(wrapped.model.model.state_dict(), theirs.state_dict())
    assert fit_(bare, wrapped.state_dict(), Images(SIDE), "it") == ""
    assert same(bare.state_dict(), theirs.state_dict())
    # What else differs is told by the names in the model.
    lacking = {k: t for k, t in theirs.state_dict().items() if k != "fc.bias"}
    with pytest.raises(UserError, match=r"model: model\.model\.fc\.bias is missing there and"):
        fit_(wrapped, lacking, Images(SIDE), "it")


def test_shards_are_read_by_their_index(tmp_path):
    state, index = trained().state_dict(), tmp_path / "model.safetensors.index.json"
    names, shards = sorted(state), ("a.safetensors", "b.safetensors")
    for number, shard in enumerate(shards):
        save_file({name: state[name] for name in names[number::2]}, tmp_path / shard)
    places = {name: shards[number % 2] for number, name in enumerate(names)}
    index.write_text(json.dumps({"weight_map": places}))
    assert saved_in(tmp_path) == index
    assert same(read_tensors(index), state)
    before = digest_of(index)
    # Another shard is another file.
    save_file({name: state[name] + 1 for name in names[1::2]}, tmp_path / shards[1])
    assert digest_of(index) != before
    places = ("{", "[" * 100_000, '{"weight_map": {}}', '{"weight_map": {"a": "../a.safetensors"}}')
    for broken in places:
        index.write_text(broken)
        for read in (read_tensors, digest_of):
            with pytest.raises(UserError, match="names no shards beside it"):
                read(index)
    index.write_text(json.dumps({"weight_map": {"a": index.name}}))
    with pytest.raises(UserError, match="are no safetensors file"):
        read_tensors(index)


TOKENS = Tokens(19, 8)


def text_model(name: str = "gpt_nano-w32", seed: int = 0, context: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(name, Tokens(19, context))


@pytest.mark.parametrize("kept", ["embedding.weight", "head.weight"])
def test_a_tensor_of_two_names_may_have_either_in_the_file(kept, tmp_path):
    theirs, model = text_model(seed=5), text_model()
    save_model(theirs, tmp_path / "weights.safetensors")
    tensors = read_tensors(tmp_path / "weights.safetensors")
    assert len(tensors) == len(theirs.state_dict()) - 1
    tied = theirs.head.weight.detach()
    tensors = {k: t for k, t in tensors.items() if t.shape != tied.shape} | {kept: tied}
    assert fit_(model, tensors, TOKENS, "it") == ""
    assert same(model.state_dict(), theirs.state_dict())
    assert model.head.weight is model.embedding.weight


def test_what_a_module_of_two_names_holds_may_have_either():
    def twice() -> nn.Module:
        norm = nn.BatchNorm2d(3)
        return nn.Sequential(norm, norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))

    theirs, model = twice(), twice()
    theirs(torch.randn(4, 3, SIDE, SIDE))
    tensors = {k: t for k, t in theirs.state_dict().items() if not k.startswith("0.")}
    assert fit_(model, tensors, Images(SIDE, 4), "it") == ""
    assert same(model.state_dict(), theirs.state_dict())


def test_two_tensors_are_not_loaded_into_one():
    model, theirs = text_model(), text_model("gpt_nano-w32-untied").state_dict()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    with pytest.raises(UserError, match=r"embedding.weight, head.weight are one tensor") as caught:
        fit_(model, theirs, TOKENS, "it")
    assert str(caught.value).endswith("in which they are apart, such as gpt_nano-untied")
    assert caught.value.exit_code == UNREADABLE and len(str(caught.value)) < 250
    assert same(model.state_dict(), before)
    # What counts is what the model would hold.
    theirs["head.weight"] = theirs["embedding.weight"].double()
    assert fit_(model, theirs, TOKENS, "it") == ""
    theirs["head.weight"][0, 0] = torch.nan
    with pytest.raises(UserError, match=r"not finite: head.weight"):
        fit_(model, theirs, TOKENS, "it")


def test_another_context_is_refused_with_the_settings_of_text():
    with pytest.raises(UserError, match=r"positions.weight is \[4, 32\] there") as caught:
        fit_(text_model(), text_model(context=4).state_dict(), TOKENS, "it")
    assert str(caught.value).endswith("give the --model, --context and --tokenizer it is of")


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("touched"),))


@READS_TORCH_FILES
@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("a model", "load failed): save the model's state_dict()"),
        ("code", "tensors alone"),
        ("text", "tensors alone"),
        ("cut", "tensors alone"),
        ("list", "no state dict ('list')"),
        ("numbers", "no state dict ('epoch')"),
        ("nothing", "no state dict"),
    ],
)
def test_files_of_other_things_are_refused_and_not_executed(content, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.pt"
    if content == "text":
        path.write_text("no weights")
    elif content == "cut":
        save_file({"a": torch.ones(100)}, path)
        path.write_bytes(path.read_bytes()[:60])
    else:
        torch.save(
            {
                "a model": nn.Linear(2, 2),
                "code": {"state_dict": Harmful()},
                "list": [torch.ones(2)],
                "numbers": {"a": torch.ones(2), "epoch": 3},
                "nothing": {},
            }[content],
            path,
        )
    with pytest.raises(UserError) as caught:
        read_tensors(path)
    assert caught.value.exit_code == UNREADABLE
    assert word in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "touched").exists()


def test_torchvisions_weights_come_from_its_cache_with_their_normalisation(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def no_network(*_: object, **__: object) -> None:
        raise URLError("no network here")

    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    with pytest.raises(UserError, match=r"resnet18-f37072fd\.pth .*no network here.*TORCH_HOME"):
        find_torchvision_file("resnet18")
    cached = tmp_path / "hub/checkpoints/resnet18-f37072fd.pth"

    def fetched(_url: str, path: str, *_: object, **__: object) -> None:
        Path(path).touch()

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetched)
    find_torchvision_file("resnet18")
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    path, (mean, std) = find_torchvision_file("resnet18")
    assert path == cached
    assert mean == (0.485, 0.456, 0.406) and std == (0.229, 0.224, 0.225)
    for name in ("resnet20", "odd_models:small"):
        with pytest.raises(UserError, match="has no weights of model") as caught:
            find_torchvision_file(name)
        assert caught.value.exit_code == USAGE


def test_names_of_torchvisions_first_densenets_are_understood():
    model = build_model("densenet121", Images(32, 10))
    state = {k: torch.full_like(t, 2) for k, t in model.state_dict().items()}
    old = {}
    for key, tensor in state.items():
        for part in ("norm1", "norm2", "conv1", "conv2"):
            key = key.replace(f".{part}.", f".{part[:-1]}.{part[-1]}.") if "layer" in key else key
        old[key] = tensor
    assert old.keys() != state.keys()
    fit_(model, old, Images(32), "it")
    assert same(model.state_dict(), state)


@pytest.mark.parametrize("version", ["2.9.1+cpu", "2.4.0"])
def test_a_torch_that_executes_files_reads_safetensors_alone(tmp_path, monkeypatch, version):
    tensors = {"weight": torch.zeros(2)}
    torch.save(tensors, tmp_path / "weights.pt")
    save_file(tensors, tmp_path / "weights.safetensors")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    assert list(read_tensors(tmp_path / "weights.safetensors")) == ["weight"]
    with pytest.raises(UserError, match=f"torch {re.escape(version)} may execute"):
        read_tensors(tmp_path / "weights.pt")
