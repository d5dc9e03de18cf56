"""Take out of a run's network what its masks removed, write it, prove it and measure it.

The files become valid all at once.
"""

import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from prunex_mpi.base.errors import FAILURE, UserError, listed, one_line
from prunex_mpi.base.files import EXPORTED, STATE, TOKENIZER, sync, touch, write_json_durably
from prunex_mpi.base.imports import hub_folder, require_packages
from prunex_mpi.base.tables import format_table
from prunex_mpi.data.batches import ImageFormat, evaluation_batches, part_of
from prunex_mpi.data.text import Windows, window_batches
from prunex_mpi.diagnosis.machine import describe_machine, package_versions
from prunex_mpi.models import gpt, slim, standalone
from prunex_mpi.models import inputs as inputs_file
from prunex_mpi.models.dummy_input import probe
from prunex_mpi.models.inputs import Inputs, inputs_from
from prunex_mpi.pruning.coupling import Coupling
from prunex_mpi.pruning.removable import (
    describe_removed,
    find_removable,
    find_tried,
    zeros_that_stay,
)
from prunex_mpi.pruning.shrink import sizes_in_all, smaller_tensors
from prunex_mpi.run.checkpoint_files import save_tensors
from prunex_mpi.run.finished_run import FinishedRun, read_finished_run
from prunex_mpi.tools import gguf_file, huggingface
from prunex_mpi.tools.export_proof import BATCH, compare, count_parameters, prove

# On so many images it is measured which channels are constant zero.
JUDGED_IMAGES = 32
LOADER = "load_model.py"
PARTIAL, REPLACED = "model.partial", "model.replaced"
ONNX, TORCH_EXPORT = "model.onnx", "model.pt2"
GRAPHS = {ONNX: ("ONNX", "--onnx"), TORCH_EXPORT: ("torch.export", "--torch-export")}
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# In `standalone`, whose functions find those names in the same file once it is written.
OUR_IMPORTS = re.compile(
    r"^from prunex_mpi\S* import (?:\(.*?\)|[^(]*?)\n", re.MULTILINE | re.DOTALL
)
# What a summary says of how good the network is, of classes or of tokens.
QUALITY = ("test_accuracy", "test_perplexity")
# Of the largest output: another program in another order. Another network differs far more.
TOLERANCE = 1e-4


def export(options: Namespace) -> None:
    """Read the run, take out what can go, write it, prove it and measure it.

    Raises UserError where that fails; of a format that fails once the rest is written.
    """
    devices = choose_devices(options.device)
    if options.onnx:
        require_packages("--onnx", "onnx", *ONNX_PACKAGES)
    if options.transformers:
        require_packages(huggingface.FLAG, "transformers", "transformers")
    if options.gguf:
        require_packages(gguf_file.FLAG, "transformers", "transformers", "gguf")
    run = read_finished_run(options.run, options.data_dir, given=(options.model, options.dataset))
    inputs, batches_of = inputs_from(run.description), test_of(run, options.images)
    images, _ = next(batches_of(JUDGED_IMAGES))
    run.check_readable()
    if (options.transformers or options.gguf) and run.tokenizer is None:
        flag = huggingface.FLAG if options.transformers else gguf_file.FLAG
        raise UserError(f"{flag} is of language models, and the network reads images: leave it out")

    dropped = files_before(options)

    # Take out what can go.
    coupling, stays = find_channels(run.model, inputs)
    verdict = find_removable(run.model, coupling, images)
    tensors = smaller_tensors(run.model, coupling, verdict.removed)
    versions = package_versions()
    delivered = run.summary["delivered"]
    before = delivered.get("layers", {})
    plan = {
        "model": run.description,
        "layers": sizes_in_all(run.model, before, coupling, verdict.removed),
        "normalisation": {"mean": run.mean.tolist(), "std": run.std.tolist()},
        "classes": delivered.get("classes", []),
        "data": delivered.get("data", ""),
        **{name: run.summary[name] for name in QUALITY if run.summary.get(name) is not None},
        "removed": describe_removed(coupling, verdict.removed),
        "stays": [*verdict.stays, *stays, *zeros_that_stay(tensors)],
        "versions": {name: versions[name] for name in ("prunex_mpi", "torch")},
    }

    # Write, load back, prove.
    lines = []
    with new_model_folder(options.run) as folder:
        written = write_network(folder, tensors, plan)
        if run.tokenizer is not None and run.tokenizer.digest:
            shutil.copyfile(run.tokenizer.name, folder / TOKENIZER)
        smaller = standalone.load(folder)
        written["probe"] = probe(smaller, inputs)
        proof = prove(run.model, smaller, batches_of(BATCH), inputs.counted)
        run.check_readable()
        # What became smaller in training may have nothing left to take out.
        named = () if verdict.removed.any() else (("in the run", "written"),)
        lines.append(proof.line(inputs.counted, *named))
        more, failed = write_formats(options, run, folder, smaller, images, proof.allowed)
        lines += more
        name, larger, size = full_size(run)
        sizes = (size, (folder / standalone.MODEL).stat().st_size)
        networks = {name: larger, "smaller": smaller}
        table, seconds = compare(networks, inputs, images, sizes, devices, options.repeat)
        # Of full size, and smaller; comparisons read them.
        written |= {"forward_s": seconds} if seconds else {}
        write_json_durably(folder / standalone.PLAN, written)

    for line in plan["stays"]:
        print(f"stays: {line}")
    for line in huggingface.what_differs(plan["layers"]):
        print(line)
    gone = int(verdict.removed.sum())
    if before:
        at_first, left = count_parameters(larger), count_parameters(run.model)
        print(f"removed in training: {at_first - left:,} of {at_first:,} parameters")
    print(f"removed: {gone:,} of {coupling.total:,} groups of channels")
    print("\n".join(lines))
    # What else the machine does makes times long, and their ratio uncertain.
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"\n{describe_machine(devices[-1])}, {load}\n{format_table(table)}")
    if dropped:
        print(f"\ngone: {listed(dropped)} of the export before; give its flag to have it again")
    print(f"\nwritten to {options.run / EXPORTED}", flush=True)
    if failed:
        raise failed[0]


def files_before(options: Namespace) -> list[str]:
    """Return which formats of an earlier export will go; refuse to remove what is not its own."""
    folder = options.run / EXPORTED
    wanted = {ONNX: options.onnx, TORCH_EXPORT: options.torch_export, gguf_file.NAME: options.gguf}
    wanted[huggingface.FOLDER] = options.transformers or options.gguf
    ours = {standalone.MODEL, standalone.PLAN, LOADER, TOKENIZER, "__pycache__", *wanted}
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if others := [name for name in found if name not in ours]:
        raise UserError(
            f"{folder} holds {listed(others)}, which no export wrote and a new one would remove: "
            "move it elsewhere"
        )
    return [name for name, again in wanted.items() if name in found and not again]


def test_of(run: FinishedRun, most: int) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return what yields batches of a size: the first `most` images or windows, 0 for all."""
    if isinstance(run.test, Windows):
        windows = run.test.part(slice(most or len(run.test)))
        vocabulary = run.description["vocab_size"]
        return lambda size: window_batches(
            windows, batch_size=size, device="cpu", vocabulary=vocabulary
        )
    count = min(most or len(run.test.labels), len(run.test.labels))
    chosen = part_of(run.test, slice(count))
    look = ImageFormat(run.mean, run.std, "cpu", next(p.dtype for p in run.model.parameters()))
    return lambda size: evaluation_batches(chosen, batch_size=size, look=look)


def full_size(run: FinishedRun) -> tuple[str, nn.Module, int]:
    """Return what the network of full size is to be called, itself, and the bytes of its weights.

    Where training has made it smaller, that is a fresh one: its weights are gone.
    """
    if not run.summary["delivered"].get("layers"):
        return "masked", run.model, (run.path / STATE).stat().st_size
    whole = standalone.build(run.description)
    whole.eval()
    whole.to(next(run.model.parameters()).dtype)
    tensors = whole.state_dict().values()
    return "at first", whole, sum(t.numel() * t.element_size() for t in tensors)


def find_channels(model: nn.Module, inputs: Inputs) -> tuple[Coupling, list[str]]:
    """Return the channels that can be removed, and why there are none where there are none."""
    try:
        return find_tried(model, inputs), []
    except UserError as error:
        return Coupling({}, {}, (), 0, {}, ()), [str(error)]


def choose_devices(requested: str) -> list[torch.device]:
    """Return where times are measured; raise UserError when CUDA is asked for and absent."""
    cuda = torch.cuda.is_available()
    if requested == "cuda" and not cuda:
        raise UserError("--device cuda: torch sees no GPU on this machine; use --device cpu")
    names = ["cpu"] if requested != "cuda" else []
    names += ["cuda"] if cuda and requested != "cpu" else []
    return [torch.device(name) for name in names]


# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


@contextmanager
def new_model_folder(run: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes RUN/model at the end of the block.

    An existing RUN/model stays as it is until then, and for good where the block raises. Raises
    UserError where a job or another export works on the run and where nothing can be written.
    """
    partial, final, replaced = (run / name for name in (PARTIAL, EXPORTED, REPLACED))
    lock = FileLock(run / "lock", timeout=0)
    try:
        # FileLock takes any failure to make its file for a lock that is held.
        touch(run / "lock")
        with lock:
            try:
                _remove(partial)
                partial.mkdir()
                yield partial
                for path in (*partial.rglob("*"), partial):
                    sync(path)
                _remove(replaced)
                if final.exists():
                    final.rename(replaced)
                try:
                    partial.rename(final)
                except OSError:
                    if replaced.exists():
                        replaced.rename(final)
                    raise
                sync(run)
                _remove(replaced)
            finally:
                _remove(partial)
    except Timeout:
        raise UserError(f"{run} is in use by another job; wait for its end") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{final} can't be written: {reason}; make room", FAILURE) from None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_network(folder: Path, tensors: dict[str, Tensor], plan: dict[str, Any]) -> dict[str, Any]:
    """Write weights, plan and the file that loads them; return the plan as it is written.

    Raises OSError.
    """
    there = {key: tensor.cpu() for key, tensor in tensors.items()}
    record = save_tensors(there, folder / standalone.MODEL)
    written = {"format": standalone.FORMAT, "crc32": record.crc32, **plan}
    write_json_durably(folder / standalone.PLAN, written)
    (folder / LOADER).write_text(loader_source(), encoding="utf-8")
    return written


def loader_source() -> str:
    """Return the source of the file that loads a network: `standalone` with what it imports."""
    texts = [
        Path(module.__file__).read_text(encoding="utf-8")
        for module in (standalone, inputs_file, gpt, slim)
    ]
    return "\n\n".join([OUR_IMPORTS.sub("", texts[0]), *texts[1:]])


def write_formats(
    options: Namespace,
    run: FinishedRun,
    folder: Path,
    model: nn.Module,
    images: Tensor,
    allowed: float,
) -> tuple[list[str], list[UserError]]:
    """Write the formats that `options` ask for; return a line about each, and why others fail.

    `images` are what they are tried on, `allowed` is what rounding explains.
    """
    lines: list[str] = []
    failed: list[UserError] = []

    def write(name: str, writer: Callable[..., str], *given: Any) -> None:
        try:
            lines.append(writer(folder, *given))
        except UserError as error:
            _remove(folder / name)
            failed.append(error)

    given = model, inputs_from(run.description), images, allowed
    for name, wanted in ((ONNX, options.onnx), (TORCH_EXPORT, options.torch_export)):
        if wanted:
            write(name, write_graph, name, *given)
    if options.transformers or options.gguf:
        given = model, images, run.tokenizer, allowed, hub_folder(run.settings.model)
        write(huggingface.FOLDER, huggingface.write_transformers, *given)
    if options.gguf and (folder / huggingface.FOLDER).exists():
        write(gguf_file.NAME, gguf_file.write_gguf, run.tokenizer)
    return lines, failed


def write_graph(
    folder: Path, name: str, model: nn.Module, inputs: Inputs, images: Tensor, allowed: float
) -> str:
    """Write model.onnx, or model.pt2 for torch.export.load, for batches of any size.

    Returns a line: how far its outputs are off. `images` [n, 3, H, W] are what both networks are
    tried on, on the CPU; `allowed` is what rounding explains. Raises UserError where the model
    can't be written so or computes something else.
    """
    path, (form, flag) = folder / name, GRAPHS[name]
    try:
        program, limit = _trace(model, inputs, images)
        if name == ONNX:
            import onnxruntime

            names = {"input_names": [f"{inputs.counted}s"], "output_names": ["logits"]}
            how = {"dynamo": True, "external_data": False, "verbose": False, **names}
            torch.onnx.export(program, (), path, **how)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            outputs = session.run(None, {session.get_inputs()[0].name: images.numpy()})
            found = torch.from_numpy(outputs[0])
        else:
            torch.export.save(program, path)
            with torch.no_grad():
                found = torch.export.load(path).module()(images)
    # Whatever an exporter meets in it.
    except Exception as error:
        reason = f"the network can't be written for {form} ({one_line(error)}): leave {flag} out"
        raise UserError(reason, FAILURE) from error
    with torch.no_grad():
        wanted = model(images)
    apart = float((found - wanted).abs().max())
    if not apart <= max(allowed, TOLERANCE * max(1.0, float(wanted.abs().max()))):
        raise UserError(f"the {form} network differs by {apart:.2g} from the one written", FAILURE)
    return f"{name}: outputs differ by at most {apart:.2g}{limit}"


def _trace(
    model: nn.Module, inputs: Inputs, images: Tensor
) -> tuple[torch.export.ExportedProgram, str]:
    """Return the model's graph for batches of any size, and to what else it is limited, or "".

    Windows of tokens may be shorter as well, where the model's code lets them.
    """
    # Of one image torch would make a graph for one alone. What it sees is kept in the file.
    two, limit = inputs.draw(2, images.dtype), ""
    every = {d: torch.export.Dim(n, max=m) for d, (n, m) in inputs.of_any_size().items()}
    try:
        program = torch.export.export(model, (two,), dynamic_shapes=(every,))
    # Whatever its code states, or the exporter meets in it.
    except Exception:
        if len(every) == 1:
            raise
        limit = f"; for windows of {images.shape[1]} tokens alone"
        program = torch.export.export(model, (two,), dynamic_shapes=({0: every[0]},))
    # Where each operation was called from: paths of this machine, and its lines of code.
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program, limit
