"""How each MPI starts ranks on several hosts: its launcher, the words it takes, the environment it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["KINDS", "Installed", "environment", "find", "kind_of", "words"]

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("mpich", "openmpi")
#: Set unless they are set already; scripts/lib/environment.sh says why.
_DEFAULTS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    # Over one connection, data of ranks that are not in step go one way at a time.
    "OMPI_MCA_btl_tcp_links": "2",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


class Installed(NamedTuple):
    """An MPI: its kind, its launcher, and the folder of programs beside which it lies; empty where it is the path's."""

    kind: str
    launcher: str
    folder: str = ""

    @property
    def python(self) -> str:
        """The interpreter that goes with it."""
        beside = Path(self.folder or "none") / "python"
        return str(beside) if beside.exists() else sys.executable


def kind_of(version: str) -> str:
    """Return the MPI that ``mpiexec --version`` tells of, or an empty text."""
    if "Open MPI" in version or "OpenRTE" in version or "PRTE" in version:
        return "openmpi"
    return "mpich" if "HYDRA" in version or "MPICH" in version else ""


def find(kind: str = "", folder: str = "") -> Installed:
    """Return the MPI to use: of ``folder``'s programs, or beside this Python, or of what scripts/test or scripts/demo
    has made, or on the path; of ``kind``, where one is named.

    Raises:
        ValueError: there is none.
    """
    made = [ROOT / f".venv-{name}" / "bin" for name in KINDS if kind in ("", name)] + [ROOT / ".venv" / "bin"]
    own = Path(sys.executable).parent
    places: Sequence[Path | None] = [Path(folder)] if folder else [own, *made, None]
    for place in places:
        launcher = shutil.which("mpiexec", path=None if place is None else str(place))
        if launcher and (found := kind_of(_version(launcher))) and kind in ("", found):
            return Installed(found, launcher, "" if place is None else str(place.absolute()))
    wanted = kind or "MPICH or Open MPI"
    where = f"in {folder}" if folder else f"in {own}, in {ROOT}/.venv-mpich, .venv-openmpi and .venv, or on PATH"
    raise ValueError(f"there is no mpiexec of {wanted} {where}; name the folder of its programs with --programs")


def _version(launcher: str) -> str:
    try:
        done = subprocess.run(
            [launcher, "--version"],
            env={**os.environ, **_DEFAULTS},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def words(found: Installed, hosts: Sequence[str], ranks_per_host: int, agent: str) -> list[str]:
    """Return the launcher's words, up to the command: ranks are numbered host by host.

    Args:
        agent: the program that takes ssh's place.
    """
    ranks = str(len(hosts) * ranks_per_host)
    if found.kind == "mpich":
        where = ["-hosts", ",".join(hosts), "-ppn", str(ranks_per_host)]
        return [found.launcher, "-launcher", "ssh", "-launcher-exec", agent, *where, "-n", ranks]
    slots = ",".join(f"{host}:{ranks_per_host}" for host in hosts)
    # The launcher binds a rank of each host to the first core, and there is but one first core here.
    ways = ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", agent, "--bind-to", "none"]
    return [found.launcher, *ways, "--host", slots, "-n", ranks]


def environment(found: Installed, variables: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return the environment of launcher and ranks.

    Where ranks outnumber cores, a waiting one must yield its core; Open MPI does so in every test for progress too.
    Elsewhere it must not: Linux takes the rest of its turn from a thread that yields, so a communication thread that
    tests beside a computation comes back milliseconds late, and half of what was hidden shows.
    """
    path = variables.get("PATH", os.defpath)
    own = {"PATH": os.pathsep.join(filter(None, [found.folder, path]))}
    yielding = str(int(ranks > (os.cpu_count() or 1)))
    # Each host has its own files there, which end with it. Open MPI names files by process numbers, and those of two
    # hosts are alike.
    return {**_DEFAULTS, "OMPI_MCA_mpi_yield_when_idle": yielding, **variables, **own, "TMPDIR": "/dev/shm"}
