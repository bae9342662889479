"""The emulation finds what a GPU would not forgive, and computes the same whatever compiles it and whoever launches."""

from __future__ import annotations

import re
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpishard.array import kernels
from tests.standin import emulate
from tests.standin.emulate import EmulationError

OPTIONS = kernels.options("float32", "float32")
WRONG = """
typedef ELEMENT T;
typedef GRADIENT G;
typedef long long i64;

extern "C" __global__ void right(T* x, int n) {
    __shared__ T held[256];
    held[threadIdx.x] = x[threadIdx.x]; __syncwarp();
    __syncthreads();
    x[threadIdx.x] = held[255 - threadIdx.x] + (T)n;
}
extern "C" __global__ void ended(T* x, int n) {
    if (threadIdx.x == 3) return;
    __syncthreads();
    x[threadIdx.x] = (T)n;
}
extern "C" __global__ void elsewhere(T* x, int n) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    x[threadIdx.x] = (T)n;
}
extern "C" __global__ void lanes(T* x, int n) {
    if (threadIdx.x % 2 == 0) x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (T)n, 1);
}
extern "C" __global__ void half(T* x, int n) {
    x[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, (T)n, 1);
}
extern "C" __global__ void mixed(T* x, int n) {
    if (threadIdx.x < 32)
        x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, (T)n, 1);
    else
        __syncthreads();
}
extern "C" __global__ void vote(T* x, int n) {
    int some = __syncthreads_or(threadIdx.x == 200);
    int none = __syncthreads_or(threadIdx.x == 1000);
    int counted = __syncthreads_count((int)threadIdx.x < n);
    x[threadIdx.x] = (T)(some * 10000 + none * 1000 + counted);
}
extern "C" __global__ void unguarded(T* x, int n) {
    __shared__ T held[256];
    held[threadIdx.x] = (T)(n + (int)threadIdx.x);
    x[threadIdx.x] = held[255 - threadIdx.x];
}
"""
LINES = {
    "ended": r"255 of 256 threads of block 0 wait in line 14 \(__syncthreads\(\);\), 1 have ended: not all reached it",
    "elsewhere": r"thread \d+ of block 0 waits in line (19|21) .* and others in line (19|21) ",
    "lanes": r"16 of 32 threads of block 0 wait in line 25 .*, 16 have ended: not all reached it",
    "half": r"line 28 .* names 0xffff; whole warps alone",
    "mixed": r"224 of 256 threads of block 0 wait in line 34 .*, 32 have ended: not all reached it",
}


def pointer(array: np.ndarray) -> int:
    return array.ctypes.data


def launch(name: str, n: int = 5, backwards: bool = False) -> np.ndarray:
    x = np.arange(256, dtype=np.float32)
    emulate.compiled(WRONG, OPTIONS).launch(name, 1, 256, [pointer(x), np.int32(n)], backwards)
    return x


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", LINES)
def test_threads_that_go_different_ways(name: str, backwards: bool) -> None:
    with pytest.raises(EmulationError, match=rf"^kernel {name}: {LINES[name]}"):
        launch(name, backwards=backwards)
    # What was left in the middle does not come back.
    assert (launch("right", backwards=backwards) == np.arange(256)[::-1] + 5).all()


def test_votes() -> None:
    assert (launch("vote", 77) == 10077).all()


def test_a_missing_barrier_shows() -> None:
    assert (launch("unguarded") != launch("unguarded", backwards=True)).any()


def test_launches_that_cuda_refuses() -> None:
    library, x = emulate.compiled(WRONG, OPTIONS), np.zeros(256, np.float32)
    for grid, block in ((0, 256), (2**31, 256), (1, 0), (1, 1056), (1, 100)):
        with pytest.raises(EmulationError, match=f"^kernel right: {grid} blocks of {block} threads cannot be launched"):
            library.launch("right", grid, block, [pointer(x), np.int32(1)])
    with pytest.raises(EmulationError, match=r"^kernel right has 2 parameters and was given 1"):
        library.launch("right", 1, 256, [pointer(x)])
    for wrong in (1, np.int64(1), np.float32(1)):
        found = type(wrong).__name__
        with pytest.raises(EmulationError, match=f"^kernel right: n was given as {found}; it is int32"):
            library.launch("right", 1, 256, [pointer(x), wrong])


def test_options_that_would_give_other_results() -> None:
    for options in (OPTIONS[:1] + OPTIONS[2:], (*OPTIONS, "--use_fast_math")):
        with pytest.raises(EmulationError, match=r"results are those of --fmad=false alone"):
            emulate.compiled(WRONG, options)


def test_a_text_that_does_not_compile() -> None:
    for body, message in (("y = 1;", "'y'"), ("int unused = 2;", "unused")):
        with pytest.raises(EmulationError, match=re.escape(message)):
            emulate.compiled(f'extern "C" __global__ void k(float* x) {{ *x = 0; {body} }}', OPTIONS)


def layernorm(library: emulate.Library, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((20, 100)).astype(np.float32)
    ones, y, stats = np.ones(100, np.float32), np.zeros_like(x), np.zeros((2, 20), np.float32)
    pointers = [pointer(array) for array in (x, ones, ones, y, stats[0], stats[1])]
    library.launch("layernorm", 20, 256, [*pointers, np.int64(20), np.int64(100), np.float32(1e-5)])
    return y


def test_threads_launch_at_the_same_time() -> None:
    library, found = emulate.library("rows.cu", "float32", "float32"), {}
    expected = {seed: layernorm(library, seed) for seed in range(4)}

    def work(seed: int) -> None:
        found[seed] = [layernorm(library, seed) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, array in expected.items():
        assert len(found[seed]) == 10
        assert all((other == array).all() for other in found[seed])


def test_one_text_is_built_by_several_at_once() -> None:
    text = f"// {uuid.uuid4()}\n"
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: emulate.build(text, emulate.compiler()), range(3)))
    assert len(set(paths)) == 1
    assert paths[0].exists()
    paths[0].unlink()


def test_float16_is_converted_as_by_the_processor() -> None:
    """Every number there is, and all ties between two of them with what lies beside, in float32 and in float64."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = np.empty(halves.size, np.float32)
    with np.errstate(all="ignore"):
        cast(halves, wide)
        assert np.array_equal(wide, halves.astype(np.float32), equal_nan=True)
        assert (np.signbit(wide) == np.signbit(halves)).all()
        sorted_ones = np.sort(halves[np.isfinite(halves)].astype(np.float64))
        ties = np.concatenate([(sorted_ones[1:] + sorted_ones[:-1]) / 2, [65520.0, -65520.0, 1e-30, 1e300, np.inf]])
        for kind in (np.float32, np.float64):
            near = ties.astype(kind)
            for x in (near, np.nextafter(near, kind(np.inf)), np.nextafter(near, kind(-np.inf)), -near[:1] * 0, wide):
                found, x = np.empty(x.size, np.float16), x.astype(kind)
                cast(x, found)
                numbers = ~np.isnan(x)
                assert found[numbers].tobytes() == x.astype(np.float16)[numbers].tobytes()
                assert (found[~numbers].view(np.uint16) == 0x7FFF).all()


def cast(x: np.ndarray, out: np.ndarray) -> None:
    library = emulate.library("copies.cu", x.dtype.name, out.dtype.name)
    library.launch("copy_cast", 8, 256, [pointer(x), pointer(out), np.int64(x.size)])


def test_every_compiler_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = layernorm(emulate.library("rows.cu", "float32", "float32"), 1)
    code, options = kernels.source("rows.cu"), kernels.options("float32", "float32")
    macros = dict(option[2:].split("=") for option in options if option.startswith("-D"))
    found = kernels.parse(code)
    assert emulate.compilers()
    for command in emulate.compilers():
        path = emulate.build(emulate.translated(code, macros, found), command)
        assert (layernorm(emulate.Library(code, found, path, "float"), 1) == expected).all()
    monkeypatch.setenv("CXX", "some-compiler --with 'an option'")
    assert emulate.compilers() == [["some-compiler", "--with", "an option"]]
