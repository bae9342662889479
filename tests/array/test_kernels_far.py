"""Indices beyond 2**32: the last blocks of launches on arrays that have addresses and hardly any memory.

What a kernel does to the end of a large array is what it does to a small one that holds the same, bit for bit.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from mpishard.array import kernels
from tests.array.kernel_proof import Types, types_of
from tests.standin import emulate

PAIR = ("bfloat16", "bfloat16")
TYPES: Types = types_of(PAIR)
NO_RESERVE = 0x4000  # MAP_NORESERVE on Linux; mmap has the name from Python 3.11 on
TAIL = 302
FAR = 2**32 + TAIL
GOLDEN = 0x9E3779B97F4A7C15
WIDTH = 1000
ROWS = 2**32 // WIDTH + 2
RNG = np.random.default_rng(5)


def element(kind: str) -> np.dtype:
    named = {"T": TYPES.T, "G": TYPES.G, "A": TYPES.A}
    return named[kind] if kind in named else np.dtype({"i64": "i8", "u64": "u8", "double": "f8"}[kind])


def sparse(kind: np.dtype, count: int, tail: np.ndarray) -> np.ndarray:
    """Return an array of zeros that ends with ``tail``: pages that nobody writes take no memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    array = np.frombuffer(mmap.mmap(-1, count * kind.itemsize, flags), kind, count)
    array[count - tail.size :] = tail.reshape(-1)
    return array


def launch(name: str, grid: int, first: int, arguments: dict[str, Any]) -> None:
    kernel, values = kernels.KERNELS[name], []
    scalars = {"i64": np.int64, "u64": np.uint64, "int": np.int32, "double": np.float64, "A": TYPES.A.type}
    for parameter in kernel.parameters:
        given = arguments[parameter.name]
        values.append(given.ctypes.data if parameter.pointer else scalars[parameter.type](given))
    emulate.library(kernel.file, *PAIR).launch(name, grid, kernels.BLOCK, values, first=first)


def compare(name: str, large: dict[str, Any], small: dict[str, Any]) -> None:
    """Compare what was written: the ends, and that nothing came to where a 32-bit index would have led."""
    for parameter in kernels.KERNELS[name].parameters:
        if not parameter.written:
            continue
        far, near = large[parameter.name], small[parameter.name].reshape(-1)
        assert far[far.size - near.size :].tobytes() == near.tobytes(), parameter.name
        if far.size > 2**31:
            assert not far[:4096].any()
            assert not far[far.size - 2**31 - 4096 : far.size - 2**31 + 4096].any()


def halves(letters: str, n: int) -> dict[str, int]:
    """Contiguous strides of (1, 2, 1, n / 2)."""
    return {f"{letters}0": n, f"{letters}1": n // 2, f"{letters}2": n // 2, f"{letters}3": 1}


def dims(n: int, *letters: str) -> dict[str, int]:
    sizes = {"d0": 1, "d1": 2, "d2": 1, "d3": n // 2}
    for name in letters:
        sizes |= halves(name, n)
    return sizes


def adamw(n: int, skipped: int) -> dict[str, Any]:
    scalars = dict.fromkeys(("factor", "rate", "lr", "beta1", "rest1", "beta2", "rest2", "eps", "root"), 0.01)
    return {"bounds": np.array([0, n]), "decays": np.array([0.1]), "segments": 1, "n": n, **scalars}


DRAW = {"seed": 1, "stream": 2, "step": 3}
#: the arguments besides arrays, of n elements of which ``skipped`` stood before: those that a small array lacks
ELEMENTWISE = {
    "copy_cast": lambda n, skipped: {"n": n},
    "copy_strided": lambda n, skipped: dims(n, "xs", "os"),
    "fill_strided": lambda n, skipped: {"value": 1.5, **dims(n, "os")},
    "add": lambda n, skipped: {"n": n, "period": n},
    "add_strided": lambda n, skipped: dims(n, "xs", "ys", "os"),
    "multiply": lambda n, skipped: {"n": n, "period": n, "add": 1},
    "multiply_strided": lambda n, skipped: {"add": 1, **dims(n, "xs", "ys", "os")},
    "gelu": lambda n, skipped: {"n": n, "tanh_form": 1},
    "gelu_backward": lambda n, skipped: {"n": n, "tanh_form": 0},
    "dropout": lambda n, skipped: {"n": n, "rate": 0.5, "scale": 2.0, **DRAW, "first": 7 + skipped},
    "accumulate": lambda n, skipped: {"n": n, "add": 1},
    "combine_parts": lambda n, skipped: {"width": n, "parts": 1, "add": 0},
    "adamw": adamw,
    "adamw_cast": adamw,
    "fingerprint": lambda n, skipped: {"n": n, "out": np.zeros(1, np.uint64), "start": (5 + skipped * GOLDEN) % 2**64},
    "exact_sum": lambda n, skipped: {"n": n, "out": np.zeros(21, np.int64)},
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elements(name: str) -> None:
    small, large = ELEMENTWISE[name](TAIL, FAR - TAIL), ELEMENTWISE[name](FAR, 0)
    for parameter in kernels.KERNELS[name].parameters:
        if parameter.name not in small:
            tail = abs(RNG.standard_normal(TAIL)).astype(element(parameter.type))
            small[parameter.name], large[parameter.name] = tail, sparse(tail.dtype, FAR, tail)
    per_block = kernels.BLOCK * (8 if name == "dropout" else 1)
    grid = -(-FAR // per_block)
    launch(name, grid, (FAR - TAIL) // per_block, large)
    launch(name, 2, 0, small)
    compare(name, large, small)


def test_elements_that_are_repeated() -> None:
    x, y, out = (RNG.standard_normal(TAIL).astype(TYPES.T) for _ in range(3))
    large = {name: sparse(a.dtype, FAR, a) for name, a in (("x", x), ("out", out))} | {"y": y[:2].copy()}
    small = {"x": x, "out": out, "y": y[:2].copy()}  # FAR is even: both begin at the first of two
    for name, extra in (("add", {}), ("multiply", {"add": 0})):
        launch(name, -(-FAR // 256), (FAR - TAIL) // 256, {**large, "n": FAR, "period": 2, **extra})
        launch(name, 2, 0, {**small, "n": TAIL, "period": 2, **extra})
        compare(name, large, small)


#: arrays that have the rows' shape, those of one number a row, what else there is, and blocks of a row
BY_ROW: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "layernorm": (("x", "y"), ("mean", "rstd"), {"width": WIDTH, "eps": 1e-5}),
    "layernorm_backward_input": (("x", "dy", "dx"), ("mean", "rstd"), {"width": WIDTH}),
    "cross_entropy": (("logits",), ("targets", "losses"), {"vocabulary": WIDTH, "scale": 0.5, "gradient": 1}),
    "embedding": (("out",), ("tokens",), {"width": WIDTH, "vocabulary": 1}),
}


@pytest.mark.parametrize("name", BY_ROW)
def test_rows(name: str) -> None:
    wide, narrow, others = BY_ROW[name]
    kinds = {p.name: element(p.type) for p in kernels.KERNELS[name].parameters if p.pointer}
    small, large = dict(others), dict(others)
    for key, kind in kinds.items():
        size = 1 if key in narrow else WIDTH
        array = np.zeros(1, kind) if kind.kind == "i" else RNG.standard_normal(size).astype(kind)
        small[key] = array
        large[key] = sparse(kind, ROWS * size, array) if key in wide + narrow else array
    count = "count" if name == "embedding" else "rows"
    launch(name, ROWS, ROWS - 1, {**large, count: ROWS})
    launch(name, 1, 0, {**small, count: 1})
    compare(name, large, small)


@pytest.mark.parametrize("name", ["layernorm_backward_params", "column_sum_parts"])
def test_columns(name: str) -> None:
    x, dy = RNG.standard_normal((2, WIDTH)).astype(TYPES.T)
    ones = np.ones(1, TYPES.A)
    sums = {key: np.zeros(2 * WIDTH, TYPES.A) for key in ("weights", "biases", "sums")}
    small = {"x": x, "dy": dy, "mean": ones, "rstd": ones, "width": WIDTH}
    large = {key: sparse(array.dtype, ROWS * array.size, array) for key, array in small.items() if key != "width"}
    columns = -(-WIDTH // kernels.BLOCK)
    # Two parts: all rows but the last, of which no block is run, and the last.
    launch(name, 2 * columns, columns, {**large, **sums, "width": WIDTH, "rows": ROWS, "rows_per_part": ROWS - 1})
    near = {key: np.zeros(WIDTH, TYPES.A) for key in sums}
    launch(name, columns, 0, {**small, **near, "rows": 1, "rows_per_part": 1})
    for parameter in kernels.KERNELS[name].parameters:
        if parameter.written:
            assert sums[parameter.name][WIDTH:].tobytes() == near[parameter.name].tobytes()


STEP = 2**32 + 64
STRIDED: dict[str, dict[str, int]] = {
    "row_dot": {"rows": 2, "heads": 1, "size": 40, "xs1": 0, "xs2": 1, "ys1": 0, "ys2": 1, "os0": 1, "os1": 0},
    "causal_softmax": {"heads": 2, "rows": 1, "keys": 40, "first_row": 39, "replay": 0, "s1": 0, "ls0": 1, "ls1": 0},
    "softmax_backward": {"heads": 2, "rows": 1, "keys": 40, "ps1": 0, "dps1": 0, "ds0": 1, "ds1": 0},
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides(name: str) -> None:
    far: dict[str, Any] = {"scale": 0.5, **STRIDED[name]}
    near = dict(far)
    for stride in ("xs0", "ys0", "s0", "ps0", "dps0"):
        far[stride], near[stride] = STEP, 40
    for parameter in kernels.KERNELS[name].parameters:
        if parameter.pointer:
            array = RNG.standard_normal(80 if parameter.type == "T" else 2).astype(element(parameter.type))
            near[parameter.name] = far[parameter.name] = array.copy()
            if parameter.type == "T":
                far[parameter.name] = sparse(array.dtype, STEP + 40, array[40:])
                far[parameter.name][:40] = array[:40]
            elif parameter.written:
                far[parameter.name] = array.copy()
    for arguments in (far, near):
        launch(name, 2, 0, arguments)
    for parameter in kernels.KERNELS[name].parameters:
        if parameter.written:
            one, other = far[parameter.name], near[parameter.name]
            assert one[: other.size // 2].tobytes() == other[: other.size // 2].tobytes()
            assert one[-(other.size // 2) :].tobytes() == other[other.size // 2 :].tobytes()


def test_ordered_sum() -> None:
    n, blocks = FAR, RNG.standard_normal((2, TAIL)).astype(TYPES.T)
    own, start = RNG.standard_normal(TAIL).astype(TYPES.T), np.zeros(TAIL, TYPES.A)
    large = {"own": sparse(TYPES.T, n, own), "out": sparse(TYPES.A, n, start)}
    large["blocks"] = sparse(TYPES.T, 2 * n, blocks[1])
    large["blocks"][n - TAIL : n] = blocks[0]
    small = {"own": own, "out": start, "blocks": blocks}
    rest = {"count": 2, "own_index": -1, "add": 0, "bracket": 1}
    launch("ordered_sum", -(-n // 256), (n - TAIL) // 256, {**large, **rest, "n": n})
    launch("ordered_sum", 2, 0, {**small, **rest, "n": TAIL})
    compare("ordered_sum", large, small)


def test_square_sums() -> None:
    chunks, x = 2**23 + 2, RNG.standard_normal(512).astype(TYPES.T)
    large = {"x": sparse(TYPES.T, chunks * 512, x), "out": np.zeros(chunks)}
    holes = np.array([0, 2**32, (chunks - 1) * 512 + 100, (chunks - 1) * 512 + 200])
    launch("square_sums", chunks, chunks - 1, {**large, "holes": holes, "chunks": chunks, "holes_count": 2})
    small = {"x": x, "out": np.zeros(1), "holes": np.array([100, 200]), "chunks": 1, "holes_count": 1}
    launch("square_sums", 1, 0, small)
    assert large["out"][-1] == small["out"][0] > 0


@pytest.mark.parametrize("name", ["embedding", "embedding_backward"])
def test_rows_of_a_table(name: str) -> None:
    last = np.array([ROWS - 1])
    row, out = RNG.standard_normal((2, WIDTH)).astype(TYPES.T)
    table = {"table": sparse(TYPES.T, ROWS * WIDTH, row), "dtable": sparse(TYPES.T, ROWS * WIDTH, row)}
    sizes = {"tokens": last, "count": 1, "width": WIDTH}
    launch(name, 1, 0, {**table, **sizes, "out": out, "dy": out, "vocabulary": ROWS})
    near = {"table": row, "dtable": row.copy(), "out": out.copy(), "dy": out.copy()}
    launch(name, 1, 0, {**near, **sizes, "tokens": np.zeros(1, np.int64), "vocabulary": 1})
    assert out.tobytes() == near["out"].tobytes()
    assert table["dtable"][-WIDTH:].tobytes() == near["dtable"].tobytes()
