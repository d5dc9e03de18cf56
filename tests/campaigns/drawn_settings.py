"""Draw settings, train, stop half way, go on: the network is that of a run without a stop.

    python tests/campaigns/drawn_settings.py [--cases 100] [--seed 0] [--limit 120]

Each case is a tiny run of drawn settings. It is trained three times: through, until a SIGTERM half
way, and on from there. A case is `equal` where both networks are the same bit for bit, `refused`
where the program says in one line at the start why such a run can't be, and `failed` otherwise: a
traceback, a job that does not end, another network. The case of a number and a seed is always the
same one, and a failed one keeps its folder. Exits with 1 where a case failed.
"""

import argparse
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

HARNESS = Path(__file__).resolve().parents[1] / "harness"
sys.path.insert(0, str(HARNESS))

from launch import environment, launcher  # noqa: E402

# Ranks, and ranks per node.
LAYOUTS = {"1": (1, 1), "2": (2, 1), "2x2": (4, 2)}
DATA = {
    "digits": ("--dataset digits", ("resnet8-w4", "coupled_nets:encoder", "faulty:noisy")),
    "text": ("--dataset text --tokenizer chars --context 8", ("tiny_text:gpt", "tiny_text:untied")),
}
BASE = (
    "--train-samples 96 --test-samples 32 --batch-size 4 --outer-iterations 6 --local-steps 2 "
    "--device cpu --progress off --timeout 60"
)
# Files are appended to two or three times in each of the six outer iterations; qsr has fewer.
HALF_WAY, HALF_WAY_OF_QSR = 7, 4
USAGE, PREEMPTED = 2, 75

# Flags with values to draw from.
ALL = """--optimizer sgd|adamw; --val-split 0|0.2; --lr 0.01|0.05; --model-ema-decay 0|0.5;
    --clip-grad 0|0.5; --seed 0|1"""
PRUNES = """--groups filter|channel|shape|kernel|pattern|coupled|filter channel;
    --keep-ratio 0.3|0.5|0.8; --keep-by groups|parameters"""
CONSENSUS = """--mask-agreement or|vote; --after-freeze local-sgd|admm; --theta-start z|theta;
    --penalty fixed|ramp"""
ROUNDS = """--payload fp32|fp16|bf16|int8|int4|int2; --fragments 1|2;
    --overlap-steps 0|1 --evaluate-every 3; --node-sync step|outer; --bn average|recalibrate"""
STEPS = "--aggregation flat|hierarchical"
STAGES = "--warmup-iterations 1 --keep-ramp-iterations 2 --freeze-iteration 4"
# What a method takes, and how many times as often it is drawn.
METHODS = {
    "prunex": (f"{STAGES} --residuals evaluate", [PRUNES, CONSENSUS, ROUNDS], 6),
    "prunex-flat": (f"{STAGES} --residuals evaluate", [PRUNES], 1),
    "one-shot": ("--one-shot-prune-iteration 3", [PRUNES, ROUNDS], 2),
    "local-sgd": ("", [ROUNDS], 2),
    "diloco": ("", [ROUNDS], 2),
    "qsr": ("--qsr-alpha 0.002", [ROUNDS], 1),
    "sparseloco": ("--sparseloco-ratio 0.05", [], 1),
    "dgc": ("--dgc-ratio 0.05 --dgc-warmup-epochs 1 --optimizer sgd --momentum 0.9", [], 1),
    "prunetrain": ("--prunetrain-reconfigure-every 2 --prunetrain-threshold 0.45", [], 1),
    "clicktrain": ("--keep-ratio 0.4", [STEPS], 1),
    "pactrain": ("--keep-ratio 0.5 --pactrain-prune-iteration 2", [STEPS], 1),
    **{name: ("", [STEPS], 1) for name in ("dense", "topk", "powersgd", "dion", "spardl", "bf16")},
    **{name: ("", [], 1) for name in ("terngrad", "lion", "adacgd", "gossip")},
}


def draw(seed: int, number: int) -> tuple[str, list[str]]:
    """Return the layout and the flags of a case."""
    rng = random.Random(f"{seed} {number}")
    (method,) = rng.choices([*METHODS], [weight for *_, weight in METHODS.values()])
    (dataset, models), layout = rng.choice([*DATA.values()]), rng.choice([*LAYOUTS])
    own, tables, _ = METHODS[method]
    text = f"{BASE} {dataset} {own} --method {method} --model {rng.choice(models)}"
    for table in [ALL, *tables]:
        for flag, _, values in (part.strip().partition(" ") for part in table.split(";")):
            # Some stay as they are by default.
            drawn = rng.choice(values.split("|"))
            text += f" {flag} {drawn}" if rng.random() < 0.6 else ""
    if method != "prunex-flat":
        text += f" --ranks-per-node {LAYOUTS[layout][1]}"
    # Of a flag that stands there twice the last one counts.
    flags = dict(f"{part} ".split(" ", 1) for part in text.split("--")[1:])
    return layout, shlex.split(" ".join(f"--{flag} {value}" for flag, value in flags.items()))


def start(layout: str, program: Sequence[str], folder: Path, limit_s: float) -> tuple[int, str]:
    """Run a job to its end, or for `limit_s`; return its exit code (-1 for none) and its errors."""
    command = [*launcher(), "-n", str(LAYOUTS[layout][0]), sys.executable, *program]
    files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    job = subprocess.Popen(command, cwd=folder, env=environment(), text=True, **files)
    with job:
        try:
            errors = job.communicate(timeout=limit_s)[1]
        except subprocess.TimeoutExpired:
            # The launcher ends its ranks.
            job.terminate()
            return -1, f"it did not end within {limit_s:g} s\n{job.communicate()[1]}"
        return job.returncode, errors


def outcome(layout: str, flags: list[str], folder: Path, limit_s: float) -> tuple[str, str]:
    """Train a case three times in `folder`; return what it counts as, and why."""
    whole, parts = folder / "whole", folder / "parts"
    train = ["-m", "prunex_mpi.train", *flags]
    code, errors = start(layout, [*train, "--run-dir", str(whole)], folder, limit_s)
    lines = [line for line in errors.splitlines() if "prunex_mpi.train: error: " in line]
    if code == USAGE and len(lines) == 1 and "Traceback" not in errors:
        return "refused", lines[0].partition("error: ")[2]
    if code:
        return "failed", f"whole: exit code {code}\n{errors}"
    fault = {"rank": 0, "at": "prunex_mpi.run.directory:RunDirectory.append", "side": "after"}
    half_way = HALF_WAY_OF_QSR if "qsr" in flags else HALF_WAY
    fault |= {"call": half_way, "what": "term", "mark": str(folder / "mark")}
    stopped = [str(HARNESS / "faulty.py"), json.dumps(fault), *flags, "--run-dir", str(parts)]
    code, errors = start(layout, stopped, folder, limit_s)
    status = json.loads((parts / "summary.json").read_text())["status"] if parts.exists() else ""
    if code != PREEMPTED or status != "preempted":
        return "failed", f"stopped: exit code {code}, {status}\n{errors}"
    code, errors = start(layout, [*train, "--run-dir", str(parts), "--resume"], folder, limit_s)
    if code:
        return "failed", f"resumed: exit code {code}\n{errors}"
    networks = [(run / "state.safetensors").read_bytes() for run in (whole, parts)]
    return ("equal", "") if networks[0] == networks[1] else ("failed", "another network")


def main() -> int:
    """Do the cases, print what came of each and how many there are of a kind."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a job")
    options, counts = parser.parse_args(), Counter()
    for number in range(options.first, options.first + options.cases):
        layout, flags = draw(options.seed, number)
        folder = Path(tempfile.mkdtemp(prefix=f"drawn-{number}-"))
        kind, why = outcome(layout, flags, folder, options.limit)
        counts[kind] += 1
        told = [f"{number} {kind} on {layout}: {shlex.join(flags)}", *why.splitlines()[-20:]]
        print("\n    ".join(told), flush=True)
        if kind != "failed":
            shutil.rmtree(folder)
    print(", ".join(f"{counts[kind]} {kind}" for kind in ("equal", "refused", "failed")))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
