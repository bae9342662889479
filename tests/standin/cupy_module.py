"""The module ``cupy`` made of the stand-in's parts, put into ``sys.modules`` and taken out again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tests.standin import arrays, cublas, function, nccl, runtime, streams
from tests.standin.machine import Machine, switched_on

__all__ = ["installed", "modules"]

#: The version of CuPy whose names, signatures and constants these are.
VERSION = "14.2.0"


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} (the stand-in offers a part of CuPy)")


def _module(name: str, members: dict[str, Any]) -> ModuleType:
    module = _Module(name)
    module.__dict__.update(members)
    return module


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def modules() -> dict[str, ModuleType]:
    """Return what ``sys.modules`` gets, by name."""
    parts = {
        "runtime": _module("cupy.cuda.runtime", _public(runtime)),
        "nccl": _module("cupy.cuda.nccl", _public(nccl)),
    }
    cuda = _module(
        "cupy.cuda",
        {
            **parts,
            "cublas": _module("cupy.cuda.cublas", _public(cublas)),
            "nvrtc": _module("cupy.cuda.nvrtc", {"getVersion": lambda: (12, 9)}),
            "compiler": _module("cupy.cuda.compiler", {"compile_using_nvrtc": function.compile_using_nvrtc}),
            "Module": function.Module,
            **_public(streams),
            "UnownedMemory": arrays.UnownedMemory,
            "MemoryPointer": arrays.MemoryPointer,
            "alloc_pinned_memory": arrays.alloc_pinned_memory,
        },
    )
    cuda.__path__ = []
    top = _module(
        "cupy",
        {"cuda": cuda, "ndarray": arrays.ndarray, "__version__": VERSION},
    )
    top.__path__ = []
    # As in CuPy, `import cupy.cuda.cublas` does not work; `from cupy.cuda import cublas` does.
    return {"cupy": top, "cupy.cuda": cuda, **{f"cupy.cuda.{name}": part for name, part in parts.items()}}


@contextmanager
def installed(
    trace: Any = None, *, devices: int = 1, capacity: int = 2**32, strict: bool = False, late: str = ""
) -> Iterator[Machine]:
    """Put the stand-in in CuPy's place; a CuPy that was imported before comes back at the end.

    At the end, what is left on streams runs, and guards around blocks are looked at.

    Args:
        trace: a :class:`tests.standin.trace.Trace` that records what happens; None for no record.
        devices: how many there are; ranks that are threads each ``use()`` their own.
        capacity: bytes of memory of each.
        strict: compare all memory before and after each kernel; slow.
        late: "" to run work as it comes; "needed" or "others" to run it as late as may be (see machine.py).
    """
    machine = Machine(devices, capacity, trace, strict, late)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in ("cupy", "cupyx")}
    sys.modules.update(modules())
    on_disk = os.environ.get("CUPY_CACHE_IN_MEMORY")
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # what is compiled here is nothing for a GPU
    with switched_on(machine):
        try:
            if trace is None:
                yield machine
            else:
                with trace.recording(machine):
                    yield machine
            machine.finish_all()
            machine.memory.check_guards()
        finally:
            machine.close_down()
            del os.environ["CUPY_CACHE_IN_MEMORY"]
            if on_disk is not None:
                os.environ["CUPY_CACHE_IN_MEMORY"] = on_disk
            for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
                del sys.modules[name]
            sys.modules.update(before)
