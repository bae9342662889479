"""Proofs of embedding.cu and shards.cu."""

from __future__ import annotations

import math

import numpy as np

from mpishard.array.backend import AdamWStep, Draw
from mpishard.array.constants import CHUNK, EXACT_WORDS
from mpishard.array.exact import from_words, units_of
from mpishard.array.numpy_ops import NumpyOps
from tests.array.kernel_proof import Check, Types, proof

WIDE = np.dtype(np.float64)


@proof("embedding", any_grid=True)
def embedding(types: Types, check: Check) -> None:
    for count, width, vocabulary in ((1, 1, 1), (9, 31, 5), (4, 300, 7), (70000, 3, 100)):
        table, tokens = check.normal(vocabulary, width), check.rng.integers(0, vocabulary, count)
        expected = table[tokens]
        if count < 100:
            outside = np.array([-1, vocabulary, 2**40, -(2**63)])
            tokens = np.concatenate([tokens, outside])
            expected = np.concatenate([expected, np.full((4, width), np.nan, types.T)])
        arguments = {"count": tokens.size, "width": width, "vocabulary": vocabulary}
        out = np.zeros(expected.shape, types.T)
        check(min(tokens.size, 512), {"out": expected}, exact=True, table=table, tokens=tokens, out=out, **arguments)


@proof("embedding_backward")
def embedding_backward(types: Types, check: Check) -> None:
    for count, width, vocabulary in ((1, 1, 1), (9, 31, 5), (4, 600, 7), (700, 3, 20), (300, 257, 2)):
        tokens = check.rng.integers(0, vocabulary, count)
        if 3 < count < 100:
            tokens[:3] = -1, vocabulary, 2**40
        dy, dtable = check.normal(count, width), check.normal(vocabulary, width, kind=types.G)
        wide = dtable.astype(types.A)
        for token, row in zip(tokens.tolist(), dy, strict=True):
            if 0 <= token < vocabulary:
                wide[token] += row.astype(types.A)
        arguments = {"tokens": tokens, "dy": dy, "count": count, "width": width, "vocabulary": vocabulary}
        check(count, {"dtable": wide.astype(types.G)}, exact=True, dtable=dtable, **arguments)


SIZES = (1, 31, 257, 1000)


@proof("accumulate", any_grid=True)
def accumulate(types: Types, check: Check) -> None:
    for n in SIZES:
        block, out = check.normal(n), check.normal(n, kind=types.A)
        block[0] = -0.0
        for add in (0, 1):
            expected = out + block.astype(types.A) if add else block.astype(types.A)
            check(-(-n // 256), {"out": expected}, exact=True, block=block, out=out, n=n, add=add)


@proof("ordered_sum", any_grid=True)
def ordered_sum(types: Types, check: Check) -> None:
    for n in SIZES:
        runs = ((0, -1, 1), (1, 0, 1), (1, -1, 1), (3, 1, 1), (5, -1, 1), (4, 3, 1), (4, 1, 2), (6, -1, 3), (4, 0, 4))
        for count, own_index, bracket in runs:
            blocks, own, start = check.normal(max(count, 1), n), check.normal(n), check.normal(n, kind=types.A)
            blocks[:, 0] = own[0] = -0.0
            sources = [own if q == own_index else blocks[q] for q in range(count)]
            for add in (0, 1):
                expected = start.copy()
                NumpyOps().ordered_sum(sources, expected, bool(add), bracket)
                arguments = {"n": n, "count": count, "own_index": own_index, "add": add, "bracket": bracket}
                given = own if own_index >= 0 else None
                grid = -(-n // 256)
                check(grid, {"out": expected}, exact=True, blocks=blocks, own=given, out=start, **arguments)


#: ranges of a flat array of three chunks: none, one element, ends and beginnings of chunks, over several, all
RANGES = ([], [(5, 6)], [(0, 512), (600, 700), (1000, 1030), (1535, 1536)], [(100, 1500)], [(0, 1536)])


@proof("square_sums", bound=1e-13)
def square_sums(types: Types, check: Check) -> None:
    for chunks in (1, 3):
        for ranges in RANGES:
            holes = [hole for hole in ranges if hole[1] <= chunks * CHUNK]
            x, expected = check.normal(chunks * CHUNK), np.zeros(chunks)
            NumpyOps().square_sums(x.astype(WIDE), holes, expected)
            pairs = np.array(holes, np.int64).reshape(-1)
            out = np.zeros(chunks)
            check(chunks, {"out": expected}, x=x, holes=pairs, out=out, chunks=chunks, holes_count=len(holes))


@proof("sum64", bound=1e-13)
def sum64(types: Types, check: Check) -> None:
    for n in (*SIZES, 70001):
        x = check.normal(n)
        expected = np.array([math.fsum(x.astype(WIDE).tolist())])
        check(1, {"out": expected}, floor=n**0.5, x=x, out=np.zeros(1), n=n)


def hard_sums(check: Check) -> list[np.ndarray]:
    """Arrays whose exponents reach over all limbs, to both ends, with both signs."""
    rng = check.rng
    spread = np.ldexp(rng.standard_normal(700), rng.integers(-340, 298, 700))
    bits = rng.integers(0, 2**52, 300, dtype=np.uint64)
    exponents = rng.integers(0, 1023 + 300, 300).astype(np.uint64)
    signs = rng.integers(0, 2, 300).astype(np.uint64)
    raw = (signs << np.uint64(63) | exponents << np.uint64(52) | bits).view(WIDE)
    below = np.nextafter(2.0**300, 0)
    ends = np.array([0.0, below, 5e-324, 2.0**-298, 2.0**-299, 1.5 * 2.0**-298, 2.0**-350, 2.0**-1022])
    return [rng.standard_normal(1), spread, raw, np.concatenate([ends, -ends]), np.full(3000, below)]


@proof("exact_sum", any_grid=True)
def exact_sum(types: Types, check: Check) -> None:
    for values in hard_sums(check):
        start = check.rng.integers(-(2**40), 2**40, EXACT_WORDS)
        start[-1] = 0
        for grid in (1, 3, -(-values.size // 256)):
            out = start.copy()
            check.library.launch("exact_sum", grid, 256, [values.ctypes.data, out.ctypes.data, np.int64(values.size)])
            assert from_words(out) == (from_words(start)[0] + units_of(values), True)
        check(-(-values.size // 256), {"out": out}, exact=True, values=values, out=start, n=values.size)
    bad = np.array([1.0, np.inf, 2.0, -np.inf, np.nan, 2.0**300, -(2.0**300), 4.0])
    out = np.zeros(EXACT_WORDS, np.int64)
    expected = out.copy()
    NumpyOps().exact_sum(np.array([7.0]), expected)
    expected[-1] = 5
    check(1, {"out": expected}, exact=True, values=bad, out=out, n=bad.size)


def adamw_arguments(check: Check, n: int, step: AdamWStep) -> dict[str, object]:
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    arrays = {name: check.normal(n, kind=check.types.A) for name in names}
    arrays["exp_avg_sq"] = abs(arrays["exp_avg_sq"])
    bounds = np.array([place for start, stop, _ in step.segments for place in (start, stop)], np.int64)
    scalars = {
        "factor": step.factor,
        "rate": step.lr / step.correction1,
        "lr": step.lr,
        "beta1": step.beta1,
        "rest1": 1.0 - step.beta1,
        "beta2": step.beta2,
        "rest2": 1.0 - step.beta2,
        "eps": step.eps,
        "root": 1.0 / math.sqrt(step.correction2),
    }
    decays = np.array([decay for _, _, decay in step.segments], WIDE)
    return {**arrays, **scalars, "bounds": bounds, "decays": decays, "segments": len(step.segments), "n": n}


def prove_adamw(types: Types, check: Check, with_cast: bool) -> None:
    for n in (1, 1536, 1000):
        for i, ranges in enumerate(RANGES):
            segments = tuple((a, min(b, n), 0.7 * (j % 2)) for j, (a, b) in enumerate(ranges) if a < n)
            t = i + 1
            # In float32 1 - 0.3 * 0.7 is another number than what float64 rounds to.
            step = AdamWStep(0.37, 0.3, 0.9, 0.999, 1e-8, 1 - 0.9**t, 1 - 0.999**t, segments)
            arguments = adamw_arguments(check, n, step)
            param, grad, exp_avg, exp_avg_sq = (
                arguments[name].copy() for name in ("param", "grad", "exp_avg", "exp_avg_sq")
            )
            cast = check.normal(n) if with_cast else None
            expected = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            if cast is not None:
                arguments["cast"] = cast.copy()
                expected["cast"] = cast
            NumpyOps().adamw(param, grad, exp_avg, exp_avg_sq, step, cast)
            check(-(-n // 256), expected, exact=True, **arguments)


@proof("adamw", any_grid=True)
def adamw(types: Types, check: Check) -> None:
    prove_adamw(types, check, with_cast=False)


@proof("adamw_cast", any_grid=True)
def adamw_cast(types: Types, check: Check) -> None:
    prove_adamw(types, check, with_cast=True)


@proof("fingerprint", any_grid=True)
def fingerprint(types: Types, check: Check) -> None:
    for n in (*SIZES, 20000):
        x = check.normal(n)
        x[0] = np.nan
        for draw in (Draw(0, 3, 0, 0), Draw(0, 2**64 - 7, 0, 2**40 + 1)):
            start = (draw.first * 0x9E3779B97F4A7C15 + draw.stream) % 2**64
            out = np.array([2**63 + 9], np.uint64)
            expected = np.array([(2**63 + 9 + NumpyOps().fingerprint(x, draw)) % 2**64], np.uint64)
            check(-(-n // 256), {"out": expected}, exact=True, x=x, out=out, n=n, start=start)
