#!/usr/bin/env bash
# Install into .venv and train: 4 ranks on 2 virtual nodes, real images, no network after that.
#   bash batch/quickstart.sh [flags of prunex_mpi.train]
# PYTHON and PRUNEX_MPI choose Python and MPI, see _install.sh. After RUN_TIMEOUT_S (900) seconds
# the training is ended.

source "$(dirname "${BASH_SOURCE[0]}")/_install.sh"

TRAIN_FLAGS=(--dataset digits --model resnet20 --ranks-per-node 2)

prunex_install digits report
run_mpi 4 "$VENV_PYTHON" -m prunex_mpi.train \
    --run-dir "$ROOT/runs/quickstart-$(date +%Y%m%d-%H%M%S)" "${TRAIN_FLAGS[@]}" "$@"
