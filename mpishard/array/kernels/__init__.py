"""The CUDA kernels of the GPU backend: their text, their signatures, and the types they are built for.

[Note: one module per file and types]
A kernel file is compiled once for each pair (T, G) in use: T is the element type of activations, G that of a gradient
or a sum; A, the accumulator, follows from T. The types are macros of the compiler. The text needs no header, for
machines may have none, and this module needs no CUDA: signatures are read from the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from mpishard.array.dtypes import DType
from mpishard.errors import ConfigError

__all__ = ["BLOCK", "FILES", "KERNELS", "Kernel", "Parameter", "options", "parse", "source", "type_pairs"]

#: Threads of a block, for every kernel; common.cuh has the same number.
BLOCK = 256
FILES = ("copies.cu", "elementwise.cu", "rows.cu", "embedding.cu", "shards.cu")

_MACROS = {"float32": "float", "float64": "double", "bfloat16": "bf16", "float16": "fp16"}
_GRADIENTS = tuple((name, name) for name in _MACROS) + (("bfloat16", "float32"), ("float16", "float32"))
_PAIRS = {
    "copies.cu": tuple((x, out) for x in _MACROS for out in _MACROS),
    "elementwise.cu": _GRADIENTS,
    "rows.cu": _GRADIENTS,
    "embedding.cu": _GRADIENTS,
    "shards.cu": tuple((name, name) for name in _MACROS),  # no kernel of it has a G
}
_SIGNATURE = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)')
_PARAMETER = re.compile(r"(const )?(\w+)(\*?) (\w+)")


class Parameter(NamedTuple):
    """One parameter: ``type`` is T, G, A, i64, u64, int or double, of the elements where it is a pointer."""

    name: str
    type: str
    pointer: bool
    const: bool

    @property
    def written(self) -> bool:
        """Whether the kernel writes through it."""
        return self.pointer and not self.const


class Kernel(NamedTuple):
    """A kernel's file, name and parameters."""

    file: str
    name: str
    parameters: tuple[Parameter, ...]


def parse(code: str, file: str = "") -> tuple[Kernel, ...]:
    """Return the kernels that a text defines, in its order.

    Raises:
        ConfigError: a parameter is not written as ``[const ]TYPE[*] NAME``.
    """
    kernels = []
    for name, inside in _SIGNATURE.findall(code):
        parameters = []
        for text in " ".join(inside.split()).split(", "):
            found = _PARAMETER.fullmatch(text)
            if found is None:
                raise ConfigError(f"kernel {name} has the parameter {text!r}; write it as [const ]TYPE[*] NAME")
            const, kind, star, label = found.groups()
            parameters.append(Parameter(label, kind, bool(star), bool(const)))
        kernels.append(Kernel(file, name, tuple(parameters)))
    return tuple(kernels)


@cache
def source(file: str) -> str:
    """Return the text to compile for a kernel file of :data:`FILES`: common.cuh and the file."""
    here = Path(__file__).parent
    return (here / "common.cuh").read_text() + (here / file).read_text()


def type_pairs(file: str) -> tuple[tuple[str, str], ...]:
    """Return the names of the types (T, G) that a kernel file is built for."""
    return _PAIRS[file]


def options(T: DType | str, G: DType | str) -> tuple[str, ...]:
    """Return the compiler's options for the element types T and G, given as dtypes or by name.

    Without contraction of a multiplication and an addition, elementwise results are NumPy's.

    Raises:
        ConfigError: there are no kernels for a type.
    """
    names = [kind if isinstance(kind, str) else np.dtype(kind).name for kind in (T, G)]
    for name in names:
        if name not in _MACROS:
            raise ConfigError(f"there are no kernels for the element type {name}; use one of {', '.join(_MACROS)}")
    t, g = (_MACROS[name] for name in names)
    return "-std=c++17", "--fmad=false", f"-DELEMENT={t}", f"-DGRADIENT={g}"


#: name -> kernel, for every kernel of every file
KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {kernel.name: kernel for file in FILES for kernel in parse(source(file), file)}
)
