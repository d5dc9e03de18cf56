#!/usr/bin/env bash
# Prove the device path on a machine with an NVIDIA GPU, and measure it, in ten minutes at most:
#   bash batch/gpu.sh [OUT]
# Nothing is installed: PYTHON (python3) has torch with CUDA, mpi4py, safetensors, pytest and
# pytest-mpi, mpirun is that of the MPI to be tried. OUT (gpu) receives results.json, a table and
# the log of every part. LIMIT_S (570) is the time for all parts; what does not fit is not begun,
# and the table says so. PARTS names some parts alone.
# Exit code 1 where a part has failed, was not begun or has not come to its end.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-570}
ALL=(doctor {host,device,oracles}-{2,4,1} kernels-{resnet18,resnet152} overhead ddp ddp-2
    phases-{host,device} ddp-compiled)
for name in ${PARTS:-}; do
    if [[ " ${ALL[*]} " != *" $name "* ]]; then
        echo "error: PARTS names $name, which is no part: name some of ${ALL[*]}" >&2
        exit 2
    fi
done
OUT=$(mkdir -p "${1:-gpu}" && cd "${1:-gpu}" && pwd) || OUT=
if [[ -z $OUT ]]; then
    echo "error: the folder ${1:-gpu} can't be made: name another one" >&2
    exit 2
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
export PRUNEX_TEST_DEVICE=${PRUNEX_TEST_DEVICE:-cuda}
# Open MPI refuses to start as root otherwise, and root is the ordinary user of a container.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
LAUNCH=(mpirun)
# Open MPI starts no more ranks than it sees cores unless it is told to.
# Jobs side by side must not be bound to the same cores.
if mpirun --version 2>/dev/null | grep -q "Open MPI\|OpenRTE"; then
    LAUNCH+=(--oversubscribe --bind-to none)
fi

if [[ $PRUNEX_TEST_DEVICE == cuda ]] \
    && ! "$PYTHON" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then
    echo "error: torch of $PYTHON sees no GPU here; set PYTHON to one that does" >&2
    exit 2
fi
# What an earlier call has left must not pass for results of this one.
rm -rf "$OUT"/run-host "$OUT"/run-device
rm -f "$OUT"/{results,doctor,kernels-*,overhead,ddp*}.json
: >"$OUT/parts.tsv"

# Run a part: its name, its limit in seconds, its command.
part() {
    local name=$1 limit=$2 began=$SECONDS left=$((LIMIT_S - SECONDS)) status
    shift 2
    if [[ -n ${PARTS:-} && " $PARTS " != *" $name "* ]]; then return; fi
    if ((left < 20)); then
        printf '%s\tnot begun\t0\n' "$name" >>"$OUT/parts.tsv"
        return
    fi
    if ((limit > left)); then limit=$left; fi
    echo "==== $name"
    timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    case $status in
        0) status=passed ;;
        124 | 137) status="not done after $limit s" ;;
        *) status="failed ($status)" && tail -n 15 "$OUT/$name.log" ;;
    esac
    printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - began))" >>"$OUT/parts.tsv"
}

TESTS=("$PYTHON" -m mpi4py -m pytest -q --with-mpi -p no:cacheprovider)

part doctor 90 "${LAUNCH[@]}" -n 2 "$PYTHON" -m prunex_mpi.doctor --device cuda \
    --run-dir "$OUT/runs" --json "$OUT/doctor.json"
# Side by side, since most of a test waits; what is measured comes after them, alone.
export OMPI_MCA_mpi_yield_when_idle=1
for ranks in 2 4 1; do
    for buffers in host device; do
        PRUNEX_TEST_BUFFERS=$buffers part "$buffers-$ranks" 150 \
            "${LAUNCH[@]}" -n "$ranks" "${TESTS[@]}" tests/device &
    done
    PRUNEX_TEST_BUFFERS=host part "oracles-$ranks" 150 \
        "${LAUNCH[@]}" -n "$ranks" "${TESTS[@]}" tests/methods -k equals_ -m "mpi and not long" &
done
wait
unset OMPI_MCA_mpi_yield_when_idle
for model in resnet18 resnet152; do
    part "kernels-$model" 60 "$PYTHON" -m prunex_mpi.bench kernels --model "$model" \
        --device cuda --json "$OUT/kernels-$model.json"
done
BENCH=("$PYTHON" -m prunex_mpi.bench --device cuda --amp bf16 --batch-size 128)
part overhead 60 "${BENCH[@]}" overhead --models resnet18 --groups coupled --steps 16 \
    --json "$OUT/overhead.json"
part ddp 90 "${BENCH[@]}" ddp --models resnet18 resnet152 wide_resnet50_2 --json "$OUT/ddp.json"
part ddp-2 60 "${LAUNCH[@]}" -n 2 "${BENCH[@]}" ddp --models resnet18 --json "$OUT/ddp-2.json"
for buffers in host device; do
    part "phases-$buffers" 60 "${LAUNCH[@]}" -n 4 "$PYTHON" -m prunex_mpi.train --model resnet18 \
        --dataset synthetic --train-samples 8192 --test-samples 512 --ranks-per-node 2 \
        --device cuda --mpi-buffers "$buffers" --amp bf16 --channels-last --outer-iterations 8 \
        --warmup-iterations 1 --keep-ramp-iterations 2 --freeze-iteration 4 --local-steps 32 \
        --groups coupled --batch-size 64 --progress off --run-dir "$OUT/run-$buffers"
done
part ddp-compiled 150 "${BENCH[@]}" ddp --compile --models resnet18 --json "$OUT/ddp-compiled.json"

"$PYTHON" - "$OUT" <<'PYTHON'
import json
import subprocess
import sys
from pathlib import Path

import torch

out = Path(sys.argv[1])
rows = [line.split("\t") for line in (out / "parts.tsv").read_text().splitlines()]
found = {
    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
    "torch": torch.__version__,
    "mpi": subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout.split("\n")[0],
    "parts": [{"part": name, "result": result, "seconds": int(s)} for name, result, s in rows],
}
for path in sorted(out.glob("*.json")):
    found[path.stem] = json.loads(path.read_text())
for run in ("run-host", "run-device"):
    if (out / run / "summary.json").exists():
        found[run] = json.loads((out / run / "summary.json").read_text())
        seconds = found[run]["seconds"]
        ours = sum(seconds[phase] for phase in ("intra", "project", "inter", "dual"))
        found[run]["share of phases 2 to 5"] = ours / (ours + seconds["local"])
(out / "results.json").write_text(json.dumps(found, indent=1))
width = max(len(name) for name, _, _ in rows)
lines = [f"{found['gpu']}, torch {found['torch']}, {found['mpi']}"]
lines += [f"{name:{width}}  {s:>4} s  {result}" for name, result, s in rows]
lines += [
    f"share of phases 2 to 5, {run}: {100 * found[run]['share of phases 2 to 5']:.2f} %"
    for run in ("run-host", "run-device")
    if run in found
]
(out / "table.txt").write_text("\n".join(lines) + "\n")
print("\n".join(lines))
raise SystemExit(any(result != "passed" for _, result, _ in rows))
PYTHON
