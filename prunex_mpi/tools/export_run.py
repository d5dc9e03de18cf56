"""Take out of a run's network what its masks removed, write it, prove it and measure it."""

import torch
from torch import Tensor, nn

from prunex_mpi.base.alone import require_packages
from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import STATE
from prunex_mpi.base.tables import format_table
from prunex_mpi.data.batches import Look, evaluation_batches, part_of
from prunex_mpi.models import standalone
from prunex_mpi.pruning.coupling import Coupling
from prunex_mpi.pruning.removable import describe_removed, judge, zeros_that_stay
from prunex_mpi.pruning.shrink import shrink, sizes_in_all, smaller_tensors
from prunex_mpi.pruning.trial import find_coupling_by, find_rules
from prunex_mpi.run.finished_run import FinishedRun, read_run
from prunex_mpi.run.machine import describe_machine, package_versions
from prunex_mpi.tools import export_files as files
from prunex_mpi.tools.export_options import Options
from prunex_mpi.tools.export_proof import BATCH, compare, count_parameters, prove

# On so many images it is measured which channels are constant zero.
JUDGED_IMAGES = 32


def export(options: Options) -> None:
    """Read the run, take out what can go, write it, prove it and measure it."""
    devices = choose_devices(options.device)
    if options.onnx:
        require_packages("--onnx", "onnx", *files.ONNX_PACKAGES)
    run = read_run(options.run, options.data_dir)
    count = min(options.images or len(run.test.labels), len(run.test.labels))
    chosen = part_of(run.test, slice(count))
    look = Look(run.mean, run.std, "cpu", next(p.dtype for p in run.model.parameters()))
    images, _ = next(evaluation_batches(chosen, batch_size=JUDGED_IMAGES, look=look))
    run.refuse_unreadable()

    # Take out what can go.
    coupling, stays = find_channels(run.model, run.description["image_size"])
    verdict = judge(run.model, coupling, images)
    tensors = smaller_tensors(run.model, coupling, verdict.removed)
    versions = package_versions()
    delivered = run.summary["delivered"]
    before = delivered.get("layers", {})
    plan = {
        "model": run.description,
        "layers": sizes_in_all(run.model, before, coupling, verdict.removed),
        "normalisation": {"mean": run.mean.tolist(), "std": run.std.tolist()},
        "classes": delivered.get("classes", []),
        "test_accuracy": run.summary["test_accuracy"],
        "removed": describe_removed(coupling, verdict.removed),
        "stays": [*verdict.stays, *stays, *zeros_that_stay(tensors)],
        "versions": {name: versions[name] for name in ("prunex_mpi", "torch")},
    }

    # Write, load back, prove.
    lines = []
    with files.new_model_folder(options.run) as folder:
        files.write_network(folder, tensors, plan)
        smaller = standalone.load(folder)
        batches = evaluation_batches(chosen, batch_size=BATCH, look=look)
        proof = prove(run.model, smaller, batches)
        run.refuse_unreadable()
        lines.append(proof.line())
        if options.onnx:
            apart = files.write_onnx(folder, smaller, images, proof.allowed)
            lines.append(f"{files.ONNX}: outputs differ by at most {apart:.2g}")
        if options.torch_export:
            apart = files.write_torch_export(folder, smaller, images, proof.allowed)
            lines.append(f"{files.TORCH_EXPORT}: outputs differ by at most {apart:.2g}")
        name, larger, size = full_size(run)
        sizes = (size, (folder / standalone.MODEL).stat().st_size)
        networks = {name: larger, "smaller": smaller}
        table = compare(networks, images, sizes, devices, options.repeat)

    for line in plan["stays"]:
        print(f"stays: {line}")
    gone = int(verdict.removed.sum())
    if before:
        at_first, left = count_parameters(larger), count_parameters(run.model)
        print(f"removed in training: {at_first - left:,} of {at_first:,} parameters")
    print(f"removed: {gone:,} of {coupling.total:,} groups of channels")
    print("\n".join(lines))
    print(f"\n{describe_machine(devices[-1])}\n{format_table(table)}")
    print(f"\nwritten to {options.run / files.FOLDER}", flush=True)


def full_size(run: FinishedRun) -> tuple[str, nn.Module, int]:
    """Return what the network of full size is to be called, itself, and the bytes of its weights.

    Where training has made it smaller, that is a fresh one: its weights are gone.
    """
    if not run.summary["delivered"].get("layers"):
        return "masked", run.model, (run.path / STATE).stat().st_size
    whole = standalone.build(run.description).eval()
    whole.to(next(run.model.parameters()).dtype)
    tensors = whole.state_dict().values()
    return "at first", whole, sum(t.numel() * t.element_size() for t in tensors)


def smaller(model: nn.Module, images: Tensor) -> nn.Module:
    """Return a copy of a masked `model`, on the CPU, without what its masks removed.

    `images` [n, 3, S, S] are normalised as those that it was trained on: channels that stay
    constant on them are removed as well. Raises UserError where the copy computes something else.
    """
    coupling, stays = find_channels(model, images.shape[-1])
    if stays:
        raise UserError("; ".join(stays))
    found = shrink(model, coupling, judge(model, coupling, images).removed)
    prove(model, found, iter([(images, images.new_zeros(len(images), dtype=torch.int64))]))
    return found


def find_channels(model: nn.Module, image_size: int) -> tuple[Coupling, list[str]]:
    """Return the channels that can be removed, and why there are none where there are none."""
    try:
        return find_coupling_by(model, image_size, find_rules(model, image_size)), []
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
