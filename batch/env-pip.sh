# Environment of a job: the virtual environment that batch/quickstart.sh or batch/test.sh has made,
# with an MPI from the package index. Good for a first trial; on fast interconnects take the cluster's
# own MPI (env-modules.sh).

PRUNEX_VENV=${PRUNEX_VENV:-$PRUNEX_HOME/.venv}
if [[ ! -x $PRUNEX_VENV/bin/python ]]; then
    echo "error: $PRUNEX_VENV holds no Python: make it with batch/quickstart.sh, or set PRUNEX_VENV" >&2
    exit 2
fi
export PATH=$PRUNEX_VENV/bin:$PATH

# What the MPI in it speaks to srun: `srun --mpi=list` must name it.
case $(mpirun --version 2>&1) in
    *"Open MPI"*) PRUNEX_SRUN_MPI=${PRUNEX_SRUN_MPI-pmix} ;;
    *) PRUNEX_SRUN_MPI=${PRUNEX_SRUN_MPI-pmi2} ;;
esac
