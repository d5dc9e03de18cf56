#!/usr/bin/env bash
# Use the minutes of one GPU: what a piece trains it also tests. Nothing is installed or fetched.
#   OUT=FOLDER bash batch/gpu_study.sh PIECE [flags of bench compare, such as --outer-iterations 330]
# Pieces by value, with the minutes each is expected to take on an H200 (why: the plans):
#   1  6  what CIFAR-10 as JPEG can give: ResNet-18 by a plain recipe, beside dense (plan_gpu_dense.toml)
#   2  8  ResNet-18, 60 epochs (plan_gpu_resnet18.toml)
#   3  9  ResNet-56, 40 epochs (plan_gpu_resnet56.toml)
#   4  8  a language model of 10.7 million parameters (plan_gpu_text.toml)
#   5  8  phases 2 to 5 at T = 98, kernels of 127 million parameters, dense beside DDP, compiled last
#   6  4  tests/device and the oracles (gpu.sh)
# IMAGES (cifar10.tar.xz) is a tar file of train/CLASS/* and test/CLASS/*, TEXT (linux_doc.tar.xz) one of the train.txt and
# test.txt of linux_doc.sh. PYTHON (python3) has torch with CUDA and what setup.cfg lists; mpirun is an Open MPI's, for the tests
# of piece 6 with CUDA. A job trains TOGETHER rows (1) one after the other, and all jobs run at once: one leaves most of a GPU
# idle. OUT gets at most five files. Runs stay in WORK (gpu_study below TMPDIR): a piece that LIMIT_S (510) has stopped goes
# on when it is called again on the same machine. Exit code 1 for a piece that is not complete.
# GPU_STUDY_TINY=1 runs the same commands on a CPU, with few steps of tiny networks.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PIECE=${1:-}
shift
PYTHON=${PYTHON:-python3} IMAGES=${IMAGES:-cifar10.tar.xz} TEXT=${TEXT:-linux_doc.tar.xz} LIMIT_S=${LIMIT_S:-510}
WORK=${WORK:-${TMPDIR:-/tmp}/gpu_study}
export PYTHONPATH=$PWD:$PWD/batch${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
LAUNCH=(mpirun --oversubscribe --bind-to none)
DEVICE=cuda FLAGS=("$@") EPOCHS=(16 40) TOGETHER=${TOGETHER:-1}
IMAGE_DATA=(--dataset image_arrays:Images --data-dir "$WORK/images")
TEXT_DATA=(--data-dir "$WORK/text")
SMALL=() PARTS=(doctor {host,device,oracles}-{2,4,1})
if [[ -n ${GPU_STUDY_TINY:-} ]]; then
    export TORCHDYNAMO_DISABLE=1
    DEVICE=cpu EPOCHS=(1) TOGETHER=9 FLAGS+=(--batch-size 4 --outer-iterations 4 --evaluate-every 2)
    IMAGE_DATA+=(--model resnet8-w2)
    TEXT_DATA+=(--model gpt_nano-w32 --context 16 --local-steps 3)
    SMALL=(--batch-size 4 --model resnet8-w2 --models resnet8-w2 --steps 1 --repeat 1) PARTS=(host-2)
fi

die() {
    echo "error: $*" >&2
    exit 2
}

# Run a command for as long as is left; Open MPI hands SIGUSR1 on, and ranks leave with a checkpoint.
limited() {
    local left=$((LIMIT_S - SECONDS))
    ((left > 0)) && timeout -s USR1 -k 20 "$left" "$@"
}

# Train the rows of batch/plan_NAME.toml, and test them when all are there.
study() {
    local name=$1 ranks=$2 i rows
    shift 2
    local compare=("${LAUNCH[@]}" -n "$ranks" "$PYTHON" -m prunex_mpi.bench compare --plan "batch/plan_$name.toml"
        --device "$DEVICE" --mpi-buffers host "$@" "${FLAGS[@]}" --dir "$WORK/$name" --resume)
    mapfile -t rows < <(sed -n 's/^\[rows\."\?\([^]"]*\)"\?\]$/\1/p' "batch/plan_$name.toml")
    for ((i = 0; i < ${#rows[@]}; i += TOGETHER)); do
        limited "${compare[@]}" --rows "${rows[@]:i:TOGETHER}" >"$WORK/$name-$i.log" 2>&1 &
    done
    wait
    limited "${compare[@]}" --reveal --json "$OUT/$name.json"
}

decode_images() {
    [[ -f $IMAGES ]] || die "there is no file $IMAGES: set IMAGES to a tar file of train/CLASS/* and test/CLASS/*"
    [[ -f $WORK/images/test.npz ]] || "$PYTHON" batch/image_arrays.py "$IMAGES" "$WORK/images" || exit 2
}

piece_1() {
    local epochs
    decode_images
    for epochs in "${EPOCHS[@]}"; do
        [[ -s $WORK/plain_$epochs.txt ]] || limited "$PYTHON" batch/plain_recipe.py "${IMAGE_DATA[@]}" \
            --device "$DEVICE" --epochs "$epochs" >"$WORK/plain_$epochs.txt" || return 1
        cat "$WORK/plain_$epochs.txt"
    done
    study gpu_dense 1 "${IMAGE_DATA[@]}"
}

piece_2() {
    decode_images
    study gpu_resnet18 2 "${IMAGE_DATA[@]}"
}

piece_3() {
    decode_images
    study gpu_resnet56 2 "${IMAGE_DATA[@]}"
}

piece_4() {
    [[ -f $TEXT ]] || die "there is no file $TEXT: set TEXT to a tar file of train.txt and test.txt"
    "$PYTHON" -m tarfile -e "$TEXT" "$WORK/text" || exit 2
    study gpu_text 2 "${TEXT_DATA[@]}"
}

# Run a part of the benchmark into OUT/NAME.json.
measure() {
    limited "$PYTHON" -m prunex_mpi.bench --device "$DEVICE" --amp bf16 --batch-size 128 "${@:2}" "${SMALL[@]}" \
        --json "$OUT/$1.json"
}

piece_5() {
    measure overhead overhead --models resnet18 --groups coupled --steps 98
    measure kernels kernels --model wide_resnet101_2 --groups coupled --repeat 20
    measure ddp ddp --models resnet18 resnet152
    measure ddp_compiled ddp --models resnet152 --compile
    [[ -s $OUT/overhead.json && -s $OUT/kernels.json && -s $OUT/ddp.json && -s $OUT/ddp_compiled.json ]]
}

piece_6() {
    PARTS=${PARTS[*]} LIMIT_S=$LIMIT_S PRUNEX_TEST_DEVICE=$DEVICE bash batch/gpu.sh "$WORK/device"
    local status=$?
    cp "$WORK/device"/{table.txt,results.json} "$OUT"
    return "$status"
}

[[ $PIECE =~ ^[1-6]$ ]] || die "give the number of a piece, 1 to 6"
mkdir -p "$WORK" "${OUT:=gpu_study}" && OUT=$(cd "$OUT" && pwd) || die "set OUT and WORK to folders that can be made"
mpirun --version 2>/dev/null | grep -q "Open MPI\|OpenRTE" || die "there is no mpirun of an Open MPI on PATH"
"$PYTHON" - "$DEVICE" <<'CHECK' || exit 2
import importlib.util
import sys

needed = "torch torchvision mpi4py numpy PIL filelock safetensors tomli_w pytest pytest_mpi".split()
if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
    sys.exit(f"error: {sys.executable} lacks {', '.join(lacking)}: set PYTHON to one that has it")
import torch

if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit(f"error: torch of {sys.executable} sees no GPU here: set PYTHON to one that does")
CHECK
rm -f "$WORK"/*.log
"piece_$PIECE"
status=$?
# What runs wrote, without their weights.
(cd "$WORK" && find . -name images -prune -o -name text -prune -o \
    -name layers.jsonl -prune -o -type f \( -name '*.log' -o -name '*.json*' -o -name '*.toml' -o -name '*.txt' \) -print0 | tar -czf "$OUT/piece_$PIECE.tar.gz" --null -T -)
if ((status)); then
    echo "error: piece $PIECE is not complete after $SECONDS s; called again on this machine it goes on" >&2
    exit 1
fi
echo "piece $PIECE: $SECONDS s"
