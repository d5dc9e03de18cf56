"""Write the physically smaller network of a run: `python -m prunex_mpi.export RUN`.

RUN/model then holds model.safetensors, plan.json and load_model.py, which loads them with nothing
but torch, torchvision and safetensors. No MPI is started, and torch is loaded after the flags are
parsed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prunex_mpi import __version__
from prunex_mpi.base.errors import UserError
from prunex_mpi.settings.cli import Parser

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prunex_mpi.pruning.coupling import Coupling

DEVICES = ("auto", "cpu", "cuda")
PROOF_IMAGES, REPEAT = 2000, 7
MAX_COUNT = 10**6
# On so many images it is measured which channels are constant zero.
JUDGED_IMAGES = 32


@dataclass(frozen=True)
class Options:
    """What to export, and how to prove and measure it."""

    run: Path
    data_dir: str
    onnx: bool
    torch_export: bool
    images: int
    device: str
    repeat: int


def build_parser() -> Parser:
    """Return the parser of the flags of export."""
    parser = Parser(
        prog="python -m prunex_mpi.export",
        description="Take out of a run's network what its masks removed; write it to RUN/model, "
        "prove that it computes the same, and measure what it saves.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a complete run")
    add("--version", action="version", version=f"prunex_mpi {__version__}")
    add("--onnx", action="store_true", help="write model.onnx as well")
    add("--torch-export", action="store_true", help="write model.pt2 as well, by torch.export")
    add("--data-dir", default="", metavar="DIR", help="folder of the data, where it has moved")
    add(
        "--images",
        type=int,
        default=PROOF_IMAGES,
        metavar="N",
        help=f"test images to compare the networks on, 0 for all of the run [{PROOF_IMAGES}]",
    )
    add(
        "--device",
        default="auto",
        choices=DEVICES,
        help="where to measure times; auto: on the CPU, and on a GPU where there is one [auto]",
    )
    add(
        "--repeat",
        type=int,
        default=REPEAT,
        metavar="N",
        help=f"turns of each measurement, whose median counts; 0 measures no times [{REPEAT}]",
    )
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` (without the program's name) asks for; torch is not loaded.

    Raises UserError with one line that names the culprit; `--help` and `--version` print and exit.
    """
    given = build_parser().parse_all(argv)
    for name in ("images", "repeat"):
        if not 0 <= getattr(given, name) <= MAX_COUNT:
            raise UserError(f"--{name} must be from 0 to {MAX_COUNT}, not {getattr(given, name)}")
    return Options(
        run=Path(given.run),
        data_dir=given.data_dir,
        onnx=given.onnx,
        torch_export=given.torch_export,
        images=given.images,
        device=given.device,
        repeat=given.repeat,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Export a run and return the exit code."""
    try:
        export(parse(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        # One line, whatever a name of the user's holds.
        line = " ".join(str(error).split())
        print(f"prunex_mpi.export: error: {line}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def export(options: Options) -> None:
    """Read the run, take out what can go, write it, prove it and measure it."""
    import torch

    from prunex_mpi.base.files import STATE
    from prunex_mpi.base.tables import format_table
    from prunex_mpi.data.batches import Shard, evaluation_batches
    from prunex_mpi.models import standalone
    from prunex_mpi.pruning.removable import describe_removed, judge, zeros_that_stay
    from prunex_mpi.pruning.shrink import smaller_sizes, smaller_tensors
    from prunex_mpi.run.finished_run import read_run
    from prunex_mpi.tools.bench.timing import describe_machine
    from prunex_mpi.tools.export import files
    from prunex_mpi.tools.export.proof import BATCH, compare, prove

    devices = choose_devices(options.device)
    if options.onnx:
        files.require_onnx()
    run = read_run(options.run, options.data_dir)
    count = min(options.images or len(run.test.labels), len(run.test.labels))
    chosen = Shard(run.test.images[:count], run.test.labels[:count])
    look = {"mean": run.mean, "std": run.std, "device": "cpu"}
    look["dtype"] = next(p.dtype for p in run.model.parameters())
    images, _ = next(evaluation_batches(chosen, batch_size=JUDGED_IMAGES, **look))

    # Take out what can go.
    coupling, stays = find_channels(run.model, run.description["image_size"])
    verdict = judge(run.model, coupling, images)
    tensors = smaller_tensors(run.model, coupling, verdict.removed)
    plan = {
        "model": run.description,
        "layers": smaller_sizes(run.model, coupling, verdict.removed),
        "normalisation": {"mean": run.mean.tolist(), "std": run.std.tolist()},
        "test_accuracy": run.summary["test_accuracy"],
        "removed": describe_removed(coupling, verdict.removed),
        "stays": [*verdict.stays, *stays, *zeros_that_stay(tensors)],
        "versions": {"prunex_mpi": __version__, "torch": torch.__version__},
    }

    # Write, load back, prove.
    lines = []
    with files.new_model_folder(options.run) as folder:
        files.write_network(folder, tensors, plan)
        smaller = standalone.load(folder)
        batches = evaluation_batches(chosen, batch_size=BATCH, **look)
        proof = prove(run.model, smaller, batches)
        lines.append(proof.line())
        if options.onnx:
            apart = files.write_onnx(folder, smaller, images, proof.allowed)
            lines.append(f"{files.ONNX}: outputs differ by at most {apart:.2g}")
        if options.torch_export:
            apart = files.write_torch_export(folder, smaller, images, proof.allowed)
            lines.append(f"{files.TORCH_EXPORT}: outputs differ by at most {apart:.2g}")
        written = (options.run / STATE, folder / standalone.MODEL)
        table = compare(run.model, smaller, images, written, devices, options.repeat)

    for line in plan["stays"]:
        print(f"stays: {line}")
    gone = int(verdict.removed.sum())
    print(f"removed: {gone:,} of {coupling.total:,} groups of channels")
    print("\n".join(lines))
    print(f"\n{describe_machine(devices[-1])}\n{format_table(table)}")
    print(f"\nwritten to {options.run / files.FOLDER}", flush=True)


def find_channels(model: "nn.Module", image_size: int) -> tuple["Coupling", list[str]]:
    """Return the channels that can be removed, and why there are none where there are none."""
    from prunex_mpi.pruning.coupling import Coupling, find_coupling

    try:
        return find_coupling(model, image_size), []
    except UserError as error:
        return Coupling({}, {}, (), 0, {}, ()), [str(error)]


def choose_devices(requested: str) -> list["torch.device"]:
    """Return where times are measured; raise UserError when CUDA is asked for and absent."""
    import torch

    cuda = torch.cuda.is_available()
    if requested == "cuda" and not cuda:
        raise UserError("--device cuda: torch sees no GPU on this machine; use --device cpu")
    names = ["cpu"] if requested != "cuda" else []
    names += ["cuda"] if cuda and requested != "cpu" else []
    return [torch.device(name) for name in names]


if __name__ == "__main__":
    sys.exit(main())
