"""Golden runs: show that a change of structure changes no result.

    python tests/harness/golden.py record FILE.json [--cases PATTERN ...] [--layouts NAME ...]
    python tests/harness/golden.py compare BEFORE.json AFTER.json

`record` trains each case on each layout, one MPI job per layout, and writes checksums of what came
of it. `compare` names what differs and exits with 1 if there is anything beside DELIBERATE.
Recordings compare where machine, MPI and torch are the same.
"""

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from prunex_mpi.models.inputs import Images

# (pattern of "case layout part quantity", reason) of what has changed since on purpose.
DELIBERATE: tuple[tuple[str, str], ...] = ()

# Ranks, and ranks per node.
LAYOUTS = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "2x2": (4, 2), "3+1": (4, 3)}
# Cases that not all layouts have.
LAYOUTS_OF = {"prunex-flat*": ("1", "2", "4"), "leaders*": ("2x2",)}

BASE = (
    "--model resnet8-w4 --dataset digits --train-samples 96 --test-samples 32 --batch-size 4 "
    "--outer-iterations 6 --local-steps 2 --lr 0.05 --device cpu --progress off "
    "--checkpoint-every off --timeout 60"
)
# Dense, on the ramp, frozen after the fourth of six iterations.
PRUNE = "--warmup-iterations 1 --keep-ramp-iterations 2 --freeze-iteration 4"
COUPLED = f"{PRUNE} --groups coupled"
# Nodes drift so far apart that they choose other groups.
APART = "--theta-start theta --node-sync outer --lr 0.4"
BEHIND = "--overlap-steps 1 --evaluate-every 3"
PAYLOADS = ("fp16", "bf16", "int8", "int4", "int2")
# NET in a case stands for a file of weights of the model.
CASES = {
    "prunex": PRUNE,
    "prunex-never-frozen": f"{PRUNE} --freeze-iteration 0",
    "prunex-frozen-by-drift": f"{PRUNE} --freeze-iteration 0 --freeze-drift 9",
    **{f"prunex-{payload}": f"{PRUNE} --payload {payload}" for payload in PAYLOADS},
    "prunex-overlap": f"{PRUNE} {BEHIND} --residuals off",
    "prunex-overlap-int4": f"{PRUNE} {BEHIND} --residuals evaluate --payload int4",
    "prunex-filter": f"{PRUNE} --groups filter",
    "prunex-shape": f"{PRUNE} --groups shape",
    "prunex-filter-channel": f"{PRUNE} --groups filter channel --keep-ratio 0.5 0.75",
    "prunex-pattern": f"{PRUNE} --groups pattern",
    "prunex-kernel-pattern-int4": f"{PRUNE} --groups kernel pattern --payload int4",
    "prunex-three-groups": f"{PRUNE} --groups channel shape filter",
    "prunex-coupled": COUPLED,
    "prunex-coupled-shape": f"{PRUNE} --groups coupled shape",
    "prunex-coupled-parameters": f"{COUPLED} --keep-by parameters --keep-floor 0.1",
    "prunex-coupled-multiply-adds": f"{COUPLED} --keep-by multiply-adds",
    "prunex-gates": f"{COUPLED} --score gates",
    "prunex-removed": f"{COUPLED} --remove-dropped",
    "prunex-removed-gates-int8": f"{COUPLED} --remove-dropped --score gates --payload int8",
    "prunex-or": f"{PRUNE} {APART} --mask-agreement or",
    "prunex-or-int4": f"{PRUNE} {APART} --mask-agreement or --payload int4",
    "prunex-theta-start": f"{PRUNE} --theta-start theta",
    "prunex-node-sync": f"{PRUNE} --node-sync outer",
    "prunex-decay-in-z": f"{PRUNE} --weight-decay-in z",
    "prunex-bn-average": f"{PRUNE} --bn average",
    "prunex-admm": f"{PRUNE} --after-freeze admm",
    "prunex-or-admm": f"{PRUNE} {APART} --mask-agreement or --after-freeze admm",
    "prunex-balance": f"{PRUNE} --penalty balance --after-freeze admm",
    "prunex-converges": f"{PRUNE} --after-freeze admm --eps-abs 0.05 --eps-rel 0.5",
    "prunex-adamw": f"{PRUNE} --optimizer adamw --weight-decay-on weights",
    "prunex-no-batchnorm": f"{PRUNE} --model odd_models:small --groups filter",
    "prunex-transformer": f"{COUPLED} --model coupled_nets:encoder",
    "prunex-epochs": f"{PRUNE} --local-steps 0 --local-epochs 1/2",
    "prunex-cut-messages": f"{PRUNE} --piece-kib 1 --payload int8",
    "preset-paper": "--preset paper --keep-ratio 0.6",
    "preset-paper-int4": "--preset paper --groups filter channel --payload int4",
    "preset-thin": "--preset thin --overlap-steps 1 --outer-iterations 9",
    "preset-small": "--preset small --keep-ratio 0.3 --overlap-steps 1 --outer-iterations 9",
    "preset-finetune": "--preset finetune --init-from NET",
    "prunex-flat": f"{PRUNE} --method prunex-flat",
    "prunex-flat-int4": f"{PRUNE} --method prunex-flat --payload int4",
    "local-sgd": "--method local-sgd",
    "local-sgd-outer": "--method local-sgd --node-sync outer --bn recalibrate",
    **{f"local-sgd-{p}": f"--method local-sgd --payload {p}" for p in PAYLOADS},
    "local-sgd-overlap": f"--method local-sgd {BEHIND} --payload int8",
    "diloco": "--method diloco",
    "diloco-int4": "--method diloco --payload int4 --diloco-outer-momentum 0.5 "
    "--inner-momentum keep",
    "qsr": "--method qsr --qsr-alpha 0.08",
    "sparseloco": "--method sparseloco --sparseloco-ratio 0.05",
    "one-shot": "--method one-shot --one-shot-prune-iteration 4",
    "one-shot-removed": "--method one-shot --one-shot-prune-iteration 4 --groups coupled "
    "--remove-dropped",
    **{
        f"{method}-{aggregation}": f"--method {method} {flags} --aggregation {aggregation}"
        for method, flags in (
            ("dense", ""),
            ("topk", "--topk-ratio 0.05"),
            ("powersgd", ""),
            ("dion", ""),
            ("omnireduce", "--omnireduce-block-size 16 --omnireduce-block-ratio 0.3"),
            ("pactrain", "--pactrain-stable-window 3"),
            ("spardl", "--spardl-ratio 0.05"),
        )
        for aggregation in ("flat", "hierarchical")
    },
    "dgc": "--method dgc --dgc-ratio 0.05 --dgc-warmup-epochs 1",
    "fp16": "--method fp16",
    "bf16": "--method bf16 --aggregation hierarchical",
    "terngrad": "--method terngrad",
    "lion": "--method lion",
    "adacgd": "--method adacgd",
    "gossip": "--method gossip",
    "parallax": "--method parallax --model odd_models:reads_with_empty_parameters",
    "embrace": "--method embrace --model odd_models:reads_with_empty_parameters",
    "prunetrain": "--method prunetrain --prunetrain-reconfigure-every 2 "
    "--prunetrain-threshold 0.45",
    "clicktrain": "--method clicktrain",
    "clicktrain-leaders": "--method clicktrain --aggregation hierarchical --keep-ratio 0.3",
    "pactrain-grasp-of-ten": "--method pactrain --pactrain-score grasp --pactrain-stable-window 3 "
    "--train-samples 256",
    "pactrain-magnitude-ternary": "--method pactrain --pactrain-score magnitude --pactrain-ternary "
    "--pactrain-stable-window 2 --aggregation hierarchical",
    "dense-adamw": "--method dense --optimizer adamw",
    "dense-resized-crop": "--method dense --augment resized-crop --transforms random-erasing",
    "clip-norm": f"{PRUNE} --clip-grad 0.5",
    "ema": f"{PRUNE} --model-ema-decay 0.5",
    "val-split": f"{PRUNE} --val-split 0.2",
    "val-share-ema": "--method local-sgd --val-split 0.2 --model-ema-decay 0.5",
    "teacher": f"{PRUNE} --teacher NET --distillation-alpha 0.3",
    "amp-bf16": f"{PRUNE} --amp bf16",
    "lr-step": f"{PRUNE} --lr-schedule step",
    "channels-last": f"{PRUNE} --lr-schedule constant --channels-last",
}

# What is recorded of a run, by names of its own, and where its files have it.
METRICS = {
    **{name: (name,) for name in ("train_loss", "test_loss", "test_accuracy", "val_loss")},
    **{name: (name,) for name in ("val_accuracy", "density", "mask_drift", "frozen", "lr")},
    **{name: (name,) for name in ("rho1", "rho2")},
}
RESIDUALS = ("intra_primal", "intra_dual", "inter_primal", "inter_dual")
METRICS |= {name: ("residuals", name) for name in RESIDUALS}
BYTES = {
    name: ("bytes", name)
    for name in ("dense", "payload", "sent", "mask", "intra", "evaluate", "setup")
}
LAYERS = {name: (name,) for name in ("layer", "density", "rho1", "rho2", *RESIDUALS)}
RUN_FILES = ("metrics.jsonl", "layers.jsonl", "state.safetensors")

JOB_LIMIT_S = 900


def checksum(*parts: bytes) -> str:
    """Return the CRC-32 of the parts, one after the other, in hexadecimal."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


def read_quantities(path: Path, where: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return {quantity: last value or sum of integers, and checksum of all} of a JSON-lines file.

    A quantity that the file does not have is "absent".
    """
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {}
    for name, keys in where.items():
        values: list[Any] = records
        for key in keys:
            values = [value.get(key, "absent") for value in values]
        shown = sum(values) if keys[0] == "bytes" else values[-1]
        same = set(values) == {"absent"}
        found[name] = "absent" if same else f"{shown} {checksum(json.dumps(values).encode())}"
    return found


def read_network(path: Path) -> dict[str, dict[str, str]]:
    """Return checksums of the delivered weights, of what of them is zero, and of statistics."""
    from safetensors.numpy import load_file

    weights, mask, statistics = [], [], []
    for name, tensor in sorted(load_file(path).items()):
        told = [f"{name} {tensor.dtype} {tensor.shape}".encode(), tensor.tobytes()]
        (statistics if "running_" in name or "num_batches" in name else weights).extend(told)
        if tensor.ndim > 1:
            mask += [f"{name} {tensor.shape}".encode(), (tensor != 0).tobytes()]
    parts = {"weights": weights, "mask": mask, "statistics": statistics}
    return {part: {"all": checksum(*pieces)} for part, pieces in parts.items()}


def read_run(path: Path) -> dict[str, dict[str, str]]:
    """Return {part: {quantity: value and checksum}} of a finished run, without times."""
    metrics, layers, state = (path / name for name in RUN_FILES)
    return {
        "metrics": read_quantities(metrics, METRICS),
        "bytes": read_quantities(metrics, BYTES),
        "layers": read_quantities(layers, LAYERS),
        **read_network(state),
    }


def write_net(path: Path) -> None:
    """Write weights of the cases' model as a file that a run begins with, or learns from."""
    import torch
    from safetensors.torch import save_file

    from prunex_mpi.models.build import build_model

    torch.manual_seed(7)
    save_file(build_model("resnet8-w4", Images(8, 10)).state_dict(), path)


def run_cases(folder: Path, layout: str, names: Sequence[str]) -> None:
    """Train the cases one after the other on the ranks of this job; note each in done.jsonl."""
    from prunex_mpi.train import main

    for name in names:
        run = folder / "run"
        flags = f"{BASE} --ranks-per-node {LAYOUTS[layout][1]} {CASES[name]}"
        words = [str(folder / "net.safetensors") if w == "NET" else w for w in shlex.split(flags)]
        code = main([*_last_of_each(words), "--run-dir", str(run)])

        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 0:
            result = {"failed": {"exit": str(code)}} if code else read_run(run)
            shutil.rmtree(run, ignore_errors=True)
            with open(folder / "done.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps([name, result]) + "\n")
        MPI.COMM_WORLD.Barrier()


def _last_of_each(words: Sequence[str]) -> list[str]:
    """Leave out flags that are given again later, which the program would refuse."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag = word
            flags[flag] = []
        else:
            flags[flag].append(word)
    return [word for flag, values in flags.items() for word in (flag, *values)]


def record_layout(layout: str, names: Sequence[str]) -> dict[str, Any]:
    """Return {case: what came of it}, of jobs that begin anew after a case that ended its job."""
    from launch import environment, launcher

    done: dict[str, Any] = {}
    while rest := [name for name in names if name not in done]:
        with tempfile.TemporaryDirectory() as folder:
            write_net(Path(folder) / "net.safetensors")
            command = [*launcher(), "-n", str(LAYOUTS[layout][0]), sys.executable, __file__]
            command += ["job", folder, layout, *rest]
            with open(Path(folder) / "output", "w+", encoding="utf-8") as output:
                job = subprocess.Popen(
                    command,
                    env=environment(),
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    cwd=folder,
                )
                code: int | str
                try:
                    code = job.wait(JOB_LIMIT_S)
                except subprocess.TimeoutExpired:
                    code = "its time limit"
                finally:
                    # No job outlives this program, even where it is ended from outside.
                    job.terminate()
                    job.wait()
                output.seek(0)
                errors = [line for line in output if "error:" in line]
            lines = Path(folder) / "done.jsonl"
            if lines.exists():
                done |= dict(map(json.loads, lines.read_text(encoding="utf-8").splitlines()))
        print(*errors, sep="", end="", file=sys.stderr)
        lost = [name for name in rest if name not in done]
        done |= {name: {"failed": {"exit": f"the job ended with {code}"}} for name in lost[:1]}
    return done


def record(path: Path, cases: Sequence[str], layouts: Sequence[str]) -> int:
    """Record the cases on the layouts; return 1 where a case fails."""
    results: dict[str, Any] = {}
    for layout in layouts:
        started = time.monotonic()
        names = [
            name
            for name in CASES
            if any(fnmatchcase(name, pattern) for pattern in cases)
            and all(layout in of for p, of in LAYOUTS_OF.items() if fnmatchcase(name, p))
        ]
        done = record_layout(layout, names)
        failed = [name for name in names if "failed" in done[name]]
        results |= {f"{name} {layout}": done[name] for name in names}
        text = f"{layout}: {len(names)} cases, {time.monotonic() - started:.0f} s"
        print(text + (f"; failed: {' '.join(failed)}" if failed else ""), flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in result for result in results.values()))


def compare(before: Path, after: Path) -> int:
    """Print what differs between two recordings; return 1 for what is not DELIBERATE."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    both = [key for key in old if key in new]
    print(f"{len(both)} runs in both, {len(old) - len(both)} and {len(new) - len(both)} in one")
    unexpected = 0
    for key in both:
        for part in {**old[key], **new[key]}:
            was, now = old[key].get(part, {}), new[key].get(part, {})
            for name in {**was, **now}:
                if was.get(name) == now.get(name):
                    continue
                what = f"{key} {part} {name}"
                reasons = [why for pattern, why in DELIBERATE if fnmatchcase(what, pattern)]
                unexpected += not reasons
                print(f"{what}: {was.get(name)} -> {now.get(name)}", *reasons, sep="; ")
    print(f"{unexpected} unexpected differences")
    return int(unexpected > 0)


def main() -> int:
    """Do what the command line asks for."""
    if sys.argv[1:2] == ["job"]:
        run_cases(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train all cases, write their checksums")
    recording.add_argument("file", type=Path)
    recording.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN")
    recording.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    comparing = commands.add_parser("compare", help="say what differs between two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.command == "record":
        return record(options.file, options.cases, options.layouts)
    return compare(options.before, options.after)


if __name__ == "__main__":
    sys.exit(main())
