"""Can this MPI read and write a GPU's memory? What it says of itself, and what it was told.

A wrong yes is a segmentation fault in the first step, so everything but a plain yes is a no. Its opposite, a no of an
MPI that can (Open MPI answers 0 where its accelerator component was not selected), costs speed and is mended by
``MPISHARD_GPU_AWARE=1``. What an MPI was *built* with is not asked: ``ompi_info`` lists the extension ``cuda`` whether
or not there is CUDA in it.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpishard.errors import ConfigError

__all__ = ["OVERRIDE", "Awareness", "judge", "mapped_libraries", "probe"]

#: 1 or 0: what to believe instead of asking.
OVERRIDE = "MPISHARD_GPU_AWARE"

_MAPS = Path("/proc/self/maps")
#: The library proper: not its Fortran and C++ interfaces, nor Cray's transport layer.
_LIBRARY = re.compile(r"libmpi(ch)?(_(?!gtl|mpifh|usempi|cxx)\w+)?\.so[.\d]*")
_GTL = re.compile(r"libmpi_gtl_cuda\.so[.\d]*")


class Awareness(NamedTuple):
    """Whether MPI takes GPU memory, and how that is known; ``reason`` is half a sentence."""

    aware: bool
    reason: str


def probe(library: str, kinds: str | None, environment: Mapping[str, str] = os.environ) -> Awareness:
    """Ask the MPI library that this process has loaded. No message is sent.

    Args:
        library: the first line of MPI_Get_library_version, or name and version.
        kinds: the info ``mpi_memory_alloc_kinds`` of a communicator (MPI 4.1, section 12.4.3); None without it.
        environment: variables by name.

    Raises:
        ConfigError: ``MPISHARD_GPU_AWARE`` is neither 0 nor 1.
    """
    told = environment.get(OVERRIDE, "")
    if told not in ("", "0", "1"):
        raise ConfigError(f"{OVERRIDE} is {told!r}; set it to 1 or 0, or unset it to have MPI asked")
    if told:
        return Awareness(told == "1", f"{OVERRIDE} is {told}")
    return judge(library, kinds, mapped_libraries(), environment)


def judge(library: str, kinds: str | None, libraries: Sequence[str], environment: Mapping[str, str]) -> Awareness:
    """Say what follows from a library's name, its info, the libraries loaded and the environment.

    Cray MPICH needs its transport layer and a variable, as HPE's and the centres' documentation say; MVAPICH2 and
    ParaStation a variable. Others are asked: by the info, then by MPIX_Query_cuda_support.
    """
    name = library.partition("\n")[0].partition(",")[0].strip()[:60]
    upper = library.upper()
    if "CRAY MPICH" in upper:
        enabled = environment.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
        linked = any(_GTL.fullmatch(Path(path).name) for path in libraries)
        if enabled and linked:
            return Awareness(True, "Cray MPICH has MPICH_GPU_SUPPORT_ENABLED=1 and libmpi_gtl_cuda")
        missing = "libmpi_gtl_cuda is not linked" if enabled else "MPICH_GPU_SUPPORT_ENABLED is not 1"
        return Awareness(False, f"for Cray MPICH {missing}")
    for family, variable in (("MVAPICH2", "MV2_USE_CUDA"), ("PARASTATION", "PSP_CUDA")):
        if family in upper:
            on = environment.get(variable) == "1"
            return Awareness(on, f"for {name} {variable} is {'1' if on else 'not 1'}")
    if environment.get("MPIR_CVAR_ENABLE_GPU") == "0" and "MPICH" in upper:
        return Awareness(False, "MPIR_CVAR_ENABLE_GPU is 0")
    if kinds and any(kind.strip().partition(":")[0] == "cuda" for kind in kinds.split(",")):
        return Awareness(True, f"{name} lists cuda in mpi_memory_alloc_kinds")
    answer = _query(libraries)
    if answer is None:
        return Awareness(False, f"{name} does not say whether it takes GPU memory")
    return Awareness(answer, f"{name} says that it {'takes' if answer else 'does not take'} GPU memory")


def mapped_libraries(maps: Path = _MAPS) -> list[str]:
    """Return the paths of the files that this process has mapped; empty where the kernel does not tell."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6))


def _query(libraries: Sequence[str]) -> bool | None:
    """Call MPIX_Query_cuda_support of the library itself: mpi4py's wheels load it where no name leads to it."""
    for path in libraries:
        if _LIBRARY.fullmatch(Path(path).name):
            try:
                ask = ctypes.CDLL(path).MPIX_Query_cuda_support
            except (OSError, AttributeError):
                continue
            return bool(ask())
    return None
