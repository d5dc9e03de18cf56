# Sourced by the sbatch scripts: the environment of the job, and run_ranks COMMAND..., which starts
# COMMAND once per task, and end_job CODE. batch/README.md says what can be chosen.

set -euo pipefail

export PRUNEX_HOME
PRUNEX_ENV=${PRUNEX_ENV:-$PRUNEX_HOME/batch/env-pip.sh}
if [[ ! -f $PRUNEX_ENV ]]; then
    echo "error: PRUNEX_ENV=$PRUNEX_ENV is not a file: name one like batch/env-modules.sh" >&2
    exit 2
fi
# Names that a module or an environment leaves unset are its own affair.
set +u
# shellcheck source=/dev/null
source "$PRUNEX_ENV"
set -u

# Since Slurm 22.05 srun no longer takes this from the allocation.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

# A minute after one task has ended Slurm ends those that are left. At once would be too soon: where
# all leave with code 75, the last ones would be killed, and srun would say so instead.
SRUN=(srun --kill-on-bad-exit=0 --wait=60)
if [[ -n ${PRUNEX_SRUN_MPI:-} ]]; then SRUN+=(--mpi="$PRUNEX_SRUN_MPI"); fi
# Every rank sees all GPUs of its node and takes its own; a GPU hidden from its neighbours can't be
# reached by CUDA's own copies between processes.
if [[ -n ${SLURM_GPUS_ON_NODE:-} ]]; then SRUN+=(--gpu-bind=none); fi

run_ranks() {
    "${SRUN[@]}" "$@"
}

# End the script with the code of the training, and have the job queued again where that is 75.
end_job() {
    if [[ $1 == 75 ]]; then
        # SLURM_JOB_ID of one task of an array stands for all of them.
        local job id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
        id=${id:-$SLURM_JOB_ID}
        job=$(scontrol --oneliner show job "$id" || true)
        if [[ $job =~ JobState=COMPL && ! $job =~ \ PreemptTime=[0-9] ]]; then
            # Whoever cancels a job wants it to end; one that was requeued needs no help.
            echo "stopped after a checkpoint; if the job was cancelled, sbatch with its --run-dir goes on"
        # Fails where Slurm has requeued the job already.
        elif scontrol requeue "$id"; then
            echo "preempted after a checkpoint: the job is queued again"
        fi
    fi
    exit "$1"
}

echo "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: $SLURM_NTASKS tasks on $SLURM_JOB_NODELIST"
