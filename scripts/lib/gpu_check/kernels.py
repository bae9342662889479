"""Each kernel at a size of training: the bytes that it must move, a second, as a fraction of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpu_check.arrays import Clock, device_array
from gpu_check.rates import normal_values, rates
from gpu_check.report import Report, Task
from mpishard.array.constants import CHUNK, EXACT_WORDS
from mpishard.array.cupy_ops import CupyOps
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.ops import AdamWStep, Draw

__all__ = ["check"]

#: Rows (tokens), features, heads, positions, vocabulary, rows of logits, elements of a shard. Nothing fits the caches.
FULL = {"N": 32768, "C": 1600, "H": 64, "T": 1024, "V": 50257, "L": 4096, "P": 2**26}
SMALL = {"N": 64, "C": 64, "H": 2, "T": 32, "V": 97, "L": 64, "P": 2**13}

#: (kernel, what it works on, the bytes that it must move, the call)
Row = tuple[str, str, int, Callable[[], Any]]


def check(task: Task, report: Report) -> None:
    ops = CupyOps(task.device)
    best = rates(task, ops)["copy"]
    sizes = task.size(FULL, SMALL)
    while sizes["N"] > 1024 and ops.room < 40 * sizes["N"] * sizes["C"] * 4:
        sizes = {name: n // 2 if name in "NHLP" else n for name, n in sizes.items()}
    clock = Clock(ops)
    for kind in ("bfloat16", "float16", "float32"):
        table = report.table(
            f"Kernels in {kind}",
            *("kernel", "on", "microseconds", "GB/s", "fraction of copy"),
            note=f"Fraction of {best / 1e9:,.0f} GB/s. Bytes: what the operation must read and write once, though the "
            "kernel may move more. Of causal arrays the lower half counts where only that must be read.",
        )
        for group in (_elementwise, _rows, _attention, _loss, _shards):
            for name, on, nbytes, call in group(ops, sizes, kind):
                seconds = clock.best(call, task.size(20, 1))
                fraction = nbytes / seconds / best
                table.row(name, on, seconds * 1e6, nbytes / seconds / 1e9, fraction)
                report.figures.setdefault(kind, {})[name] = fraction


def _on(*shape: int) -> str:
    return " x ".join(map(str, shape))


def _elementwise(ops: Any, sizes: dict[str, int], kind: str) -> Iterator[Row]:
    n, c = sizes["N"], sizes["C"]
    dtype = DTYPES[kind]
    x, y, out = (device_array(ops, (n, c), dtype, normal_values()) for _ in range(3))
    row = device_array(ops, (c,), dtype, normal_values())
    other = DTYPES["bfloat16" if kind == "float32" else "float32"]
    cast = device_array(ops, (n, c), other)
    on, size = _on(n, c), x.nbytes
    draw = Draw(1, 2, 3, 0)
    yield f"copy to {other}", on, size + cast.nbytes, lambda: ops.copy(x, cast)
    yield "fill", on, size, lambda: ops.fill(out, 1.5)
    yield "add", on, 3 * size, lambda: ops.add(x, y, out)
    yield "add of a row", on, 2 * size, lambda: ops.add(x, row, out)
    yield "multiply", on, 3 * size, lambda: ops.multiply(x, y, out)
    yield "gelu", on, 2 * size, lambda: ops.gelu(x, out)
    yield "gelu_backward", on, 3 * size, lambda: ops.gelu_backward(x, y, out)
    yield "dropout", on, 2 * size, lambda: ops.dropout(x, out, 0.1, draw)


def _rows(ops: Any, sizes: dict[str, int], kind: str) -> Iterator[Row]:
    n, c, v = sizes["N"], sizes["C"], sizes["V"]
    dtype, wide = DTYPES[kind], accumulator(DTYPES[kind])
    x, dy, out = (device_array(ops, (n, c), dtype, normal_values()) for _ in range(3))
    weight, bias, dweight, dbias = (device_array(ops, (c,), dtype, normal_values()) for _ in range(4))
    mean, rstd = (device_array(ops, (n,), wide, normal_values()) for _ in range(2))
    on, size = _on(n, c), x.nbytes
    norm = (weight, bias, out, mean, rstd, 1e-5)
    yield "layernorm", on, 2 * size, lambda: ops.layernorm(x, *norm)
    back = (weight, mean, rstd, dy, out)
    yield "layernorm_backward", on, 3 * size, lambda: ops.layernorm_backward(x, *back, dweight, dbias)
    yield "column_sum", on, size, lambda: ops.column_sum(x, dbias)
    heads = c // 64
    dots = device_array(ops, (n, heads), wide)
    yield "row_dot", on, 2 * size, lambda: ops.row_dot(x.reshape(n, heads, 64), dy.reshape(n, heads, 64), dots)
    tokens = device_array(ops, (n,), np.int64)
    ops.upload(np.random.default_rng(4).integers(0, v, n), tokens)
    table = device_array(ops, (v, c), dtype, normal_values())
    gradient = device_array(ops, (v, c), wide)
    yield "embedding", on, 2 * size, lambda: ops.embedding(table, tokens, out)
    total = size + gradient.nbytes
    yield "embedding_backward", f"{on} into {_on(v, c)}", total, lambda: ops.embedding_backward(tokens, dy, gradient)


def _attention(ops: Any, sizes: dict[str, int], kind: str) -> Iterator[Row]:
    h, t = sizes["H"], sizes["T"]
    dtype, wide = DTYPES[kind], accumulator(DTYPES[kind])
    scores, ds = (device_array(ops, (h, t, t), dtype, normal_values()) for _ in range(2))
    lse, delta = (device_array(ops, (h, t), wide, normal_values()) for _ in range(2))
    on, size = _on(h, t, t), scores.nbytes
    yield "causal_softmax", on, size // 2 + size, lambda: ops.causal_softmax(scores, lse, 0, 0.125)
    yield "causal_softmax again", on, size // 2 + size, lambda: ops.causal_softmax(scores, lse, 0, 0.125, replay=True)
    yield "softmax_backward", on, 2 * size, lambda: ops.softmax_backward(scores, ds, delta, 0.125)


def _loss(ops: Any, sizes: dict[str, int], kind: str) -> Iterator[Row]:
    rows, v = sizes["L"], sizes["V"]
    dtype, wide = DTYPES[kind], accumulator(DTYPES[kind])
    logits = device_array(ops, (rows, v), dtype, normal_values(65521))
    losses, targets = device_array(ops, (rows,), wide), device_array(ops, (rows,), np.int64)
    ops.upload(np.random.default_rng(4).integers(0, v, rows), targets)
    rest = (targets, losses, 1.0, True)
    yield "cross_entropy", _on(rows, v), 2 * logits.nbytes, lambda: ops.cross_entropy(logits, *rest)
    total = device_array(ops, (1,), np.float64)
    many = device_array(ops, (sizes["N"] * sizes["C"],), dtype, normal_values())
    yield "sum64", _on(many.size), many.nbytes, lambda: ops.sum64(many, total)


def _shards(ops: Any, sizes: dict[str, int], kind: str) -> Iterator[Row]:
    n = sizes["P"]
    dtype, single = DTYPES[kind], np.dtype(np.float32)
    values = normal_values()
    param, grad, first, out = (device_array(ops, (n,), single, values) for _ in range(4))
    second = device_array(ops, (n,), single, abs(values))
    blocks = list(device_array(ops, (4, n // 4), dtype, values))
    own = out[: n // 4]
    on, size = _on(n), param.nbytes
    moved = 4 * blocks[0].nbytes + own.nbytes
    yield "ordered_sum of 4", _on(4, n // 4), moved, lambda: ops.ordered_sum(blocks, own, False)
    step = AdamWStep(0.5, 1e-4, 0.9, 0.95, 1e-8, 0.1, 0.05, ((0, n, 0.1),))
    if kind == "float32":
        sums, words = device_array(ops, (n // CHUNK,), np.float64), device_array(ops, (EXACT_WORDS,), np.int64)
        yield "square_sums", on, size, lambda: ops.square_sums(grad, (), sums)
        ops.fill(words, 0)
        yield "exact_sum", _on(sums.size), sums.nbytes, lambda: ops.exact_sum(sums, words)
        yield "adamw", on, 7 * size, lambda: ops.adamw(param, grad, first, second, step)
    else:
        cast = device_array(ops, (n,), dtype)
        total = 7 * size + cast.nbytes
        yield "adamw with cast", on, total, lambda: ops.adamw(param, grad, first, second, step, cast)
