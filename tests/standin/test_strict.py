from __future__ import annotations

import sys

import numpy as np
import pytest

from tests.standin import DeviceFault, installed
from tests.standin.arrays import ndarray
from tests.standin.small import add, compiled_kernel, device_array, fetched, function_of, pinned, put


@pytest.fixture
def machine():
    with installed(devices=2, strict=True) as here:
        yield here


@pytest.fixture
def stream(machine):
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def test_it_is_cupy_until_the_end_of_the_block():
    before = sys.modules.get("cupy")
    with installed():
        import cupy
        from cupy.cuda import cublas, nccl, runtime

        assert cupy.ndarray is ndarray
        assert runtime is cupy.cuda.runtime and nccl is cupy.cuda.nccl and cublas is cupy.cuda.cublas
        with pytest.raises(ImportError):
            import cupy.cuda.cublas
    assert sys.modules.get("cupy") is before


@pytest.mark.parametrize("name", ["empty", "asarray", "cuda.MemoryPool", "cuda.cublas.sgemm", "cuda.runtime.memset"])
def test_names_that_are_not_offered(machine, name):
    import cupy

    *path, last = name.split(".")
    for part in path:
        cupy = getattr(cupy, part)
    with pytest.raises(AttributeError, match=last):
        getattr(cupy, last)


def test_fresh_memory_is_nan_and_comes_back_as_it_went(stream):
    for kind in (np.float32, np.float64, np.float16):
        assert np.isnan(fetched(device_array(5, kind), stream)).all()
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(fetched(put(values, stream), stream), values)


def test_views_are_numpys(stream):
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    x = put(values, stream)
    for view in (
        lambda a: a[1], lambda a: a[:, 1:], lambda a: a[..., ::-1], lambda a: a.T, lambda a: a.swapaxes(0, 2),
        lambda a: a.reshape(6, 4), lambda a: a.reshape(-1), lambda a: a[1, 2, 3], lambda a: a.view(np.uint16),
        lambda a: a[:, None, 1], lambda a: a.reshape((3, 8))[1:, ::2],
    ):  # fmt: skip
        mine, theirs = view(x), view(values)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert mine.flags.c_contiguous == theirs.flags.c_contiguous
        if theirs.ndim:
            assert mine.strides == theirs.strides
            assert mine.data.ptr - x.data.ptr == theirs.ctypes.data - values.ctypes.data
    assert [part.shape for part in x] == [(3, 4)] * 2 and len(x) == 2


@pytest.mark.parametrize(
    "action",
    [
        np.asarray, float, bool, lambda x: x + 1, lambda x: 1.0 * x, lambda x: np.add(x, 1.0), lambda x: x == x,
        lambda x: np.may_share_memory(x, x), lambda x: x.__setitem__(0, 1.0), hash, lambda x: -x, lambda x: 1.0 in x,
    ],
)  # fmt: skip
def test_nothing_is_converted_or_computed_behind_the_programs_back(stream, action):
    with pytest.raises(TypeError):
        action(put(np.ones(1, np.float32), stream))


@pytest.mark.parametrize("action", [lambda x: x[[0, 1]], lambda x: x[x], lambda x: x[True], lambda x: x.T.reshape(6)])
def test_no_hidden_kernel_in_a_view(stream, action):
    with pytest.raises(DeviceFault, match="hidden"):
        action(put(np.ones((2, 3), np.float32), stream))


def test_memory_must_be_live_of_the_kind_and_on_the_device(machine, stream):
    import cupy
    from cupy.cuda import runtime

    x, host = device_array(8), pinned(8)
    here, there = x.data.ptr, host.ctypes.data
    with pytest.raises(DeviceFault, match="device memory is needed"):
        runtime.memcpyAsync(there, here, 32, runtime.memcpyHostToDevice, stream.ptr)
    with pytest.raises(DeviceFault, match="4 bytes behind"):
        runtime.memcpyAsync(there, here, 36, runtime.memcpyDeviceToHost, stream.ptr)
    with pytest.raises(DeviceFault, match="no memory of ours"):
        runtime.memcpyAsync(np.empty(8, np.float32).ctypes.data, here, 32, runtime.memcpyDeviceToHost, stream.ptr)
    with pytest.raises(DeviceFault, match="no live stream"):
        runtime.memcpyAsync(there, here, 32, runtime.memcpyDeviceToHost, 12345)
    with pytest.raises(TypeError, match="an integer is required"):
        runtime.memcpyAsync(np.int64(there), here, 32, runtime.memcpyDeviceToHost, stream.ptr)
    with pytest.raises(runtime.CUDARuntimeError, match="invalid copy direction"):
        runtime.memcpyAsync(there, here, 32, 7, stream.ptr)
    cupy.cuda.Device(1).use()
    other = cupy.cuda.Stream(non_blocking=True)
    with pytest.raises(DeviceFault, match="memory of device 1 is needed"):
        runtime.memcpyAsync(there, here, 32, runtime.memcpyDeviceToHost, other.ptr)
    with pytest.raises(RuntimeError, match="does not match"), stream:
        pass
    kernel = compiled_kernel("add")
    with pytest.raises(DeviceFault, match="on device 1 is needed"):
        add(kernel, x, x, x, other)
    runtime.free(here)
    with pytest.raises(DeviceFault, match="was freed"):
        runtime.memcpyAsync(there, here, 32, runtime.memcpyDeviceToHost, stream.ptr)
    with pytest.raises(runtime.CUDARuntimeError, match="invalid argument"):
        runtime.free(here)


def test_a_device_has_an_end(stream):
    with installed(capacity=2**20):
        import cupy
        from cupy.cuda import runtime

        kept = runtime.malloc(2**19)
        assert cupy.cuda.Device().mem_info == (2**19, 2**20)
        with pytest.raises(runtime.CUDARuntimeError) as caught:
            runtime.malloc(2**19 + 1)
        assert caught.value.status == 2
        runtime.free(kept)
        runtime.malloc(2**20)


def test_an_array_must_fit_its_memory(machine):
    import cupy

    memory = cupy.cuda.UnownedMemory(cupy.cuda.runtime.malloc(64), 64, None)
    half = cupy.cuda.MemoryPointer(memory, 32)
    assert cupy.ndarray((8,), np.float32, memptr=half).shape == (8,)
    for shape, strides in (((9,), None), ((2, 2), (32, 4)), ((2,), (-64,))):
        with pytest.raises(DeviceFault):
            cupy.ndarray(shape, np.float32, memptr=half, strides=strides)


def test_arguments_of_kernels_are_checked_against_the_text(stream):
    x, wide, n = device_array(4), device_array(4, np.float64), np.int64(4)
    kernel = compiled_kernel("add")
    for args, problem in (
        ((x, x, wide, n, n), "array of float32 is needed, it is float64"),
        ((x, x, x, 4, n), "a numpy.int64 is needed, int was given"),
        ((x, x, x, n, np.int32(4)), "a numpy.int64 is needed, int32 was given"),
        ((x, x, np.zeros(4, np.float32), n, n), "an array on the device is needed, ndarray was given"),
        ((x, x, x, n), "takes 5 arguments and was given 4"),
    ):
        with pytest.raises(TypeError, match=problem), stream:
            kernel((1,), (256,), args)
    with pytest.raises(TypeError, match="tuple"), stream:
        kernel(1, (256,), (x, x, x, n, n))
    with pytest.raises(RuntimeError, match="invalid configuration"), stream:
        kernel((1,), (2048,), (x, x, x, n, n))


OVERREACHING = """
typedef long long i64;
extern "C" __global__ void outside(const float* x, float* out, i64 place) {
    if (threadIdx.x == 0) out[place] = x[0];
}
extern "C" __global__ void through(const float* x, float* out, i64 place) {
    if (threadIdx.x == 0) ((float*)x)[place] = out[0] + 5.0f;
}
"""


@pytest.mark.parametrize(
    ("name", "place", "problem"),
    [
        ("outside", 4, "which it does not say that it writes"),  # the array ends, its block goes on
        ("outside", 100, "was written behind its end"),
        ("outside", -1, "was written before its beginning"),
        ("through", 2, "reads through a pointer to const"),
    ],
)
def test_a_kernel_writes_nothing_but_its_outputs(name, place, problem):
    with pytest.raises(DeviceFault, match=problem), installed(strict=True):
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        kernel = function_of(OVERREACHING, name)
        x, out = put(np.ones(8, np.float32), stream), put(np.zeros(8, np.float32), stream)
        with stream:
            kernel((1,), (32,), (x, out[:4], np.int64(place)))


def test_guards_are_looked_at_in_the_end():
    with pytest.raises(DeviceFault, match="was written behind its end"), installed():
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        x = put(np.zeros(8, np.float32), stream)
        with stream:
            function_of(OVERREACHING, "outside")((1,), (32,), (x, x, np.int64(8)))
