"""Write the files of a smaller network, and make them valid all at once."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from prunex_mpi.base.errors import FAILURE, UserError, one_line
from prunex_mpi.base.files import sync, write_json_durably
from prunex_mpi.models import slim, standalone
from prunex_mpi.run.tensor_file import save_tensors

FOLDER, LOADER = "model", "load_model.py"
PARTIAL, REPLACED = "model.partial", "model.replaced"
ONNX, TORCH_EXPORT = "model.onnx", "model.pt2"
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# In `standalone`, whose functions find those names in the same file once it is written.
OUR_IMPORTS = re.compile(r"^from prunex_mpi\S* import \(.*?\)\n", re.MULTILINE | re.DOTALL)
# The runtime of ONNX adds in another order.
# Of the largest output: another program in another order. Another network differs far more.
TOLERANCE = 1e-4


@contextmanager
def new_model_folder(run: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes RUN/model at the end of the block.

    An existing RUN/model stays as it is until then, and for good where the block raises. Raises
    UserError where a job or another export works on the run and where nothing can be written.
    """
    partial, final, replaced = (run / name for name in (PARTIAL, FOLDER, REPLACED))
    lock = FileLock(run / "lock", timeout=0)
    try:
        # FileLock takes any failure to make its file for a lock that is held.
        (run / "lock").touch()
        with lock:
            try:
                _remove(partial)
                partial.mkdir()
                yield partial
                for path in (*partial.iterdir(), partial):
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


def write_network(folder: Path, tensors: dict[str, Tensor], plan: dict[str, Any]) -> None:
    """Write weights, plan and the file that loads them; raise OSError."""
    save_tensors({key: tensor.cpu() for key, tensor in tensors.items()}, folder / standalone.MODEL)
    write_json_durably(folder / standalone.PLAN, {"format": standalone.FORMAT, **plan})
    (folder / LOADER).write_text(loader_source(), encoding="utf-8")


def loader_source() -> str:
    """Return the source of the file that loads a network: `standalone` with what it imports."""
    texts = [Path(module.__file__).read_text(encoding="utf-8") for module in (standalone, slim)]
    return "\n\n".join([OUR_IMPORTS.sub("", texts[0]), texts[1]])


def write_onnx(folder: Path, model: nn.Module, images: Tensor, allowed: float) -> float:
    """Write model.onnx for batches of any size; return how far its outputs are from the model's.

    `images` [n, 3, H, W], n > 1, are what both are tried on, on the CPU; `allowed` is what rounding
    explains. Raises UserError where the model can't be written so or computes something else.
    """
    import onnxruntime

    try:
        program = _trace(model, images)
        torch.onnx.export(
            program,
            (),
            folder / ONNX,
            dynamo=True,
            external_data=False,
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
        session = onnxruntime.InferenceSession(folder / ONNX, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    # Whatever the exporter meets in a model's code.
    except Exception as error:
        raise UserError(
            f"the network can't be written as ONNX ({one_line(error)}): leave --onnx out", FAILURE
        ) from error
    return _distance(model, images, torch.from_numpy(found), allowed, "ONNX")


def write_torch_export(folder: Path, model: nn.Module, images: Tensor, allowed: float) -> float:
    """Write model.pt2 for torch.export.load; as `write_onnx` otherwise."""
    try:
        torch.export.save(_trace(model, images), folder / TORCH_EXPORT)
        with torch.no_grad():
            found = torch.export.load(folder / TORCH_EXPORT).module()(images)
    # Whatever the exporter meets in a model's code.
    except Exception as error:
        raise UserError(
            f"the network can't be written by torch.export ({one_line(error)}): leave "
            "--torch-export out",
            FAILURE,
        ) from error
    return _distance(model, images, found, allowed, "torch.export")


def _trace(model: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """Return the model's graph for batches of any size."""
    batch = {0: torch.export.Dim("batch")}
    return torch.export.export(model, (images[:2],), dynamic_shapes=(batch,))


@torch.no_grad()
def _distance(model: nn.Module, images: Tensor, found: Tensor, allowed: float, form: str) -> float:
    wanted = model(images)
    apart = float((found - wanted).abs().max())
    if not apart <= max(allowed, TOLERANCE * max(1.0, float(wanted.abs().max()))):
        raise UserError(f"the {form} network differs by {apart:.2g} from the one written", FAILURE)
    return apart
