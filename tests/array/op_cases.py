"""Each operation with arguments and a plain float64 reference: one table that every backend is run over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from philox import normal, uniform32

from mpishard.array.constants import CHUNK, IGNORE
from mpishard.array.numpy_tiles import TILE
from mpishard.array.ops import AdamWStep, Draw

DRAW = Draw(2**63 + 11, 2**64 - 5, 3, 1)
SIZES = (1, 3, CHUNK - 1, CHUNK, TILE // 2 + 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 5)
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """``make(rng, dtype)`` gives the arguments; ``reference(**arguments in float64)`` what the named arrays become.

    ``loose`` widens the tolerance of sums as long as this many elements.
    """

    op: str
    label: str
    make: Callable[[np.random.Generator, np.dtype], Arguments]
    reference: Callable[..., dict[str, np.ndarray]]
    loose: float = 1.0

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def array(rng: np.random.Generator, kind: np.dtype, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(kind)


def memory() -> Iterator[Case]:
    for n in SIZES:
        yield Case("copy", str(n), lambda r, k, n=n: {"x": array(r, k, n), "out": array(r, k, n)}, lambda x, out: {"out": x})
        yield Case(
            "fill", str(n), lambda r, k, n=n: {"out": array(r, k, n), "value": -1.5}, lambda out, value: {"out": 0 * out - 1.5}
        )
    to_half = Case(
        "copy",
        "to-float16",
        lambda r, k: {"x": array(r, k, 3, 5), "out": array(r, np.dtype(np.float16), 3, 5)},
        lambda x, out: {"out": x.astype(np.float16)},
    )
    yield to_half


def matmul_reference(a, b, out, add=False):
    return {"out": np.einsum("...nk,...km->...nm", a, b) + (out if add else 0.0)}


def linear_reference(x, weight, bias, y):
    return {"y": np.einsum("nk,km->nm", x, weight) + (0.0 if bias is None else bias)}


def matrices() -> Iterator[Case]:
    shapes = (
        ((), 1, 1, 1), ((), 3, 5, 7), ((), 17, 1, 1), ((), 1, 33, 257), ((2,), 5, 3, 7), ((2, 3), 4, 1, 5),
        ((), 700, 3, 401), ((3,), 211, 2, 703), ((), 2, 2, 131072),
    )  # fmt: skip
    for lead, n, k, m in shapes:
        for add in (False, True):

            def make(r, t, lead=lead, n=n, k=k, m=m, add=add):
                return {"a": array(r, t, *lead, n, k), "b": array(r, t, *lead, k, m), "out": array(r, t, *lead, n, m), "add": add}

            yield Case("matmul", f"{lead}{n}x{k}x{m}-{'add' if add else 'write'}", make, matmul_reference, loose=8)
    for add in (False, True):

        def make(r, t, add=add):
            """As attention calls it: the heads of one fused array, one factor transposed, every array strided."""
            qkv, out = array(r, t, 9, 3, 2, 5), array(r, t, 9, 3, 2, 5)
            p = array(r, t, 2, 4, 9)
            return {"a": p.swapaxes(1, 2), "b": qkv[:4, 0].swapaxes(0, 1), "out": out[:, 2].swapaxes(0, 1), "add": add}

        yield Case("matmul", f"strided-{'add' if add else 'write'}", make, matmul_reference, loose=8)
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
            )
    for n, h, d in ((1, 1, 1), (5, 3, 7), (TILE // 6 + 1, 2, 3), (3, 1, TILE + 1)):
        yield Case(
            "row_dot",
            f"{n}x{h}x{d}",
            lambda r, t, n=n, h=h, d=d: {"x": array(r, t, n, h, d), "y": array(r, t, n, h, d), "out": array(r, t, n, h)},
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
                return {"blocks": [array(r, t, n) for _ in range(count)], "out": array(r, t, n), "add": add}

            def reference(blocks, out, add):
                return {"out": sum(blocks, out if add else np.zeros_like(out))}

            yield Case("ordered_sum", f"{n}-{count}-{'add' if add else 'write'}", make, reference)

    def halves(r, t):
        half = np.dtype(np.float16)
        return {"blocks": [array(r, half, TILE + 1), array(r, half, TILE + 1)], "out": array(r, t, TILE + 1), "add": True}

    yield Case("ordered_sum", "from-float16", halves, lambda blocks, out, add: {"out": out + blocks[0] + blocks[1]})
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

            yield Case("square_sums", f"{chunks}-{number}", make, reference)


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
    for shape, tail in (((1,), (1,)), ((3, 5, 7), (5, 7)), ((3, 5, 7), (7,)), ((3, 5, 7), (3, 5, 7)), ((TILE + 1,), (TILE + 1,))):
        yield Case(
            "add",
            f"{shape}-{tail}",
            lambda r, t, shape=shape, tail=tail: {"x": array(r, t, *shape), "y": array(r, t, *tail), "out": array(r, t, *shape)},
            lambda x, y, out: {"out": x + y},
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
    for n, rate, first in ((1, 0.5, 0), (TILE // 2 - 1, 0.1, 7), (TILE // 2, 0.9, 8), (TILE // 2 + 1, 0.3, 1), (TILE + 1, 0.0, 3)):

        def make(r, t, n=n, rate=rate, first=first):
            return {"x": array(r, t, n), "y": array(r, t, n), "rate": rate, "draw": DRAW._replace(first=first)}

        def reference(x, y, rate, draw):
            return {"y": x * (uniform32(draw, x.size) >= np.float32(rate)) / (1 - rate)}

        yield Case("dropout", f"{n}-{rate}", make, reference)


def layernorm_reference(x, weight, bias, y, mean, rstd, eps):
    center = x.mean(axis=1)
    inverse = 1 / np.sqrt(((x - center[:, None]) ** 2).mean(axis=1) + eps)
    return {"mean": center, "rstd": inverse, "y": (x - center[:, None]) * inverse[:, None] * weight + bias}


def layernorm_backward_reference(x, weight, mean, rstd, dy, dx, dweight, dbias, add_weight, add_bias):
    hat, g = (x - mean[:, None]) * rstd[:, None], dy * weight
    found = {"dx": rstd[:, None] * (g - g.mean(axis=1, keepdims=True) - hat * (g * hat).mean(axis=1, keepdims=True))}
    if dweight is not None:
        found["dweight"] = (dy * hat).sum(axis=0) + (dweight if add_weight else 0.0)
    if dbias is not None:
        found["dbias"] = dy.sum(axis=0) + (dbias if add_bias else 0.0)
    return found


def norms() -> Iterator[Case]:
    for n, c in ((1, 1), (5, 7), (1, 33), (TILE, 1), (TILE + 1, 1), (TILE // 3 + 1, 3), (3, TILE), (2, TILE + 1)):

        def forward(r, t, n=n, c=c):
            x = {"x": 3 + array(r, t, n, c), "weight": array(r, t, c), "bias": array(r, t, c)}
            return x | {"y": array(r, t, n, c), "mean": array(r, t, n), "rstd": array(r, t, n), "eps": 1e-5}

        yield Case("layernorm", f"{n}x{c}", forward, layernorm_reference, loose=8)
        for weight, bias, add_weight, add_bias in ((1, 1, 0, 0), (1, 1, 1, 0), (1, 1, 0, 1), (0, 1, 0, 1), (1, 0, 1, 0), (0, 0, 0, 0)):

            def backward(r, t, n=n, c=c, weight=weight, bias=bias, add_weight=add_weight, add_bias=add_bias):
                x = array(r, t, n, c)
                spread = (1 / np.sqrt(x.astype(float).var(axis=1) + 1e-5)).astype(t)
                return {
                    "x": x, "weight": array(r, t, c), "mean": x.astype(float).mean(axis=1).astype(t), "rstd": spread,
                    "dy": array(r, t, n, c), "dx": array(r, t, n, c),
                    "dweight": array(r, t, c) if weight else None, "dbias": array(r, t, c) if bias else None,
                    "add_weight": bool(add_weight), "add_bias": bool(add_bias),
                }  # fmt: skip

            label = f"{n}x{c}-{weight}{bias}{add_weight}{add_bias}"
            yield Case("layernorm_backward", label, backward, layernorm_backward_reference, loose=40)


def embedding_backward_reference(tokens, dy, dtable, add):
    table = dtable.copy() if add else np.zeros_like(dtable)
    for n, token in enumerate(tokens.tolist()):
        table[token] = table[token] + dy[n]
    return {"dtable": table}


def embeddings() -> Iterator[Case]:
    for n, v, c in ((1, 1, 1), (9, 4, 5), (40, 3, 1), (1, 100, 7)):
        yield Case(
            "embedding",
            f"{n}-{v}x{c}",
            lambda r, t, n=n, v=v, c=c: {"table": array(r, t, v, c), "tokens": r.integers(0, v, n), "out": array(r, t, n, c)},
            lambda table, tokens, out: {"out": np.stack([table[token] for token in tokens])},
        )
        for add in (False, True):

            def make(r, t, n=n, v=v, c=c, add=add):
                return {"tokens": r.integers(0, v, n), "dy": array(r, t, n, c), "dtable": array(r, t, v, c), "add": add}

            yield Case("embedding_backward", f"{n}-{v}x{c}-{'add' if add else 'write'}", make, embedding_backward_reference, 4)


def causal_reference(scores_, lse, first_row, scale, replay):
    heads, rows, _ = scores_.shape
    p, logs = np.zeros_like(scores_), lse.copy()
    for h in range(heads):
        for r in range(rows):
            seen = scale * scores_[h, r, : first_row + r + 1]
            if not replay:
                logs[h, r] = seen.max() + math.log(np.exp(seen - seen.max()).sum())
            p[h, r, : seen.size] = np.exp(seen - logs[h, r])
    return {"scores_": p} if replay else {"scores_": p, "lse": logs}


def entropy_reference(logits_, targets, losses, scale, gradient):
    found, slopes = np.zeros_like(losses), np.zeros_like(logits_)
    for n, target in enumerate(targets.tolist()):
        if target == IGNORE:
            continue
        z = logits_[n] - logits_[n].max()
        found[n] = math.log(np.exp(z).sum()) - z[target]
        slopes[n] = scale * np.exp(z) / np.exp(z).sum()
        slopes[n, target] -= scale
    return {"losses": found, "logits_": slopes if gradient else logits_ * np.nan}


def attention_and_loss() -> Iterator[Case]:
    for heads, rows, first in ((1, 1, 0), (1, 1, 6), (3, 5, 0), (3, 5, 4), (2, 64, 0), (2, 3, 64)):
        for replay in (False, True):

            def make(r, t, heads=heads, rows=rows, first=first, replay=replay):
                scores, lse = array(r, t, heads, rows, first + rows), array(r, t, heads, rows)
                if replay:
                    lse[...] = causal_reference(scores.astype(float), lse.astype(float), first, 0.7, False)["lse"]
                return {"scores_": scores, "lse": lse, "first_row": first, "scale": 0.7, "replay": replay}

            yield Case("causal_softmax", f"{heads}-{rows}-{first}-{'replay' if replay else 'first'}", make, causal_reference, 4)

        def make(r, t, heads=heads, rows=rows, first=first):
            shape = (heads, rows, first + rows)
            return {"p": abs(array(r, t, *shape)), "dp_": array(r, t, *shape), "delta": array(r, t, *shape[:2]), "scale": 0.7}

        yield Case(
            "softmax_backward",
            f"{heads}-{rows}-{first}",
            make,
            lambda p, dp_, delta, scale: {"dp_": p * (dp_ - delta[:, :, None]) * scale},
        )
    for n, v in ((1, 1), (7, 5), (5, 257), (4097, 3)):
        for gradient in (True, False):

            def make(r, t, n=n, v=v, gradient=gradient):
                targets = r.integers(0, v, n)
                targets[1::3] = IGNORE
                return {
                    "logits_": 4 * array(r, t, n, v), "targets": targets, "losses": array(r, t, n), "scale": 0.125,
                    "gradient": gradient,
                }  # fmt: skip

            yield Case("cross_entropy", f"{n}x{v}-{'gradient' if gradient else 'loss'}", make, entropy_reference, 4)


def adamw_reference(param, grad, exp_avg, exp_avg_sq, step):
    p, m, v = param.copy(), exp_avg.copy(), exp_avg_sq.copy()
    for start, stop, decay in step.segments:
        s = slice(start, stop)
        g = grad[s] * step.factor
        m[s] = step.beta1 * m[s] + (1 - step.beta1) * g
        v[s] = step.beta2 * v[s] + (1 - step.beta2) * g * g
        p[s] = p[s] - step.lr * decay * p[s]
        p[s] -= step.lr * (m[s] / step.correction1) / (np.sqrt(v[s] / step.correction2) + step.eps)
    return {"param": p, "exp_avg": m, "exp_avg_sq": v}


def shards() -> Iterator[Case]:
    segments = {1: ((0, 1, 0.1),), 700: ((0, 3, 0.1), (16, 17, 0.0), (32, 500, 0.0)), 2 * TILE + 9: ((3, 2 * TILE + 5, 0.1),)}
    for n, parts in segments.items():

        def make(r, t, n=n, parts=parts):
            step = AdamWStep(0.25, 1e-2, 0.9, 0.95, 1e-8, 1 - 0.9**3, 1 - 0.95**3, parts)
            moments = {"exp_avg": array(r, t, n), "exp_avg_sq": abs(array(r, t, n))}
            return {"param": array(r, t, n), "grad": array(r, t, n)} | moments | {"step": step}

        yield Case("adamw", str(n), make, adamw_reference, loose=4)
    for n, first in ((1, 0), (1, 1), (7, 3), (TILE + 1, 0), (TILE, 1)):
        yield Case(
            "normal",
            f"{n}-{first}",
            lambda r, t, n=n, first=first: {"out": array(r, t, n), "draw": DRAW._replace(first=first), "std": 0.02},
            lambda out, draw, std: {"out": std * normal(draw, out.size)},
        )
    yield Case("fingerprint", "7", lambda r, t: {"x": array(r, t, 7), "draw": DRAW}, lambda x, draw: {})


GROUPS = (memory, matrices, sums, elementwise, norms, embeddings, attention_and_loss, shards)
CASES = [case for group in GROUPS for case in group()]
