# Environment of a job: MPI and Python from the cluster's modules. Copy it, put in your cluster's
# names, and give it to sbatch: `sbatch --export=ALL,PRUNEX_ENV=$PWD/my-env.sh batch/train.sbatch ...`.
#
# The virtual environment was made once, on the cluster, with the same modules:
#   module load openmpi && python -m venv .venv && .venv/bin/pip install -e ".[digits]"
# mpi4py's wheel finds the libmpi that the module puts on the library path.

module purge
module load openmpi

export PATH=${PRUNEX_VENV:-$PRUNEX_HOME/.venv}/bin:$PATH

# pmix for Open MPI, pmi2 for MPICH and Intel MPI, cray_shasta for Cray MPICH; empty: the cluster's
# own default. `srun --mpi=list` says what there is.
PRUNEX_SRUN_MPI=${PRUNEX_SRUN_MPI-pmix}

# The interconnect, where the default of the MPI is not it. Nothing of this concerns the program.
# export OMPI_MCA_pml=ucx
# export UCX_NET_DEVICES=mlx5_0:1
# Open MPI over TCP has one connection for each pair of ranks: messages in both directions take up
# to 1.75 times as long as with two.
# export OMPI_MCA_btl_tcp_links=2
# Open MPI 5 sums by a binomial tree what GPUs exchange through host memory, and the gradients of
# 2 or 3 ranks: twice the time of a ring, or more.
# export OMPI_MCA_coll_libnbc_iallreduce_algorithm=1
# Open MPI 5.0 sums in segments of 64 KiB where machines have several ranks: at 1 Gbit/s 2.5 times
# as long as in 512 KiB.
# export OMPI_MCA_coll_han_allreduce_segsize=524288
