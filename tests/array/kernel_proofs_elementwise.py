"""Proofs of copies.cu and elementwise.cu."""

from __future__ import annotations

import numpy as np

from mpishard.array.backend import Draw
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.random import uniform32
from tests.array.kernel_proof import At, Check, Types, proof

SIZES = (1, 31, 257, 1000)
WIDE = np.dtype(np.float64)


def blocks(n: int) -> int:
    return -(-n // 256)


def special(kind: np.dtype) -> np.ndarray:
    """Numbers at the borders of every type, as far as ``kind`` has them."""
    ties = 1 + np.arange(16) * 2.0**-9  # the halves and quarters of bfloat16's last place
    ties16, ties32 = 1 + np.arange(16) * 2.0**-12, 1 + np.arange(16) * 2.0**-25
    beside = [2.0**-11 * (1 + 2.0**-30), 2.0**-11 * (1 - 2.0**-30)]  # of a tie, closer than float32 sees
    small16 = np.array([2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 5 * 2.0**-25, 2.0**-26, 1.1 * 2.0**-25])
    large16 = [65504.0, 65519.99, 65520.0, 65536.0, 65519.999999999]
    small = [2.0**-126, 2.0**-127, 3 * 2.0**-134, 2.0**-133, 2.0**-134, 2.0**-149, 2.0**-150, 2.0**-1022, 5e-324]
    large = [3.3895313892515355e38, 3.3961775292304601e38, 3.4028234663852886e38, 3.4028235677973366e38, 1e300]
    halves = [ties16, 1 + np.array(beside), small16, 2.0**-14 - small16, small16 + 2.0**-40, large16]
    others = [ties32, 1.5 * ties, small, large, [1.7976931348623157e308]]
    numbers = np.concatenate([[0.0, np.inf, np.nan], ties, *halves, *others])
    with np.errstate(all="ignore"):
        numbers = np.concatenate([numbers, -numbers]).astype(kind)
    # NaNs that rounding would carry to infinity or to zero, and the smallest
    words = {8: [0x7FFFFFFFFFFFFFFF, 0x7FF0000000000001], 4: [0x7FFFFFFF, 0x7F800001], 2: [0x7FFF, 0x7F81, 0x7C01]}
    return np.concatenate([numbers, np.array(words[kind.itemsize], f"u{kind.itemsize}").view(kind)])


def cast(x: np.ndarray, kind: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(kind)


@proof("copy_cast", any_grid=True)
def copy_cast(types: Types, check: Check) -> None:
    for x in (*(check.normal(n) for n in SIZES), special(types.T)):
        out = np.zeros(x.shape, types.G)
        check(blocks(x.size), {"out": cast(x, types.G)}, exact=True, x=x, out=out, n=x.size)
    if types.T == types.G:  # every bit, those of NaNs too
        words = check.rng.integers(0, 1 << 16, 256 * types.T.itemsize // 2, dtype=np.uint16)
        x, out = words.view(types.T), np.zeros(256, types.T)
        check.library.launch("copy_cast", 1, 256, [x.ctypes.data, out.ctypes.data, np.int64(256)])
        assert x.tobytes() == out.tobytes()


#: dims, element offsets and strides: a transpose, a row that is repeated, a reversed axis, holes; one of each size
VIEWS = [
    ((1, 1, 1, 1), (0, (0, 0, 0, 1)), (0, (0, 0, 0, 1))),
    ((2, 3, 5, 7), (0, (105, 7, 21, 1)), (0, (105, 35, 7, 1))),
    ((1, 4, 9, 11), (3, (0, 0, 0, 1)), (2, (0, 200, 13, 1))),
    ((1, 1, 17, 19), (17 * 19 - 1, (0, 0, -19, -1)), (5, (0, 0, 2, 40))),
]


def viewed(array: np.ndarray, offset: int, dims: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    steps = tuple(stride * array.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(array[offset:], dims, steps)


def numbered(letters: str, values: tuple[int, ...]) -> dict[str, int]:
    return {f"{letters}{i}": value for i, value in enumerate(values)}


@proof("copy_strided", any_grid=True)
def copy_strided(types: Types, check: Check) -> None:
    for dims, (start, strides), (out_start, out_strides) in VIEWS:
        x, out = check.normal(1000), check.normal(1000, kind=types.G)
        expected = out.copy()
        viewed(expected, out_start, dims, out_strides)[...] = cast(viewed(x, start, dims, strides), types.G)
        places = numbered("d", dims) | numbered("xs", strides) | numbered("os", out_strides)
        grid = blocks(int(np.prod(dims)))
        check(grid, {"out": expected}, exact=True, x=At(x, start), out=At(out, out_start), **places)


@proof("fill_strided", any_grid=True)
def fill_strided(types: Types, check: Check) -> None:
    contiguous = [((1, 1, 1, n), None, (0, (0, 0, 0, 1))) for n in SIZES]
    for value in (0.0, -0.0, 1 / 3, float("inf"), float("nan")):
        for dims, _, (start, strides) in (*VIEWS, *contiguous):
            out = check.normal(1000)
            expected = out.copy()
            viewed(expected, start, dims, strides)[...] = cast(types.A.type(value), types.T)
            places = numbered("d", dims) | numbered("os", strides)
            grid = blocks(int(np.prod(dims)))
            check(grid, {"out": expected}, exact=True, out=At(out, start), value=value, **places)


def periods(n: int) -> list[int]:
    return [n] + ([n // 10, 1] if n % 10 == 0 else [])


@proof("add", any_grid=True)
def add(types: Types, check: Check) -> None:
    for n in SIZES:
        for period in periods(n):
            x, y, out = check.normal(n), check.normal(period), np.zeros(n, types.T)
            wide = x.astype(types.A) + np.resize(y, n).astype(types.A)
            expected = {"out": wide.astype(types.T)}
            check(blocks(n), expected, exact=True, x=x, y=y, out=out, n=n, period=period)
    x, y = check.normal(300), check.normal(300)
    expected = {"out": (x.astype(types.A) + y.astype(types.A)).astype(types.T)}
    check(2, expected, exact=True, x=x, y=y, out=x, n=300, period=300)  # in place


@proof("add_strided", any_grid=True)
def add_strided(types: Types, check: Check) -> None:
    for dims, (start, strides), (out_start, out_strides) in VIEWS:
        x, y, out = check.normal(1000), check.normal(1000), check.normal(1000)
        expected = out.copy()
        one, other = (viewed(a, start, dims, strides).astype(types.A) for a in (x, y))
        viewed(expected, out_start, dims, out_strides)[...] = (one + other).astype(types.T)
        places = numbered("d", dims) | numbered("xs", strides) | numbered("ys", strides) | numbered("os", out_strides)
        pointers = {"x": At(x, start), "y": At(y, start), "out": At(out, out_start)}
        check(blocks(int(np.prod(dims))), {"out": expected}, exact=True, **pointers, **places)


@proof("multiply", any_grid=True)
def multiply(types: Types, check: Check) -> None:
    for n in SIZES:
        for period in periods(n):
            x, y, out = check.normal(n), check.normal(period), check.normal(n, kind=types.G)
            product = x.astype(types.A) * np.resize(y, n).astype(types.A)
            for add_ in (0, 1):
                expected = (out.astype(types.A) + product if add_ else product).astype(types.G)
                check(blocks(n), {"out": expected}, exact=True, x=x, y=y, out=out, n=n, period=period, add=add_)


@proof("multiply_strided", any_grid=True)
def multiply_strided(types: Types, check: Check) -> None:
    for dims, (start, strides), (out_start, out_strides) in VIEWS:
        x, y, out = check.normal(1000), check.normal(1000), check.normal(1000, kind=types.G)
        one, other = (viewed(a, start, dims, strides).astype(types.A) for a in (x, y))
        for add_ in (0, 1):
            expected = out.copy()
            target = viewed(expected, out_start, dims, out_strides)
            target[...] = (target.astype(types.A) + one * other if add_ else one * other).astype(types.G)
            places = numbered("d", dims) | numbered("xs", strides) | numbered("ys", strides)
            places |= numbered("os", out_strides)
            pointers = {"x": At(x, start), "y": At(y, start), "out": At(out, out_start)}
            check(blocks(int(np.prod(dims))), {"out": expected}, exact=True, **pointers, **places, add=add_)


def arguments_of_gelu(check: Check, n: int) -> np.ndarray:
    """Numbers over where GELU curves, and far beyond."""
    x = check.normal(n) * 3
    x[: n // 8] *= 10
    return x.astype(check.types.T)


@proof("gelu", bound=5e-7, any_grid=True)
def gelu(types: Types, check: Check) -> None:
    for n in SIZES:
        for tanh_form in (0, 1):
            x, y = arguments_of_gelu(check, n), np.zeros(n, types.T)
            expected = np.zeros(n, WIDE)
            NumpyOps().gelu(x.astype(WIDE), expected, bool(tanh_form))
            check(blocks(n), {"y": expected}, x=x, y=y, n=n, tanh_form=tanh_form)


@proof("gelu_backward", bound=2e-6, any_grid=True)
def gelu_backward(types: Types, check: Check) -> None:
    for n in SIZES:
        for tanh_form in (0, 1):
            x, dy = arguments_of_gelu(check, n), check.normal(n)
            expected = np.zeros(n, WIDE)
            NumpyOps().gelu_backward(x.astype(WIDE), dy.astype(WIDE), expected, bool(tanh_form))
            check(blocks(n), {"dx": expected}, x=x, dy=dy, dx=np.zeros(n, types.T), n=n, tanh_form=tanh_form)
            check(blocks(n), {"dx": expected}, x=x, dy=dy, dx=dy, n=n, tanh_form=tanh_form)  # in place


@proof("dropout", any_grid=True)
def dropout(types: Types, check: Check) -> None:
    draws = [Draw(7, 11, 13, first) for first in (0, 1, 7, 8, 12345)]
    draws.append(Draw(2**64 - 1, 2**63 + 5, 2**40, 2**45 + 3))
    drawn = np.zeros(8, np.float32)
    uniform32(draws[0], drawn)
    # A rate that is drawn is kept; so is one that rounds to it.
    for rate in (0.0, 0.1, 0.5, 0.999, float(drawn[5]), float(drawn[5]) + 1e-12):
        for n, draw in zip((9, 7, 257, 1000, 2050, 33), draws, strict=True):
            x, expected = check.normal(n), np.zeros(n, types.T)
            NumpyOps().dropout(x, expected, rate, draw)
            place = {"seed": draw.seed, "stream": draw.stream, "step": draw.step, "first": draw.first}
            scale = 1.0 / (1.0 - rate)
            out = np.zeros(n, types.T)
            check(blocks(n), {"y": expected}, exact=True, x=x, y=out, n=n, rate=rate, scale=scale, **place)
