"""Which operations a rank computes with, NumPy's or a GPU's, and what is missing where a GPU cannot be used."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.errors import ConfigError

__all__ = ["DEVICES", "Choice", "choose", "cuda_problem", "identity", "operations"]

DEVICES = ("auto", "cpu", "cuda")
_CUPY = 14  # the oldest major version of CuPy whose names and types are used
_NO_DEVICE = 100  # cudaErrorNoDevice
_INSTALL = "pip install 'cupy-cuda12x>=14' (cupy-cuda13x, if nvidia-smi names CUDA 13)"


class Choice(NamedTuple):
    """``kind`` is cpu or cuda; ``why`` is the reason in words, for the log."""

    kind: str
    why: str


def choose(kind: str) -> Choice:
    """Return what to compute with: ``auto`` takes a GPU where one can be used.

    Raises:
        ConfigError: no such kind, or ``cuda`` and no GPU can be used; the message says what is missing.
    """
    if kind not in DEVICES:
        raise ConfigError(f"device {kind!r} is not known; choose one of {', '.join(DEVICES)}")
    if kind == "cpu":
        return Choice("cpu", "the CPU was asked for")
    problem = cuda_problem()
    if not problem:
        return Choice("cuda", "a GPU was asked for" if kind == "cuda" else "a GPU is there")
    if kind == "cuda":
        raise ConfigError(f"device cuda cannot be used: {problem}; or compute on the CPU (device cpu)")
    return Choice("cpu", f"no GPU can be used: {problem.partition(';')[0]}")


def cuda_problem() -> str:
    """Say in one line why no GPU can be used, and how to mend it; empty where one can."""
    try:
        import cupy
    except ImportError as error:
        if error.name == "cupy":
            return f"the package CuPy is not installed; {_INSTALL}"
        return f"CuPy does not load ({_line(error)}); install it anew: {_INSTALL}"
    except OSError as error:  # it makes a folder for what it compiles
        return f"CuPy does not load ({_line(error)}); set CUPY_CACHE_DIR to a folder that can be written"
    version = str(cupy.__version__)
    if int(version.partition(".")[0]) < _CUPY:
        return f"CuPy {version} is installed and {_CUPY} or later is needed; {_INSTALL}"
    return _driver_problem(cupy) or _library_problem(cupy)


def _driver_problem(cupy: Any) -> str:
    runtime = cupy.cuda.runtime
    driver, built = int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
    if not driver:
        return "no NVIDIA driver is found (libcuda.so); start on a node that has a GPU, or have its driver installed"
    if driver // 1000 < built // 1000:
        return (
            f"the NVIDIA driver knows CUDA {_numbers(driver)} and CuPy is built for CUDA {_numbers(built)}; install "
            f"a newer driver, or CuPy for the older one: pip install 'cupy-cuda{driver // 1000}x>=14'"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    none = (
        f"no GPU is visible (CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}); check it, "
        "and ask the batch system for GPUs (Slurm: --gres=gpu:N)"
    )
    try:
        return "" if runtime.getDeviceCount() else none
    except runtime.CUDARuntimeError as error:
        if error.status == _NO_DEVICE:
            return none
        return f"the NVIDIA driver fails ({_line(error)}); nvidia-smi should show what is wrong with it"


def _library_problem(cupy: Any) -> str:
    version = int(cupy.cuda.runtime.runtimeGetVersion()) // 1000
    suffix = f"-cu{version}" if version < 13 else ""  # from 13 on the packages carry the version as theirs
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # CuPy's loader has errors of its own
        return (
            f"NVRTC, which compiles the kernels, does not load ({_line(error)}); "
            f"pip install 'nvidia-cuda-nvrtc{suffix}=={version}.*'"
        )
    try:
        from cupy.cuda import cublas  # noqa: F401 - the import loads the library
    except ImportError as error:
        return (
            f"cuBLAS, which multiplies matrices, does not load ({_line(error)}); "
            f"pip install 'nvidia-cublas{suffix}=={version}.*'"
        )
    return ""


def _numbers(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def operations(kind: str, local_rank: int | None, *, tf32: bool = False) -> Ops:
    """Return the operations that a rank computes with.

    Args:
        kind: one of DEVICES.
        local_rank: this rank among those of its machine. It decides which of several visible GPUs is taken; where
            the launcher shows each rank one GPU, that one is.
        tf32: let matrix products of fp32 on a GPU round their factors to TF32.

    Raises:
        ConfigError: no such kind, or a GPU that was asked for cannot be used or is full.
    """
    if choose(kind).kind == "cpu":
        return NumpyOps()
    from cupy.cuda import runtime

    from mpishard.array.cupy_ops import CupyOps

    count = int(runtime.getDeviceCount())
    index = (local_rank or 0) % count
    try:
        return CupyOps(index, tf32=tf32)
    except MemoryError as error:
        raise ConfigError(f"GPU {index} of {count} cannot be used: {_line(error)}") from None
    except runtime.CUDARuntimeError as error:
        raise ConfigError(
            f"GPU {index} of {count} cannot be used ({_line(error)}); see with nvidia-smi whether another program "
            "holds it or it needs a reset, or leave it out with CUDA_VISIBLE_DEVICES"
        ) from None


def identity(ops: Ops) -> str:
    """Return a name of the GPU that is its own on this machine, whatever index a rank sees it under; "" on a CPU.

    Two ranks with one name share a GPU.
    """
    from mpishard.array.cupy_ops import CupyOps

    if not isinstance(ops, CupyOps):
        return ""
    gpu = ops.gpu
    place = str(gpu.cupy.cuda.Device(gpu.index).pci_bus_id)
    # Parts of one GPU (MIG) share the place on the bus; their uuids differ.
    uuid = gpu.runtime.getDeviceProperties(gpu.index).get("uuid", b"")
    return f"{place} {uuid[:16].hex()}".strip()
