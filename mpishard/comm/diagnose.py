"""What MPI, its launcher and the GPUs say of themselves, and how fast one rank reaches another: facts for the doctor.

Nothing here judges, and what is missing is told in words and not raised: a doctor that dies of the illness is no use.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpishard.array.device import cuda_problem
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.choice import connect
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.probe import mapped_libraries, probe
from mpishard.comm.starting import load_mpi, meeting
from mpishard.errors import ConfigError
from mpishard.launched import environment_local_rank, environment_rank, environment_size

__all__ = ["Meeting", "gpus", "library_path", "meet", "ping", "use"]

_LEVELS = ("single", "funneled", "serialized", "multiple")
_DRIVER = Path("/proc/driver/nvidia")


class Meeting(NamedTuple):
    """How the ranks met.

    ``comm`` carries records in host memory, whatever is found; ``facts`` is what MPI says of itself, empty where it
    cannot be loaded; ``problem`` is why this process stays alone, found and remedy in one line, and ``name`` a name of
    it for programs.
    """

    comm: Communicator
    facts: dict[str, Any]
    problem: str = ""
    name: str = ""


def meet(before: Callable[[], None] | None = None) -> Meeting:
    """Start MPI, where there is one, and meet the other ranks. Collective.

    Args:
        before: called when the library is loaded and MPI has not started, to choose a GPU.
    """
    size, rank = environment_size(), environment_rank()
    alone = LocalCommunicator(NumpyOps())
    with meeting((size or 1) > 1):
        try:
            MPI = load_mpi(before if environment_local_rank() is not None else None)
        except (ImportError, RuntimeError, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            remedy = "install one with: pip install mpich, or load the cluster's MPI module"
            return Meeting(alone, {}, f"MPI cannot be loaded ({reason}); {remedy}", "no-mpi")
        if not MPI.Is_initialized():
            raise ConfigError("mpi4py has not started MPI (MPI4PY_RC_INITIALIZE is off?); unset it")
        facts = _facts(MPI)
        found = MPI.COMM_WORLD.Get_size()
        if found > 1:
            return Meeting(connect(MPI.COMM_WORLD, NumpyOps(), "mpi"), facts)
        if (size or 1) > 1 or (rank or 0) > 0:
            library = MPI.get_vendor()[0]
            return Meeting(
                alone,
                facts,
                f"the launcher started {size or 'several'} processes and each is a world of 1 for {library}, so the "
                f"launcher is another MPI's; use the mpiexec of {library}, or srun --mpi=pmi2 for MPICH, --mpi=pmix "
                "for Open MPI",
                "launch",
            )
        return Meeting(alone, facts)


def use(make_ops: Callable[[int | None], Ops], transport: str) -> Communicator:
    """Return the communicator that a training of this job would use. Collective, after :func:`meet`.

    Raises:
        ConfigError: on all ranks; see :func:`mpishard.comm.choice.choose`.
    """
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and MPI.COMM_WORLD.Get_size() > 1:
            return connect(MPI.COMM_WORLD, make_ops, transport)
    return LocalCommunicator(make_ops(environment_local_rank()))


def _facts(MPI: Any) -> dict[str, Any]:
    import mpi4py

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds")
    info.Free()
    version = MPI.Get_library_version()
    vendor, numbers = MPI.get_vendor()
    aware = probe(f"{vendor} {'.'.join(map(str, numbers))}, {version}", kinds)
    levels = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in _LEVELS}
    off = str(mpi4py.rc.threads).lower() in ("0", "n", "no", "false", "off")
    return {
        "library": f"{vendor} {'.'.join(map(str, numbers))}",
        "version": " ".join(version.replace("\0", "").strip().partition("\n")[0].split()),
        "standard": ".".join(map(str, MPI.Get_version())),
        "path": library_path(mapped_libraries()),
        "thread_asked": "single" if off else str(mpi4py.rc.thread_level).lower(),
        "thread_provided": levels[MPI.Query_thread()],
        "gpu_aware": aware.aware,
        "gpu_aware_reason": aware.reason,
    }


def library_path(libraries: list[str]) -> str:
    """Return the path of the MPI library among those that a process has mapped; empty where none is one."""
    named = [path for path in libraries if Path(path).name.startswith(("libmpi.so", "libmpich.so", "libmpi_abi.so"))]
    named += [path for path in libraries if Path(path).name.startswith("libmpi") and ".so" in Path(path).name]
    return named[0] if named else ""


def gpus() -> dict[str, Any]:
    """Return the GPUs that this process sees, and those of the machine as far as the driver's files tell.

    ``problem`` says why none can be used; ``installed`` counts the machine's and ``openable`` those whose device file
    this process may open (None without an NVIDIA driver): a batch system's control groups close the others.
    """
    problem = cuda_problem()
    driver = _DRIVER.is_dir()
    files = [path for path in glob("/dev/nvidia[0-9]*") if path.removeprefix("/dev/nvidia").isdecimal()]
    return {
        "problem": problem,
        "installed": len(list(_DRIVER.glob("gpus/*"))) if driver else None,
        "openable": sum(map(_opens, files)) if driver else None,
        "mask": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "visible": [] if problem else _visible(),
    }


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def _visible() -> list[dict[str, Any]]:
    import cupy

    found = []
    for index in range(int(cupy.cuda.runtime.getDeviceCount())):
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        name, uuid = properties["name"], bytes(properties.get("uuid", b""))[:16].hex()
        parts = [uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]]
        found.append(
            {
                "index": index,
                "name": name.decode(errors="replace") if isinstance(name, bytes) else str(name),
                "place": str(cupy.cuda.Device(index).pci_bus_id),
                "uuid": f"GPU-{'-'.join(parts)}" if uuid else "",
                "memory": int(properties["totalGlobalMem"]),
            }
        )
    return found


def ping(comm: Communicator, one: int, other: int, nbytes: int, most: int = 200, seconds: float = 0.1) -> float:
    """Send a message from rank to rank and back; return half the median time of a round, in seconds. Collective.

    Messages are MPI's own, in host memory. Ranks that are neither of the two wait, and return 0, as ``other`` does.

    Args:
        most: rounds at most; fewer where they would take longer than ``seconds``. Two come before that do not count.
    """
    from mpishard.comm.mpi import MpiCommunicator

    assert isinstance(comm, MpiCommunicator)
    comm.meet("a measurement of two ranks")
    taken = 0.0
    if comm.rank in (one, other):
        taken = comm._pump.call(
            "a measurement of two ranks", lambda: _rounds(comm._mpi, one, other, nbytes, most, seconds)
        )
    comm.meet("a measurement of two ranks")
    return taken


def _rounds(comm: Any, one: int, other: int, nbytes: int, most: int, seconds: float) -> float:
    buffer, count = np.zeros(nbytes, np.uint8), np.ones(1, np.int64)
    first = comm.Get_rank() == one
    peer = other if first else one

    def once() -> float:
        begin = time.perf_counter()
        if first:
            comm.Send(buffer, peer)
        comm.Recv(buffer, peer)
        if not first:
            comm.Send(buffer, peer)
        return time.perf_counter() - begin

    once()
    warm = once()
    if first:
        count[0] = max(1, min(most, int(seconds / max(warm, 1e-9))))
        comm.Send(count, peer)
    else:
        comm.Recv(count, peer)
    times = [once() for _ in range(int(count[0]))]
    return statistics.median(times) / 2 if first else 0.0
