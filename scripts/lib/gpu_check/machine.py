"""What the figures were found on: the GPU, the driver, and the versions of what is installed."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gpu_check.nccl_check import load_nccl
from gpu_check.ranks import launcher, mpi_library
from gpu_check.report import Report, Task

__all__ = ["check"]


def check(task: Task, report: Report) -> None:
    facts = report.figures
    _gpu(task.device, facts)
    facts["host"] = f"{platform.system()} {platform.release()}, {platform.machine()}, {_cores()} cores"
    facts["Python"] = platform.python_version()
    for name in ("numpy", "ml_dtypes"):
        facts[name] = importlib.import_module(name).__version__
    facts["MPI"], absent = mpi_library()
    if absent:
        facts["MPI"] = f"absent: {absent}"
    facts["mpiexec"] = " ".join(launcher()) or "absent"
    facts["mpi4py"] = _version("mpi4py")
    facts["PyTorch"] = _version("torch")
    table = report.table("The machine", "what", "found")
    for name, value in facts.items():
        table.row(name, value)


def _gpu(device: int, facts: dict[str, Any]) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(device)
    name = properties["name"]
    free, total = cupy.cuda.Device(device).mem_info
    facts["GPU"] = name.decode() if isinstance(name, bytes) else name
    facts["GPUs"] = runtime.getDeviceCount()
    facts["compute capability"] = int(cupy.cuda.Device(device).compute_capability) / 10
    facts["multiprocessors"] = int(properties["multiProcessorCount"])
    facts["memory, GiB"] = round(total / 2**30, 1)
    facts["free, GiB"] = round(free / 2**30, 1)
    facts["driver, power, clock"] = _driver(str(cupy.cuda.Device(device).pci_bus_id))
    for label, number in (("driver's CUDA", runtime.driverGetVersion()), ("CUDA runtime", runtime.runtimeGetVersion())):
        facts[label] = f"{number // 1000}.{number % 1000 // 10}"
    facts["NVRTC"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    facts["CuPy"] = cupy.__version__
    facts["NCCL"] = load_nccl()[1] or "absent"


def _driver(place: str) -> str:
    """Return the driver's version, the power limit and the highest clock of the GPU at a place on the bus."""
    query = "--query-gpu=driver_version,power.limit,clocks.max.sm"
    command = ["nvidia-smi", "-i", place, query, "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi does not tell"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
