#!/usr/bin/env bash
# Install with the test extra, then run linter, formatter and the whole suite at 2 and 4 ranks.
#   bash batch/test.sh [arguments of pytest]
# PYTHON and PRUNEX_MPI choose Python and MPI, see _install.sh; PRUNEX_MPI=both, the default when
# CI=true, runs everything under Open MPI, and then again under MPICH what depends on the MPI: the
# tests on several ranks and those that start jobs.
# Tests marked `long`, which take long and guard what rarely breaks, run with PRUNEX_LONG=1 and
# whenever arguments are given: who names tests gets all of them, on two ranks and on four. Else two
# ranks run the tests marked `two_ranks`, and four the others. Without long tests processes load
# torch.compile's modules late, see tests/harness/late_compiler.
# RUN_TIMEOUT_S (2400) is the limit of each run of pytest.

source "$(dirname "${BASH_SOURCE[0]}")/_install.sh"
cd "$ROOT"

if [[ -z ${PRUNEX_MPI:-} && ${CI:-} == true ]]; then PRUNEX_MPI=both; fi
if [[ ${PRUNEX_MPI:-} == both ]]; then
    PRUNEX_MPI=openmpi PRUNEX_TURN=first bash batch/test.sh "$@"
    PRUNEX_MPI=mpich PRUNEX_TURN=second bash batch/test.sh "$@"
    echo "both MPIs passed after $SECONDS s"
    exit 0
fi

# What one rank of the parallel runs does: rank 0 is shown, the others write to a file. The status
# stays in a file, since a launcher reports only one for all.
RANK_SCRIPT='
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:-0}}}
log=$PRUNEX_TEST_LOGS/rank-$rank
mkdir "$log.tmp"
export PYTEST_DEBUG_TEMPROOT=$log.tmp
if [[ $rank == 0 ]]; then
    "$@" &
else
    "$@" >"$log" 2>&1 &
fi
trap "kill -TERM $!" TERM INT
status=0
wait $! || status=$?
echo "$status" >"$log.status"
exit "$status"
'

# Print what rank 0's output does not show: the end of each rank that did not end well.
show_failed_ranks() {
    local ranks=$1 rank log status
    for ((rank = 0; rank < ranks; rank++)); do
        log=$PRUNEX_TEST_LOGS/rank-$rank
        status=killed
        if [[ -f $log.status ]]; then status="status $(<"$log.status")"; fi
        if [[ $status == "status 0" ]]; then continue; fi
        echo "---- rank $rank of $ranks: $status"
        if [[ -f $log ]]; then tail -n 150 "$log"; fi
    done
}

# Print the files that have tests with a mark, without those whose tests all have a second one: all
# ranks would read the others for nothing.
files_of() {
    grep -rlE "mark\.$1\b" "$ROOT/tests" --include='test_*.py' \
        | xargs grep -LE "^pytestmark = .*\b${2:-nothing}\b" | sort
}

# Print how many threads each of so many processes may have: in all no more than there are cores.
threads_of() {
    local cores
    cores=$(nproc)
    echo $((cores > $1 ? cores / $1 : 1))
}

# The first failure of a rank ends the job with its message in that rank's log: -x makes pytest exit
# and mpi4py turns the exit into an abort, where the other ranks would wait in a collective for ever.
test_in_parallel() {
    local ranks=$1 which= not= marked=mpi
    shift
    if [[ $TURN == second ]]; then
        not=any_mpi
    elif [[ -n $NOT_LONG && $ranks == 2 ]]; then
        which=" and two_ranks" marked=two_ranks
    elif [[ -n $NOT_LONG ]]; then
        not=two_ranks
    fi
    if [[ -n $not ]]; then which=" and not $not"; fi
    if [[ $narrowed == no ]]; then set -- $(files_of "$marked" "$not"); fi
    export PRUNEX_TEST_LOGS=$SCRATCH/$ranks
    mkdir "$PRUNEX_TEST_LOGS"
    echo "==== ranks: $ranks, $PRUNEX_MPI"
    if ! OMP_NUM_THREADS=$(threads_of "$ranks") \
        run_mpi "$ranks" bash -c "$RANK_SCRIPT" rank "$VENV_PYTHON" -m mpi4py "${PYTEST[@]}" \
        --with-mpi -m "mpi$which$NOT_LONG" -x -p no:cacheprovider --color=no "$@"; then
        show_failed_ranks "$ranks"
        echo "error: the tests failed on $ranks ranks under $PRUNEX_MPI" >&2
        exit 1
    fi
}

# Without a launcher, on two processes: those marked so. Starting jobs leaves cores idle. Files keep
# the order that tests/conftest.py gives them: xdist would have those of few tests last.
test_serially() {
    local status=0 marks=$1$NOT_LONG
    shift
    if [[ $narrowed == no && $marks == jobs* ]]; then set -- $(files_of jobs); fi
    echo "==== without a launcher, $PRUNEX_MPI: $marks"
    OMP_NUM_THREADS=$(threads_of 2) timeout --foreground -k 15 "$RUN_TIMEOUT_S" \
        "$VENV_PYTHON" "${PYTEST[@]}" -n 2 --dist loadfile --no-loadscope-reorder \
        -m "$marks" "$@" || status=$?
    # 5: whoever asked for some tests may have asked for none of these.
    if [[ $status != 0 && ($status != 5 || $narrowed == no) ]]; then
        echo "error: the tests failed without a launcher (status $status)" >&2
        exit 1
    fi
}

# Whoever asks for some tests may ask for none of the parallel ones; the whole suite must have them.
any_parallel_test() {
    local status=0
    "$VENV_PYTHON" "${PYTEST[@]}" --collect-only --with-mpi -m mpi "$@" >/dev/null || status=$?
    [[ $status != 5 ]] # pytest found no test
}

# Of both MPIs the first or the second; empty: there is one alone.
TURN=${PRUNEX_TURN:-}
export RUN_TIMEOUT_S=${RUN_TIMEOUT_S:-2400}
narrowed=yes
if [[ $# == 0 ]]; then
    narrowed=no
    set -- tests
fi
NOT_LONG=
if [[ $narrowed == no && ${PRUNEX_LONG:-} != 1 ]]; then NOT_LONG=" and not long"; fi

prunex_install test
install_s=$SECONDS
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
# Else each process would compile the package, and rewrite the assertions of all tests, anew.
unset PYTHONDONTWRITEBYTECODE
# Waiting ranks of one job let those of another go on.
export OMPI_MCA_mpi_yield_when_idle=1 MPIR_CVAR_POLLS_BEFORE_YIELD=1
if [[ -n $NOT_LONG ]]; then
    export PYTHONPATH=$ROOT/tests/harness/late_compiler${PYTHONPATH:+:$PYTHONPATH}
fi
# A test that hangs shows where before the limit ends it.
PYTEST=(-m pytest -q -o "faulthandler_timeout=$((RUN_TIMEOUT_S / 2))")

if [[ $TURN != second ]]; then
    "$VENV_PYTHON" -m ruff check prunex_mpi tests
    "$VENV_PYTHON" -m ruff format --check prunex_mpi tests
fi
if [[ $TURN == second ]]; then
    test_serially "jobs and not any_mpi" "$@"
else
    test_serially "not mpi" "$@"
fi
if [[ $narrowed == no ]] || any_parallel_test "$@"; then
    counts=(2 4)
    # Four ranks are two nodes of two as well as four of one: enough for a second MPI.
    if [[ $TURN == second ]]; then counts=(4); fi
    for ranks in "${counts[@]}"; do
        test_in_parallel "$ranks" "$@"
    done
fi
echo "passed under $PRUNEX_MPI: $install_s s for the installation, $((SECONDS - install_s)) s for the tests"
