"""Two MPI ranks that share the GPU: staged, and by a GPU-aware MPI where the probe finds one."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_check.report import Report, Skip, Task

__all__ = ["as_rank", "check", "launcher", "mpi_library"]

#: Open MPI wants to be told: to run as root, and more ranks than cores. Other MPIs do not look.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
_START = 25.0  # seconds, at most, that MPI takes to say its version


def mpi_library() -> tuple[str, str]:
    """Return (the first line of the MPI library's version, "") or ("", why there is none)."""
    try:
        import mpi4py  # noqa: F401 - its import loads no MPI
    except ImportError:
        return "", "mpi4py is not installed"
    code = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0].strip())"
    environment = {"HOME": tempfile.gettempdir(), **os.environ, **OPEN_MPI}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=_START, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"mpi4py did not start MPI within {_START:.0f} s"
    if done.returncode:
        return "", "mpi4py does not load an MPI library: " + (done.stderr.strip().splitlines() or ["no message"])[-1]
    return " ".join(done.stdout.split()), ""


def launcher() -> list[str]:
    """Return the words that start ranks: $MPISHARD_LAUNCHER, or mpiexec beside this Python, or on the path."""
    if words := os.environ.get("MPISHARD_LAUNCHER"):
        return shlex.split(words)
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec") or shutil.which("mpirun")
    return [found] if found else []


def check(task: Task, report: Report) -> None:
    library, why = mpi_library()
    if why:
        raise Skip(why)
    words = launcher()
    if not words:
        raise Skip("no mpiexec is on the path; set MPISHARD_LAUNCHER to what starts ranks")
    report.notes.append(f"{library}, started by {' '.join(words)}")
    steps = task.size(10, 2)
    alone = _run(task, [], "local", steps)
    table = report.table(
        f"{steps} steps on two ranks that share the GPU",
        *("transport", "type", "last loss", "same bits as one rank", "what it says"),
    )
    for transport in ("staged", "mpi"):
        found = _run(task, [*words, "-n", "2"], transport, steps)
        if found["ranks"] != 2:
            raise Skip(f"{words[0]} does not belong to {library}: its ranks do not see each other")
        if found.get("unaware"):
            report.notes.append(f"Transport mpi was not run: {found['unaware']}.")
            continue
        for kind, (losses, _, checksum) in found["runs"].items():
            same = checksum == alone["runs"][kind][2] and losses == alone["runs"][kind][0]
            table.row(transport, kind, losses[-1], same, found["about"])
            report.require(same, f"two ranks, {transport}, {kind}: other bits than one rank")


def _run(task: Task, words: list[str], transport: str, steps: int) -> dict[str, Any]:
    """Run steps in processes of their own; return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        options = ["--rank", transport, "--steps", str(steps), "--device", str(task.device), "--out", str(out)]
        command = [*words, *task.python, *options, *["--small"] * task.small]
        environment = {"HOME": folder, **os.environ, **OPEN_MPI}
        with (Path(folder) / "log").open("w+") as log:
            # In the group of this process, which is ended as a whole where the part takes too long.
            code = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT).wait()
            log.seek(0)
            said = log.read().strip().splitlines()[-25:]
        if code or not out.exists():
            raise RuntimeError("\n".join([f"transport {transport} ended with exit code {code}", *said]))
        return dict(json.loads(out.read_text()))


def as_rank(transport: str, device: int, steps: int, small: bool, out: Path) -> None:
    """One rank's run; rank 0 writes what was found."""
    from gpu_check import tiny
    from mpishard.array.cupy_ops import CupyOps
    from mpishard.comm.local import LocalCommunicator

    if transport == "local":
        ops = CupyOps(device)
        alone = LocalCommunicator(ops)
        _write(out, alone, {kind: tiny.run(ops, alone, kind, steps, small) for kind in _KINDS})
        return
    from mpishard.comm.mpi_device import DeviceMpiCommunicator
    from mpishard.comm.probe import probe
    from mpishard.comm.staged import StagedCommunicator
    from mpishard.comm.starting import load_mpi

    def choose() -> None:
        from cupy.cuda import Device

        Device(device).use()

    MPI = load_mpi(choose)
    world = MPI.COMM_WORLD
    if world.Get_size() == 1:
        out.write_text(json.dumps({"ranks": 1}))
        return
    library = MPI.Get_library_version()
    aware, reason = probe(library, world.Get_info().get("mpi_memory_alloc_kinds"))
    if transport == "mpi" and not aware:
        if world.Get_rank() == 0:
            out.write_text(json.dumps({"ranks": 2, "unaware": " ".join(reason.split())}))
        return
    ops = CupyOps(device)
    ops.gpu.use()
    comm = (StagedCommunicator if transport == "staged" else DeviceMpiCommunicator)(world, ops)
    runs = {kind: tiny.run(ops, comm, kind, steps, small) for kind in _KINDS}
    if comm.rank == 0:
        _write(out, comm, runs)
    comm.close()


_KINDS = ("float32", "bfloat16", "float16")


def _write(out: Path, comm: Any, runs: dict[str, Any]) -> None:
    out.write_text(json.dumps({"ranks": comm.size, "about": comm.describe(), "runs": runs}))
