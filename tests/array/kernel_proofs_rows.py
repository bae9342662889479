"""Proofs of rows.cu: references are the NumPy backend's in float64."""

from __future__ import annotations

import numpy as np

from mpishard.array.constants import IGNORE
from mpishard.array.numpy_ops import NumpyOps
from tests.array.kernel_proof import Check, Types, proof

SHAPES = ((1, 1), (3, 31), (5, 256), (2, 1000))
WIDE = np.dtype(np.float64)


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(WIDE) for array in arrays]


@proof("layernorm", bound=1e-6)
def layernorm(types: Types, check: Check) -> None:
    for rows, width in SHAPES:
        for center in (0.0, 30.0):
            x = (check.normal(rows, width).astype(WIDE) * 2 + center).astype(types.T)
            weight, bias = check.normal(width), check.normal(width)
            y, mean, rstd = np.zeros((rows, width)), np.zeros(rows), np.zeros(rows)
            NumpyOps().layernorm(*wide(x, weight, bias), y, mean, rstd, 1e-5)
            expected = {"y": y, "mean": mean, "rstd": rstd}
            sizes = {"rows": rows, "width": width, "eps": 1e-5}
            stats = {"mean": np.zeros(rows, types.A), "rstd": np.zeros(rows, types.A)}
            # Where width is 1 the difference to the mean is 0, and what is left of it counts sqrt(1 / eps) times.
            floor = (1 + abs(center)) * (300.0 if width == 1 else 1.0)
            arguments = {"x": x, "weight": weight, "bias": bias, **stats, **sizes}
            check(rows, expected, floor=floor, y=np.zeros_like(x), **arguments)
            check(rows, expected, floor=floor, y=x, **arguments)  # in place


def normalised(check: Check, rows: int, width: int) -> tuple[np.ndarray, ...]:
    """Return x, weight, mean, rstd, dy."""
    x, weight, dy = check.normal(rows, width), check.normal(width), check.normal(rows, width)
    mean = x.astype(WIDE).mean(axis=1).astype(check.types.A)
    rstd = (1 / np.sqrt(x.astype(WIDE).var(axis=1) + 0.01)).astype(check.types.A)
    return x, weight, mean, rstd, dy


@proof("layernorm_backward_input", bound=5e-7)
def layernorm_backward_input(types: Types, check: Check) -> None:
    for rows, width in SHAPES:
        x, weight, mean, rstd, dy = normalised(check, rows, width)
        dx = np.zeros((rows, width))
        NumpyOps().layernorm_backward(*wide(x, weight, mean, rstd, dy), dx, None, None)
        arguments = {"x": x, "weight": weight, "mean": mean, "rstd": rstd, "rows": rows, "width": width}
        check(rows, {"dx": dx}, floor=10.0, dy=dy, dx=np.zeros_like(dy), **arguments)
        check(rows, {"dx": dx}, floor=10.0, dy=dy, dx=dy, **arguments)  # in place


#: rows, width, rows of a part
PARTS = ((1, 1, 1), (37, 31, 10), (64, 300, 16), (70000, 3, 9000))


def in_parts(terms: np.ndarray, rows_per_part: int) -> np.ndarray:
    starts = range(0, len(terms), rows_per_part)
    return np.stack([terms[start : start + rows_per_part].sum(axis=0) for start in starts])


@proof("layernorm_backward_params", bound=1e-5)
def layernorm_backward_params(types: Types, check: Check) -> None:
    for rows, width, rows_per_part in PARTS:
        x, _, mean, rstd, dy = normalised(check, rows, width)
        wide_x, wide_mean, wide_rstd, wide_dy = wide(x, mean, rstd, dy)
        xhat = (wide_x - wide_mean[:, None]) * wide_rstd[:, None]
        expected = {"weights": in_parts(wide_dy * xhat, rows_per_part), "biases": in_parts(wide_dy, rows_per_part)}
        sums = {name: np.zeros(array.shape, types.A) for name, array in expected.items()}
        grid = len(expected["biases"]) * -(-width // 256)
        sizes = {"rows": rows, "width": width, "rows_per_part": rows_per_part}
        check(grid, expected, floor=rows_per_part**0.5, x=x, mean=mean, rstd=rstd, dy=dy, **sums, **sizes)


@proof("column_sum_parts", bound=1e-5)
def column_sum_parts(types: Types, check: Check) -> None:
    for rows, width, rows_per_part in PARTS:
        x = check.normal(rows, width)
        expected = in_parts(x.astype(WIDE), rows_per_part)
        sizes = {"rows": rows, "width": width, "rows_per_part": rows_per_part}
        grid = len(expected) * -(-width // 256)
        sums = np.zeros(expected.shape, types.A)
        check(grid, {"sums": expected}, floor=rows_per_part**0.5, x=x, sums=sums, **sizes)


@proof("combine_parts", any_grid=True)
def combine_parts(types: Types, check: Check) -> None:
    for parts, width in ((1, 1), (3, 31), (8, 1000)):
        sums, out = check.normal(parts, width, kind=types.A), check.normal(width, kind=types.G)
        total = np.zeros(width, types.A)
        for part in sums:
            total += part
        for add in (0, 1):
            expected = (out.astype(types.A) + total if add else total).astype(types.G)
            grid = -(-width // 256)
            check(grid, {"out": expected}, exact=True, sums=sums, out=out, width=width, parts=parts, add=add)


@proof("row_dot", bound=1e-6)
def row_dot(types: Types, check: Check) -> None:
    for rows, heads, size in ((1, 1, 1), (5, 3, 31), (7, 2, 64), (3, 1, 1000), (70001, 1, 2)):
        x = check.normal(rows, heads, size)
        y = check.normal(heads, rows, size)
        expected = (x.astype(WIDE).transpose(1, 0, 2) * y.astype(WIDE)).sum(axis=-1)
        out = np.zeros((heads, rows), types.A)
        strides = {"xs0": heads * size, "xs1": size, "xs2": 1, "ys0": size, "ys1": rows * size, "ys2": 1}
        arguments = {"rows": rows, "heads": heads, "size": size, "os0": 1, "os1": rows, **strides}
        grid = -(-rows * heads // 8)
        check(grid, {"out": expected}, floor=size**0.5, x=x, y=y, out=out, **arguments)


#: heads, rows, first row
ATTENTION = ((1, 1, 0), (2, 5, 0), (3, 4, 29), (1, 3, 700))


@proof("causal_softmax", bound=3e-6)
def causal_softmax(types: Types, check: Check) -> None:
    scale = 0.3
    for heads, rows, first_row in ATTENTION:
        keys = first_row + rows
        scores = check.normal(heads, rows, keys)
        scores[..., 0] *= 30
        # The last axis lies in longer rows, and the rows of a head in a longer block, of which nothing may change.
        room = check.normal(heads, rows + 1, keys + 3)
        room[:, :rows, :keys] = scores
        lse_room = check.normal(heads, rows + 2, kind=types.A)
        strides = {"s0": (rows + 1) * (keys + 3), "s1": keys + 3, "ls0": rows + 2, "ls1": 1}
        sizes = {"heads": heads, "rows": rows, "keys": keys, "first_row": first_row, "scale": scale}
        p, lse = scores.astype(WIDE), np.zeros((heads, rows))
        NumpyOps().causal_softmax(p, lse, first_row, scale)
        all_p, all_lse = room.astype(WIDE), lse_room.astype(WIDE)
        all_p[:, :rows, :keys], all_lse[:, :rows] = p, lse
        expected = {"scores": all_p, "lse": all_lse}
        check(heads * rows, expected, floor=0.1, scores=room, lse=lse_room, replay=0, **sizes, **strides)

        rounded = lse.astype(types.A)
        p = scores.astype(WIDE)
        NumpyOps().causal_softmax(p, rounded.astype(WIDE), first_row, scale, replay=True)
        all_p[:, :rows, :keys], all_lse[:, :rows] = p, rounded
        given = lse_room.copy()
        given[:, :rows] = rounded
        check(heads * rows, expected, floor=0.1, scores=room, lse=given, replay=1, **sizes, **strides)


@proof("softmax_backward", bound=5e-7)
def softmax_backward(types: Types, check: Check) -> None:
    for heads, rows, keys in ((1, 1, 1), (2, 5, 31), (1, 3, 700), (2, 35000, 1)):
        p, dp = abs(check.normal(heads, rows, keys)), check.normal(heads, rows, keys)
        delta = check.normal(heads, rows, kind=types.A)
        expected = dp.astype(WIDE)
        NumpyOps().softmax_backward(p.astype(WIDE), expected, delta.astype(WIDE), 0.3)
        strides = {"ps0": rows * keys, "ps1": keys, "dps0": rows * keys, "dps1": keys, "ds0": rows, "ds1": 1}
        arguments = {"heads": heads, "rows": rows, "keys": keys, "scale": 0.3, **strides}
        check(heads * rows, {"dp": expected}, p=p, dp=dp, delta=delta, **arguments)


@proof("cross_entropy", bound=5e-7)
def cross_entropy(types: Types, check: Check) -> None:
    for rows, vocabulary in ((1, 1), (6, 31), (3, 257), (2, 70001)):
        logits = (check.normal(rows, vocabulary).astype(WIDE) * 5).astype(types.T)
        targets = check.rng.integers(0, vocabulary, rows)
        if rows > 1:
            targets[:2] = IGNORE, vocabulary - 1
        arguments = {"targets": targets, "rows": rows, "vocabulary": vocabulary, "scale": 0.25}
        gradient, losses = logits.astype(WIDE), np.zeros(rows)
        NumpyOps().cross_entropy(gradient, targets, losses, 0.25, True)
        out = np.zeros(rows, types.A)
        expected = {"logits": gradient, "losses": losses}
        check(rows, expected, logits=logits, losses=out, gradient=1, **arguments)
        # Without a gradient the logits are read alone.
        check(rows, {**expected, "logits": logits.astype(WIDE)}, logits=logits, losses=out, gradient=0, **arguments)
        if vocabulary < 1000:
            for wrong in (-1, vocabulary, -101, 2**40, -(2**63)):
                bad = {**arguments, "targets": np.where(np.arange(rows) == rows - 1, wrong, targets)}
                nan = {name: array.copy() for name, array in expected.items()}
                for array in nan.values():
                    array[-1] = np.nan
                check(rows, nan, logits=logits, losses=out, gradient=1, **bad)
