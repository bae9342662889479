"""What becomes of the kernels' text: the code that NVRTC makes by way of CuPy, and the files it is kept in."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mpishard.array import kernels
from mpishard.array.cupy_compile import machine_code
from mpishard.array.cupy_ops import CupyOps
from tests.standin import installed

F32 = np.dtype(np.float32)
WANTED = kernels.options("float32", "float32")
TEXT = kernels.source("shards.cu")


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Calls of the compiler, and a folder for its code, on a machine that does not forbid files."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept" / "here"))
    with installed():
        import cupy

        monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
        calls, plain = [], cupy.cuda.compiler.compile_using_nvrtc

        def compile_using_nvrtc(*given, **more):
            calls.append(given)
            return plain(*given, **more)

        monkeypatch.setattr(cupy.cuda.compiler, "compile_using_nvrtc", compile_using_nvrtc)
        yield cupy, calls, tmp_path / "kept" / "here"
        monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")


def test_code_is_kept_on_disk(made):
    cupy, calls, folder = made
    first = machine_code(cupy, TEXT, WANTED)
    assert machine_code(cupy, TEXT, WANTED) == first
    assert len(calls) == 1
    [path] = folder.iterdir()
    assert re.fullmatch(r"mpishard-[0-9a-f]{40}\.cubin", path.name)


def test_other_text_options_and_compilers_make_other_code(made, monkeypatch):
    cupy, calls, folder = made
    machine_code(cupy, TEXT, WANTED)
    machine_code(cupy, TEXT + "\n", WANTED)
    machine_code(cupy, TEXT, kernels.options("float64", "float64"))
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (12, 8))
    machine_code(cupy, TEXT, WANTED)
    monkeypatch.setattr(cupy.cuda.Device, "compute_capability", property(lambda self: "80"))
    machine_code(cupy, TEXT, WANTED)
    assert len(calls) == len(list(folder.iterdir())) == 5


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"x" + data[1:]])
def test_a_damaged_file_is_made_anew(made, damage):
    cupy, calls, folder = made
    code = machine_code(cupy, TEXT, WANTED)
    [path] = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert machine_code(cupy, TEXT, WANTED) == machine_code(cupy, TEXT, WANTED) == code
    assert len(calls) == 2


def test_a_folder_that_cannot_be_written(made):
    cupy, calls, folder = made
    folder.parent.mkdir()
    folder.write_text("a file is in its place")
    assert machine_code(cupy, TEXT, WANTED) == machine_code(cupy, TEXT, WANTED)
    assert len(calls) == 2


def test_operations_of_one_device_share_modules(made):
    _, calls, _ = made
    for ops in (CupyOps(), CupyOps()):
        x = ops.empty(4, F32)
        ops.fill(x, 1.0)
        ops.add(x, x, x)
        assert (ops.fetch(x) == 2).all()
    assert len(calls) == 2  # copies.cu and elementwise.cu


def test_small_numbers_are_kept(monkeypatch):
    """CuPy's way from text to code flushes nothing to zero: no plain instruction of fp32 is an .ftz one."""
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    compiler = cupy.cuda.compiler
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: ("-arch=compute_90", "ptx"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    flushing = re.compile(rb"\b(add|sub|mul|fma|div|sqrt|cvt)\.(rn\.)?ftz\.")
    for file in kernels.FILES:
        text = kernels.source(file)
        assert not flushing.search(machine_code(cupy, text, kernels.options("float32", "float32")))
    assert flushing.search(machine_code(cupy, text, (*WANTED, "-ftz=true")))
