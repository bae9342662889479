"""Compile the text of CUDA kernels for the CPU and run it (emulation.h says how).

What runs is what a GPU would run: the same text, in blocks and threads, with barriers and shuffles. Barriers and
shuffles that not all threads reach are errors. ``CXX`` chooses the compiler; else g++, clang++ or the package ziglang.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.array import kernels

HEADER = Path(__file__).with_name("emulation.h")
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "emulation"
#: Results must be those of --fmad=false: no contraction, and nothing that fast arithmetic allows.
FLAGS = (
    *("-std=c++17", "-O2", "-ffp-contract=off", "-fno-fast-math", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-U_FORTIFY_SOURCE", "-Wall", "-Wextra", "-Werror"),  # longjmp to another stack is what fibers do
)
WIDEST_GRID, WIDEST_BLOCK = 2**31 - 1, 1024
_ELEMENTS = {"float": np.float32, "double": np.float64}
_SCALARS: dict[str, tuple[type[np.generic], Any]] = {
    "i64": (np.int64, ctypes.c_longlong),
    "u64": (np.uint64, ctypes.c_ulonglong),
    "int": (np.int32, ctypes.c_int),
    "float": (np.float32, ctypes.c_float),
    "double": (np.float64, ctypes.c_double),
}


class EmulationError(RuntimeError):
    """A kernel did what a GPU would not allow, or does not compile."""


class Library:
    """Compiled kernels: ``kernels`` by name, and :meth:`launch`."""

    def __init__(self, code: str, found: Sequence[kernels.Kernel], path: Path, accumulator: str) -> None:
        self.kernels = {kernel.name: kernel for kernel in found}
        self._lines = code.splitlines()
        self._library = ctypes.CDLL(str(path))
        self._calls: dict[str, tuple[Any, list[tuple[str, type[np.generic] | None]]]] = {}
        for kernel in found:
            entry = getattr(self._library, f"emulate_{kernel.name}")
            entry.restype = ctypes.c_char_p
            types: list[Any] = [ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
            expected: list[tuple[str, type[np.generic] | None]] = []
            for parameter in kernel.parameters:
                kind = accumulator if parameter.type == "A" else parameter.type
                scalar, passed = (None, ctypes.c_void_p) if parameter.pointer else _SCALARS[kind]
                types.append(passed)
                expected.append((parameter.name, scalar))
            entry.argtypes = types
            self._calls[kernel.name] = entry, expected

    def launch(
        self, name: str, grid: int, block: int, args: Sequence[Any], backwards: bool = False, first: int = 0
    ) -> None:
        """Run a kernel. Pointers are integers; every other argument is a NumPy scalar of exactly the parameter's type.

        Args:
            name: the kernel.
            grid: number of blocks.
            block: threads of each, whole warps.
            args: one for each parameter.
            backwards: take blocks and threads in the reverse order; no result depends on it.
            first: leave out the blocks before this one, to see what the last ones of a large grid do.

        Raises:
            EmulationError: a launch that CUDA refuses, or a barrier or shuffle that not all threads reached.
        """
        entry, expected = self._calls[name]
        if not 0 < grid <= WIDEST_GRID or not 0 < block <= WIDEST_BLOCK or block % 32:
            raise EmulationError(f"kernel {name}: {grid} blocks of {block} threads cannot be launched")
        if len(args) != len(expected):
            raise EmulationError(f"kernel {name} has {len(expected)} parameters and was given {len(args)}")
        values = []
        for value, (label, kind) in zip(args, expected, strict=True):
            if kind is None:
                values.append(int(value))
            elif type(value) is kind:
                values.append(value.item())
            else:
                found = type(value).__name__
                raise EmulationError(f"kernel {name}: {label} was given as {found}; it is {kind.__name__}")
        error = entry(first, grid, block, backwards, *values)
        if error is not None:
            text = re.sub(r"line (\d+)", self._quote, error.decode())
            raise EmulationError(f"kernel {name}: {text}")

    def _quote(self, found: re.Match[str]) -> str:
        return f"line {found[1]} ({self._lines[int(found[1]) - 1].strip()})"


def library(file: str, T: str, G: str) -> Library:
    """Return the kernels of a file of mpishard/array/kernels for the element types T and G, by name."""
    return compiled(kernels.source(file), kernels.options(T, G))


_building = threading.Lock()


def compiled(code: str, options: tuple[str, ...]) -> Library:
    """Return the kernels of a text, compiled under the options that NVRTC would get. Equal calls share one object.

    Raises:
        EmulationError: the text does not compile, or the options are not those of mpishard.array.kernels.
    """
    with _building:  # threads that ask for one library wait for one build
        return _compiled(code, options)


@cache
def _compiled(code: str, options: tuple[str, ...]) -> Library:
    macros = dict(option[2:].split("=") for option in options if option.startswith("-D"))
    others = [option for option in options if not option.startswith("-D")]
    if others != ["-std=c++17", "--fmad=false"]:
        raise EmulationError(f"kernels are compiled with {' '.join(others)}; results are those of --fmad=false alone")
    found = kernels.parse(code)
    text = translated(code, macros, found)
    accumulator = "double" if macros.get("ELEMENT") == "double" else "float"
    return Library(code, found, build(text, compiler()), accumulator)


def translated(code: str, macros: dict[str, str], found: Sequence[kernels.Kernel]) -> str:
    """Return C++ that holds the text as it stands, and for each kernel NAME a function emulate_NAME to launch it."""
    # The header stands in the text, so that a build depends on nothing but its text.
    defined = [f"#define {name} {value}" for name, value in macros.items()]
    parts = [HEADER.read_text(), *defined, '#line 1 "kernels.cu"', code]
    for kernel in found:
        parameters = ", ".join(
            f"{'const ' * p.const}{p.type}{'*' * p.pointer} {p.name}_" for p in kernel.parameters
        )
        names = ", ".join(f"{p.name}_" for p in kernel.parameters)
        parts.append(
            f'extern "C" __attribute__((visibility("default"))) const char* emulate_{kernel.name}('
            f"unsigned first__, unsigned grid__, unsigned block__, int backwards__, {parameters}) {{\n"
            f"    auto body__ = [&] {{ {kernel.name}({names}); }};\n"
            f"    return emulation::launch(first__, grid__, block__, backwards__, body__);\n}}"
        )
    return "\n".join(parts) + "\n"


def compilers() -> list[list[str]]:
    """Return the commands of the C++ compilers that are here, the preferred one first."""
    if chosen := os.environ.get("CXX"):
        return [shlex.split(chosen)]
    found = [[path] for name in ("g++", "clang++") if (path := shutil.which(name))]
    try:
        import ziglang  # noqa: F401 - a compiler in a package, for machines that have none
    except ImportError:
        return found
    return [*found, [sys.executable, "-m", "ziglang", "c++"]]


def compiler() -> list[str]:
    """Return the command of a C++ compiler."""
    found = compilers()
    if not found:
        raise EmulationError("no C++ compiler is here; install g++ or clang++, or `pip install ziglang`")
    return found[0]


def build(text: str, command: Sequence[str]) -> Path:
    """Return the shared library of a text: from the cache, or built into it. Several processes may do so at once."""
    key = hashlib.sha256("\0".join([text, *command, *FLAGS]).encode()).hexdigest()[:32]
    path = CACHE / f"{key}.so"
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        source, result = Path(scratch, "kernels.cpp"), Path(scratch, "kernels.so")
        source.write_text(text)
        environment = {**os.environ, "LC_ALL": "C", "ZIG_GLOBAL_CACHE_DIR": str(CACHE / "zig")}
        environment["ZIG_LOCAL_CACHE_DIR"] = scratch
        line = [*command, *FLAGS, "-o", str(result), str(source)]
        done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise EmulationError(f"{shlex.join(line)} failed:\n{done.stdout}")
        result.replace(path)  # all or nothing: another process never sees half a file
    return path
