"""Each operation with arguments and a plain float64 reference: one table that every backend is run over."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mpishard.array.constants import CHUNK
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.numpy_tiles import TILE
from tests.array.op_case import ALL, WIDE, Case, array
from tests.array.op_cases_layers import DRAW, LAYERS
from tests.array.philox import uniform32

SIZES = (1, 3, CHUNK - 1, CHUNK, TILE // 2 + 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 5)


def memory() -> Iterator[Case]:
    for n in SIZES:
        yield Case(
            "copy", str(n), lambda r, k, n=n: {"x": array(r, k, n), "out": array(r, k, n)}, lambda x, out: {"out": x}
        )
        yield Case(
            "fill",
            str(n),
            lambda r, k, n=n: {"out": array(r, k, n), "value": -1.5},
            lambda out, value: {"out": 0 * out - 1.5},
        )
    for name in ALL:
        yield Case(
            "copy",
            f"to-{name}",
            lambda r, k, name=name: {"x": array(r, k, 3, 5), "out": array(r, DTYPES[name], 5, 3).T},
            lambda x, out: {"out": x},
        )


def matmul_reference(a, b, out, add=False):
    return {"out": np.einsum("...nk,...km->...nm", a, b) + (out if add else 0.0)}


def linear_reference(x, weight, bias, y):
    product = np.einsum("nk,km->nm", x, weight)
    return {"y": product} if bias is None else {"y": product + bias, "rounded": product}


def matrices() -> Iterator[Case]:
    shapes = (
        ((), 1, 1, 1), ((), 3, 5, 7), ((), 17, 1, 1), ((), 1, 33, 257), ((2,), 5, 3, 7), ((2, 3), 4, 1, 5),
        ((), 700, 3, 401), ((3,), 211, 2, 703), ((), 2, 2, 131072),
    )  # fmt: skip
    for lead, n, k, m in shapes:
        for add in (False, True):

            def make(r, t, lead=lead, n=n, k=k, m=m, add=add):
                return {
                    "a": array(r, t, *lead, n, k),
                    "b": array(r, t, *lead, k, m),
                    "out": array(r, t, *lead, n, m),
                    "add": add,
                }

            label = f"{lead}{n}x{k}x{m}-{'add' if add else 'write'}"
            yield Case("matmul", label, make, matmul_reference, 8, either=("out",))
    for add in (False, True):

        def make(r, t, add=add):
            """As attention calls it: the heads of one fused array, one factor transposed, every array strided."""
            qkv, out = array(r, t, 9, 3, 2, 5), array(r, t, 9, 3, 2, 5)
            p = array(r, t, 2, 4, 9)
            return {"a": p.swapaxes(1, 2), "b": qkv[:4, 0].swapaxes(0, 1), "out": out[:, 2].swapaxes(0, 1), "add": add}

        yield Case("matmul", f"strided-{'add' if add else 'write'}", make, matmul_reference, 8, either=("out",))
    for n, i, o in ((1, 1, 1), (7, 5, 3), (65, 33, 129)):
        for bias in (True, False):

            def make(r, t, n=n, i=i, o=o, bias=bias):
                return {
                    "x": array(r, t, n, i), "weight": array(r, t, i, o), "bias": array(r, t, o) if bias else None,
                    "y": array(r, t, n, o),
                }  # fmt: skip

            yield Case("linear", f"{n}x{i}x{o}-{'bias' if bias else 'plain'}", make, linear_reference, loose=8)


def sums() -> Iterator[Case]:
    for n, c in ((1, 1), (7, 3), (1, TILE + 1), (2, 2 * TILE + 3), (300, 5)):
        for add in (False, True):
            yield Case(
                "column_sum",
                f"{n}x{c}-{'add' if add else 'write'}",
                lambda r, t, n=n, c=c, add=add: {"x": array(r, t, n, c), "out": array(r, t, c), "add": add},
                lambda x, out, add: {"out": x.sum(axis=0) + (out if add else 0.0)},
                loose=20,
                either=("out",),
            )
    for n, h, d in ((1, 1, 1), (5, 3, 7), (TILE // 6 + 1, 2, 3), (3, 1, TILE + 1)):
        yield Case(
            "row_dot",
            f"{n}x{h}x{d}",
            lambda r, t, n=n, h=h, d=d: {
                "x": array(r, t, n, h, d),
                "y": array(r, t, n, h, d),
                "out": array(r, accumulator(t), n, h),
            },
            lambda x, y, out: {"out": np.einsum("nhd,nhd->nh", x, y)},
            loose=20,
        )
    for n in SIZES:
        yield Case(
            "sum64",
            str(n),
            lambda r, t, n=n: {"x": array(r, t, n), "out": np.full(1, np.nan)},
            lambda x, out: {"out": np.array([math.fsum(x.tolist())])},
        )
    for n in SIZES:
        for count, add in ((1, False), (3, False), (3, True), (0, True), (0, False)):

            def make(r, t, n=n, count=count, add=add):
                blocks = [array(r, t, n) for _ in range(count)]
                return {"blocks": blocks, "out": array(r, accumulator(t), n), "add": add}

            def reference(blocks, out, add):
                return {"out": sum(blocks, out if add else np.zeros_like(out))}

            yield Case("ordered_sum", f"{n}-{count}-{'add' if add else 'write'}", make, reference)

    for name in ("float16", "bfloat16"):

        def halves(r, t, half=DTYPES[name]):
            blocks = [array(r, half, TILE + 1), array(r, half, TILE + 1)]
            return {"blocks": blocks, "out": array(r, t, TILE + 1), "add": True}

        yield Case(
            "ordered_sum", f"from-{name}", halves, lambda blocks, out, add: {"out": out + sum(blocks)}, kinds=WIDE
        )
    holes_of = {
        1: [()], 2: [((0, 5), (CHUNK, CHUNK + 1))], TILE // CHUNK: [((TILE - 3, TILE),)],
        TILE // CHUNK + 1: [((TILE - 3, TILE + 4), (TILE + 100, TILE + CHUNK)), ((0, TILE + CHUNK),)],
        3 * TILE // CHUNK: [((5, 3 * TILE - 1),), ((TILE, 2 * TILE),)],
    }  # fmt: skip
    for chunks, several in holes_of.items():
        for number, holes in enumerate(several):

            def reference(x, holes, out):
                x = x.copy()
                for start, stop in holes:
                    x[start:stop] = 0.0
                return {"out": (x * x).reshape(-1, CHUNK).sum(axis=1)}

            def make(r, t, chunks=chunks, holes=holes):
                return {"x": array(r, t, chunks * CHUNK), "holes": holes, "out": np.full(chunks, np.nan)}

            yield Case("square_sums", f"{chunks}-{number}", make, reference, kinds=WIDE)


def gelu_value(x: np.ndarray, tanh: bool) -> np.ndarray:
    if tanh:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_slope(x: np.ndarray, tanh: bool) -> np.ndarray:
    if not tanh:
        return 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    z = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * (1 + np.tanh(z)) + 0.5 * x / np.cosh(z) ** 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


def elementwise() -> Iterator[Case]:
    for shape, tail in (
        ((1,), (1,)),
        ((3, 5, 7), (5, 7)),
        ((3, 5, 7), (7,)),
        ((3, 5, 7), (3, 5, 7)),
        ((TILE + 1,), (TILE + 1,)),
        ((2, TILE + 1), (TILE + 1,)),
        ((3, 700, 17), (3, 700, 17)),
        ((3, 700, 17), ()),
    ):
        yield Case(
            "add",
            f"{shape}-{tail}",
            lambda r, t, shape=shape, tail=tail: {
                "x": array(r, t, *shape),
                "y": array(r, t, *tail),
                "out": array(r, t, *shape),
            },
            lambda x, y, out: {"out": x + y},
        )
        for add in (False, True):
            yield Case(
                "multiply",
                f"{shape}-{tail}-{'add' if add else 'write'}",
                lambda r, t, shape=shape, tail=tail, add=add: {
                    "x": array(r, t, *shape),
                    "y": array(r, t, *tail),
                    "out": array(r, t, *shape),
                    "add": add,
                },
                lambda x, y, out, add: {"out": x * y + (out if add else 0.0)},
                either=("out",),
            )
    yield Case(
        "multiply",
        "products-below-the-smallest-normal-number",  # of fp32, which a GPU may be told to take for 0
        lambda r, t: {
            "x": (1e-30 * r.standard_normal(65)).astype(t),
            "y": (1e-10 * r.standard_normal(65)).astype(t),
            "out": (1e-40 * r.standard_normal(65)).astype(t),
            "add": True,
        },
        lambda x, y, out, add: {"out": x * y + out},
        either=("out",),
    )
    for tanh in (True, False):
        name = "tanh" if tanh else "exact"
        for n in SIZES:
            yield Case(
                "gelu",
                f"{n}-{name}",
                lambda r, t, n=n, tanh=tanh: {"x": 3 * array(r, t, n), "y": array(r, t, n), "tanh": tanh},
                lambda x, y, tanh: {"y": gelu_value(x, tanh)},
            )

            def make(r, t, n=n, tanh=tanh):
                return {"x": 3 * array(r, t, n), "dy": array(r, t, n), "dx": array(r, t, n), "tanh": tanh}

            yield Case("gelu_backward", f"{n}-{name}", make, lambda x, dy, dx, tanh: {"dx": dy * gelu_slope(x, tanh)})
    for n, rate, first in (
        (1, 0.5, 0),
        (TILE // 2 - 1, 0.1, 7),
        (TILE // 2, 0.9, 8),
        (TILE // 2 + 1, 0.3, 1),
        (TILE + 1, 0.0, 3),
    ):

        def make(r, t, n=n, rate=rate, first=first):
            return {"x": array(r, t, n), "y": array(r, t, n), "rate": rate, "draw": DRAW._replace(first=first)}

        def reference(x, y, rate, draw):
            return {"y": x * (uniform32(draw, x.size) >= np.float32(rate)) / (1 - rate)}

        yield Case("dropout", f"{n}-{rate}", make, reference)


GROUPS = (memory, matrices, sums, elementwise, *LAYERS)
CASES = [case for group in GROUPS for case in group()]
