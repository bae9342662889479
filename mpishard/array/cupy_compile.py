"""The kernels as code that a GPU runs: compiled by NVRTC, kept on disk, and loaded once for each device.

[Note: not by cupy.RawModule]
RawModule puts ``-ftz=true`` behind the options that it is given, and fp32 numbers below 2**-126 would become 0 where
NumPy keeps them; and it wants CUDA's headers, of which the kernels include none. ``compile_using_nvrtc``, which it
calls in the end, adds no more than the device's architecture.

[Note: what is kept]
Machine code, beside CuPy's own in ``$CUPY_CACHE_DIR`` (``~/.cupy/kernel_cache``), unless ``CUPY_CACHE_IN_MEMORY`` is 1.
A file begins with a digest of the rest, and comes into being at once, so that processes may share the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from mpishard.array.dtypes import DType
from mpishard.array.kernels import options, source

__all__ = ["loaded", "machine_code"]

_DIGEST = hashlib.sha256().digest_size
_lock = threading.Lock()
#: (device, file, T, G) -> its module. None is unloaded: that would need its device, and may wait for it.
_modules: WeakKeyDictionary[ModuleType, dict[tuple[int, str, DType, DType], Any]] = WeakKeyDictionary()


def loaded(cupy: Any, device: int, file: str, T: DType, G: DType) -> Any:
    """Return CuPy's module of a kernel file for the element types T and G on ``device``, the calling thread's."""
    with _lock:
        modules = _modules.setdefault(cupy, {})
        module = modules.get((device, file, T, G))
        if module is None:
            module = cupy.cuda.Module()
            module.load(machine_code(cupy, source(file), options(T, G)))
            modules[device, file, T, G] = module
    return module


def machine_code(cupy: Any, text: str, wanted: tuple[str, ...]) -> bytes:
    """Return what NVRTC makes of a text under the options ``wanted``, for the calling thread's device."""
    cuda = cupy.cuda
    path: Path | None = None
    if os.environ.get("CUPY_CACHE_IN_MEMORY", "") != "1":
        folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
        as_text = os.environ.get("CUPY_COMPILE_WITH_PTX", "")
        made_of = (text, wanted, cuda.Device().compute_capability, cuda.nvrtc.getVersion(), as_text)
        path = Path(folder, f"mpishard-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:40]}.cubin")
        kept = _kept(path)
        if kept:
            return kept
    code: bytes = cuda.compiler.compile_using_nvrtc(text, wanted, cache_in_memory=True)[0]
    if path is not None:
        _keep(path, code)
    return code


def _kept(path: Path) -> bytes:
    """Return what a file holds; nothing where it is not there or not whole."""
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    digest, code = data[:_DIGEST], data[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else b""


def _keep(path: Path, code: bytes) -> None:
    # A folder that cannot be written, or is full, costs the next process some seconds and no more.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
