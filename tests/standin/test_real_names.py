"""The stand-in's names, constants and signatures are CuPy's, wherever CuPy can be imported (no device is needed)."""

from __future__ import annotations

import importlib
import inspect
import re

import numpy as np
import pytest

from tests.standin import arrays, cublas, errors, function, nccl, runtime, streams

cupy = pytest.importorskip("cupy", exc_type=ImportError)


def library(name):
    try:
        return importlib.import_module("cupy.cuda.nccl") if name == "nccl" else getattr(cupy.cuda, name)
    except Exception as error:
        pytest.skip(f"CuPy does not load {name}: {error}")


@pytest.mark.parametrize("mine", [runtime, cublas, nccl], ids=["runtime", "cublas", "nccl"])
def test_names_and_constants(mine):
    theirs = library(mine.__name__.rsplit(".")[-1])
    for name in mine.__all__:
        value = getattr(mine, name)
        assert hasattr(theirs, name), name
        if isinstance(value, int):
            assert getattr(theirs, name) == value, name


@pytest.mark.parametrize("mine", [runtime, cublas], ids=["runtime", "cublas"])
def test_signatures_of_functions(mine):
    theirs = library(mine.__name__.rsplit(".")[-1])
    for name in mine.__all__:
        value = getattr(mine, name)
        if inspect.isfunction(value):
            text = getattr(theirs, name).__doc__ or ""
            found = re.match(rf"{name}\((.*?)\)", text)
            if found:
                assert [part.split()[-1] for part in filter(None, found[1].split(", "))] == list(
                    inspect.signature(value).parameters
                ), name


def test_signatures_of_nccl():
    theirs = library("nccl").NcclCommunicator
    for name in ("allGather", "reduceScatter", "broadcast", "send", "recv", "abort", "destroy", "check_async_error"):
        found = re.match(rf"NcclCommunicator.{name}\((.*?)\)", getattr(theirs, name).__doc__)
        names = [part.split()[-1] for part in found[1].split(", ")]
        assert names == list(inspect.signature(getattr(nccl.NcclCommunicator, name)).parameters), name


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (streams.Stream, "Stream"), (streams.Event, "Event"), (streams.Device, "Device"),
        (arrays.UnownedMemory, "UnownedMemory"), (arrays.MemoryPointer, "MemoryPointer"),
    ],
)  # fmt: skip
def test_members_of_classes(mine, theirs):
    for name in vars(mine):
        if not name.startswith("_"):
            assert hasattr(getattr(cupy.cuda, theirs), name), name


def test_members_of_arrays_and_modules():
    for mine, theirs in ((arrays.ndarray, cupy.ndarray), (function.Module, cupy.cuda.Module)):
        for name in vars(mine):
            if not name.startswith("_"):
                assert hasattr(theirs, name), name
    for name in streams.__all__:
        assert hasattr(cupy.cuda, name), name


@pytest.mark.parametrize(("mine", "theirs"), [(errors._CUDA, "runtime"), (errors._CUBLAS, "cublas")])
def test_texts_of_errors(mine, theirs):
    raised = getattr(library(theirs), {"runtime": "CUDARuntimeError", "cublas": "CUBLASError"}[theirs])
    for status, text in mine.items():
        assert str(raised(status)) == text


def test_views_are_cupys():
    """Views of memory that nobody looks at: CuPy makes them without a device."""
    memory = cupy.cuda.UnownedMemory(4096, 96, None, 0)
    x = cupy.ndarray((2, 3, 4), np.float32, memptr=cupy.cuda.MemoryPointer(memory, 0))
    host = np.empty((2, 3, 4), np.float32)
    for view in (lambda a: a[1], lambda a: a[:, 1:], lambda a: a.T, lambda a: a.swapaxes(0, 2), lambda a: a[..., ::-1]):
        assert (view(x).shape, view(x).strides) == (view(host).shape, view(host).strides)
        assert view(x).data.ptr - x.data.ptr == view(host).ctypes.data - host.ctypes.data
    with pytest.raises(TypeError, match="an integer is required"):
        cupy.cuda.UnownedMemory(np.int64(4096), 96, None, 0)
