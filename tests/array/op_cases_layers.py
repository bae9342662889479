"""Cases of the operations that norms, embeddings, attention, losses, optimiser and initial values use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from mpishard.array.constants import EXACT_WORDS, IGNORE
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.exact import FRACTION, from_words
from mpishard.array.numpy_tiles import TILE
from mpishard.array.ops import AdamWStep, Draw
from tests.array.op_case import ALL, WIDE, Case, array
from tests.array.philox import normal

DRAW = Draw(2**63 + 11, 2**64 - 5, 3, 1)


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
            wide = accumulator(t)
            return x | {"y": array(r, t, n, c), "mean": array(r, wide, n), "rstd": array(r, wide, n), "eps": 1e-5}

        yield Case("layernorm", f"{n}x{c}", forward, layernorm_reference, loose=8)
        for weight, bias, add_weight, add_bias in (
            (1, 1, 0, 0),
            (1, 1, 1, 0),
            (1, 1, 0, 1),
            (0, 1, 0, 1),
            (1, 0, 1, 0),
            (0, 0, 0, 0),
        ):

            def backward(r, t, n=n, c=c, weight=weight, bias=bias, add_weight=add_weight, add_bias=add_bias):
                x, wide = array(r, t, n, c), accumulator(t)
                spread = (1 / np.sqrt(x.astype(float).var(axis=1) + 1e-5)).astype(wide)
                return {
                    "x": x, "weight": array(r, t, c), "mean": x.astype(float).mean(axis=1).astype(wide), "rstd": spread,
                    "dy": array(r, t, n, c), "dx": array(r, t, n, c),
                    "dweight": array(r, t, c) if weight else None, "dbias": array(r, t, c) if bias else None,
                    "add_weight": bool(add_weight), "add_bias": bool(add_bias),
                }  # fmt: skip

            label = f"{n}x{c}-{weight}{bias}{add_weight}{add_bias}"
            either = ("dweight", "dbias")
            yield Case("layernorm_backward", label, backward, layernorm_backward_reference, 40, either=either)


def embedding_backward_reference(tokens, dy, dtable, add):
    table = dtable.copy() if add else np.zeros_like(dtable)
    for n, token in enumerate(tokens.tolist()):
        table[token] = table[token] + dy[n]
    return {"dtable": table}


def embeddings() -> Iterator[Case]:
    for n, v, c in ((1, 1, 1), (9, 4, 5), (2049, 3, 1), (1, 100, 7)):
        yield Case(
            "embedding",
            f"{n}-{v}x{c}",
            lambda r, t, n=n, v=v, c=c: {
                "table": array(r, t, v, c),
                "tokens": r.integers(0, v, n),
                "out": array(r, t, n, c),
            },
            lambda table, tokens, out: {"out": np.stack([table[token] for token in tokens])},
        )
        for add in (False, True):

            def make(r, t, n=n, v=v, c=c, add=add):
                return {"tokens": r.integers(0, v, n), "dy": array(r, t, n, c), "dtable": array(r, t, v, c), "add": add}

            label = f"{n}-{v}x{c}-{'add' if add else 'write'}"
            yield Case("embedding_backward", label, make, embedding_backward_reference, 4, either=("dtable",))


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
                scores, lse = array(r, t, heads, rows, first + rows), array(r, accumulator(t), heads, rows)
                if replay:
                    lse[...] = causal_reference(scores.astype(float), lse.astype(float), first, 0.7, False)["lse"]
                return {"scores_": scores, "lse": lse, "first_row": first, "scale": 0.7, "replay": replay}

            yield Case(
                "causal_softmax", f"{heads}-{rows}-{first}-{'replay' if replay else 'first'}", make, causal_reference, 4
            )

        def make(r, t, heads=heads, rows=rows, first=first):
            shape = (heads, rows, first + rows)
            return {
                "p": abs(array(r, t, *shape)),
                "dp_": array(r, t, *shape),
                "delta": array(r, accumulator(t), *shape[:2]),
                "scale": 0.7,
            }

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
                    "logits_": 4 * array(r, t, n, v), "targets": targets, "losses": array(r, accumulator(t), n),
                    "scale": 0.125, "gradient": gradient,
                }  # fmt: skip

            yield Case("cross_entropy", f"{n}x{v}-{'gradient' if gradient else 'loss'}", make, entropy_reference, 4)


def adamw_reference(param, grad, exp_avg, exp_avg_sq, step, cast):
    p, m, v = param.copy(), exp_avg.copy(), exp_avg_sq.copy()
    narrow = {} if cast is None else {"cast": cast.copy()}
    for start, stop, decay in step.segments:
        s = slice(start, stop)
        g = grad[s] * step.factor
        m[s] = step.beta1 * m[s] + (1 - step.beta1) * g
        v[s] = step.beta2 * v[s] + (1 - step.beta2) * g * g
        p[s] = p[s] - step.lr * decay * p[s]
        p[s] -= step.lr * (m[s] / step.correction1) / (np.sqrt(v[s] / step.correction2) + step.eps)
        for copied in narrow.values():
            copied[s] = p[s]
    return {"param": p, "exp_avg": m, "exp_avg_sq": v} | narrow


def exact_value(words: np.ndarray) -> np.ndarray:
    """The sum and whether something was not finite; a sum with something that is not is not compared."""
    units, finite = from_words(words)
    return np.array([units / (1 << FRACTION) if finite else np.nan, not finite], float)


def shards() -> Iterator[Case]:
    segments = {
        1: ((0, 1, 0.1),),
        700: ((0, 3, 0.1), (16, 17, 0.0), (32, 500, 0.0)),
        2 * TILE + 9: ((3, 2 * TILE + 5, 0.1),),
    }
    for n, cast in itertools.product(segments, (None, *ALL)):

        def make(r, t, n=n, parts=segments[n], cast=cast):
            step = AdamWStep(0.25, 1e-2, 0.9, 0.95, 1e-8, 1 - 0.9**3, 1 - 0.95**3, parts)
            moments = {"exp_avg": array(r, t, n), "exp_avg_sq": abs(array(r, t, n))}
            rest = {"step": step, "cast": None if cast is None else array(r, DTYPES[cast], n)}
            return {"param": array(r, t, n), "grad": array(r, t, n)} | moments | rest

        yield Case("adamw", f"{n}-{cast}", make, adamw_reference, 4, WIDE)
    for n, first in ((1, 0), (1, 1), (7, 3), (TILE + 1, 0), (TILE, 1)):
        yield Case(
            "normal",
            f"{n}-{first}",
            lambda r, t, n=n, first=first: {"out": array(r, t, n), "draw": DRAW._replace(first=first), "std": 0.02},
            lambda out, draw, std: {"out": std * normal(draw, out.size)},
            kinds=WIDE,
        )
    for n, before in ((1, 0), (7, 1), (4097, 300)):

        def make(r, t, n=n, before=before):
            out = np.zeros(EXACT_WORDS, np.int64)
            out[:20] = r.integers(-before, before + 1, 20) << 32  # not carried
            return {"values": r.standard_normal(n) * 10.0 ** r.uniform(-20, 20, n), "out": out}

        def reference(values, out):
            return {"out": np.array([math.fsum([*values.tolist(), float(exact_value(out)[0])]), 0])}

        yield Case("exact_sum", f"{n}-{before}", make, reference, kinds=("float64",), read=exact_value)

    def unsummable(r, t):
        return {"values": np.array([1.0, np.inf, np.nan]), "out": np.zeros(EXACT_WORDS, np.int64)}

    yield Case(
        "exact_sum",
        "not-finite",
        unsummable,
        lambda values, out: {"out": np.array([np.nan, 1])},
        kinds=("float64",),
        read=exact_value,
    )
    yield Case("fingerprint", "7", lambda r, t: {"x": array(r, t, 7), "draw": DRAW}, lambda x, draw: {})


LAYERS = (norms, embeddings, attention_and_loss, shards)
