"""What an MPI says of GPU memory, and what follows from it."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from mpishard.comm import probe as module
from mpishard.comm.probe import judge, mapped_libraries, probe
from mpishard.errors import ConfigError

GTL = "/opt/cray/pe/lib64/libmpi_gtl_cuda.so.0"
CRAY = "MPICH 4.1, MPI VERSION    : CRAY MPICH version 8.1.30"


def answers(monkeypatch: pytest.MonkeyPatch, answer: int | None) -> list[str]:
    """Let every library that is asked give one answer, or know no such question; return those that were asked."""
    asked = []

    def load(path: str) -> object:
        asked.append(path)
        questions = {} if answer is None else {"MPIX_Query_cuda_support": lambda: answer}
        return types.SimpleNamespace(**questions)

    monkeypatch.setattr(module, "ctypes", types.SimpleNamespace(CDLL=load))
    return asked


@pytest.mark.parametrize(
    ("answer", "aware", "reason"),
    [
        (1, True, "Open MPI 5.0.11 says that it takes GPU memory"),
        (0, False, "Open MPI 5.0.11 says that it does not take GPU memory"),
        (None, False, "Open MPI 5.0.11 does not say whether it takes GPU memory"),
    ],
)
def test_a_library_is_asked(monkeypatch: pytest.MonkeyPatch, answer: int | None, aware: bool, reason: str) -> None:
    asked = answers(monkeypatch, answer)
    library = "Open MPI 5.0.11, Open MPI v5.0.11, package: Open MPI"
    assert judge(library, None, ["/usr/lib/libc.so.6", "/opt/libmpi.so.40"], {}) == (aware, reason)
    assert asked == ["/opt/libmpi.so.40"]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("libmpi.so.12", True),
        ("libmpi.so", True),
        ("libmpich.so.12.1.0", True),
        ("libmpi_gnu_123.so.12", True),
        ("libmpi_gtl_cuda.so.0", False),
        ("libmpi_mpifh.so.40", False),
        ("libmpi_usempif08.so.40", False),
        ("libmpicxx.so.12", False),
        ("MPI.mpich.cpython-311.so", False),
    ],
)
def test_the_library_proper_is_found(monkeypatch: pytest.MonkeyPatch, name: str, asked: bool) -> None:
    found = answers(monkeypatch, 1)
    judge("Some MPI 1.0", None, [f"/opt/{name}"], {})
    assert found == ([f"/opt/{name}"] if asked else [])


@pytest.mark.parametrize(
    ("library", "kinds", "libraries", "environment", "aware", "reason"),
    [
        ("Open MPI 6.0.0", "mpi,system,cuda:device", [], {}, True, "lists cuda in mpi_memory_alloc_kinds"),
        ("MPICH 5.0.2", "mpi,system", [], {}, False, "does not say"),
        ("MPICH 5.0.2", "cuda", [], {"MPIR_CVAR_ENABLE_GPU": "0"}, False, "MPIR_CVAR_ENABLE_GPU is 0"),
        (CRAY, None, [GTL], {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "libmpi_gtl_cuda"),
        (CRAY, None, [], {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False, "libmpi_gtl_cuda is not linked"),
        (CRAY, "cuda", [GTL], {}, False, "MPICH_GPU_SUPPORT_ENABLED is not 1"),
        ("MVAPICH2 2.3.7", None, [], {"MV2_USE_CUDA": "1"}, True, "MV2_USE_CUDA is 1"),
        ("MVAPICH2 2.3.7", None, [], {}, False, "MV2_USE_CUDA is not 1"),
        ("MPICH 3.4, ParaStation MPI 5.9", None, [], {"PSP_CUDA": "1"}, True, "PSP_CUDA is 1"),
    ],
)
def test_families(
    library: str, kinds: str | None, libraries: list[str], environment: dict[str, str], aware: bool, reason: str
) -> None:
    found = judge(library, kinds, libraries, environment)
    assert found.aware is aware and reason in found.reason


@pytest.mark.parametrize(("value", "aware"), [("1", True), ("0", False)])
def test_the_environment_has_the_last_word(value: str, aware: bool) -> None:
    found = probe("Open MPI 6.0.0", None if aware else "cuda", {"MPISHARD_GPU_AWARE": value})
    assert found == (aware, f"MPISHARD_GPU_AWARE is {value}")


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="MPISHARD_GPU_AWARE is 'yes'; set it to 1 or 0"):
        probe("Open MPI 6.0.0", None, {"MPISHARD_GPU_AWARE": "yes"})


def test_what_is_mapped(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12  /opt/my mpi/lib/libmpi.so.40\n"
        "7f01-7f02 r--p 00001000 08:01 12  /opt/my mpi/lib/libmpi.so.40\n"
        "7f02-7f03 rw-p 00000000 00:00 0 \n"
        "7ffd-7ffe rw-p 00000000 00:00 0  [stack]\n"
    )
    assert mapped_libraries(maps) == ["/opt/my mpi/lib/libmpi.so.40", "[stack]"]
    assert mapped_libraries(tmp_path / "none") == []
