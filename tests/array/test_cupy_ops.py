"""Every operation over its table of cases, on CuPy's operations and a stand-in for CuPy."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from mpishard.array.backend import AdamWStep, Backend, Draw
from mpishard.array.cupy_ops import CupyOps, parts_of
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.ops import Ops
from mpishard.errors import ConfigError, ShapeError
from tests.array.cupy_case import from_device, on_device, standing_in
from tests.array.op_case import Case
from tests.array.test_ops import (
    ROUNDING,
    RUNS,
    SMALLEST,
    TOLERANCE,
    arguments_of,
    arrays_of,
    callables,
    public,
    run_name,
    widened,
)

BF16, F16, F32, F64, I64 = (DTYPES[name] for name in ("bfloat16", "float16", "float32", "float64", "int64"))
KINDS = ("float32", "float64", "bfloat16", "float16")
ON_GPU = [run for run in RUNS if run[1] in KINDS]


def marked(case: Case, kind: str, widen: bool):
    """A run of the table. Norms of many short rows take the stand-in seconds, so one run of them stands for all."""
    many = case.op.startswith("layernorm") and case.label.split("x")[0] in ("5462", "16384", "16385")
    short = not many or (case.label.endswith("-1110") and (kind, widen) == ("bfloat16", True))
    return pytest.param(case, kind, widen, marks=() if short else pytest.mark.slow)


@pytest.fixture(scope="module")
def ops():
    with standing_in() as found:
        yield found


def offered(case: Case, arguments) -> bool:
    """Whether kernels exist for the types of a case."""
    if case.op == "ordered_sum":
        return all(accumulator(b.dtype) == arguments["out"].dtype for b in arguments["blocks"])
    if case.op == "adamw" and (cast := arguments["cast"]) is not None:
        return accumulator(cast.dtype) == arguments["param"].dtype
    return True


def placed(ops, arguments):
    return {name: on_device(ops, value) for name, value in arguments.items()}


def fetched(ops, arguments):
    """What device arrays hold, by the names of ``arrays_of``."""
    found = {}
    for name, value in arguments.items():
        several = {f"{name}.{i}": item for i, item in enumerate(value)} if isinstance(value, list) else {name: value}
        found |= {label: from_device(ops, item) for label, item in several.items() if hasattr(item, "data")}
    return found


@pytest.mark.parametrize(("case", "kind", "widen"), [marked(*run) for run in ON_GPU], ids=run_name)
def test_against_the_reference(ops, case: Case, kind, widen):
    arguments = arguments_of(case, kind, widen)
    on_gpu = placed(ops, arguments)
    if not offered(case, arguments):
        with pytest.raises(ShapeError, match=rf"^{case.op} was given .*; .*it takes "):
            getattr(ops, case.op)(**on_gpu)
        return
    expected = case.reference(**{name: widened(value) for name, value in arguments.items()})
    rounded = expected.pop("rounded", 0.0)
    getattr(ops, case.op)(**on_gpu)
    found = fetched(ops, on_gpu)
    for name, before in arrays_of(arguments).items():
        if name not in expected:
            assert found[name].tobytes() == before.tobytes(), f"{case.op} changed its argument {name}"
            continue
        want = expected[name]
        got = case.read(found[name]) if case.read else found[name].astype(float)
        counts = ~np.isnan(want)
        limit = TOLERANCE[accumulator(DTYPES[kind]).name] * case.loose * max(1.0, abs(want[counts]).max(initial=0.0))
        size = np.maximum(abs(want) + abs(rounded), SMALLEST.get(before.dtype.name, 0.0))
        limits = limit + ROUNDING.get(before.dtype.name, 0.0) * size
        excess = (abs(got - want) - limits)[counts]
        assert (excess <= 0).all(), f"{name}: {excess.max()} more than the bound"


def small(case: Case) -> bool:
    """Whether a case has no array of many rows, which the stand-in is slow at."""
    return sum(array.size for array in arrays_of(arguments_of(case, "float32", False)).values()) < 2**15


@pytest.mark.parametrize(
    "case", [case for case, kind, widen in ON_GPU if (kind, widen) == ("float32", False) and small(case)], ids=str
)
def test_a_second_use_takes_no_memory_and_gives_the_same_bits(ops, case: Case):
    arguments = arguments_of(case, "float32", False)
    if not offered(case, arguments):
        return
    results = []
    for _ in range(2):
        on_gpu = placed(ops, arguments)
        ops.counters.reset()
        answer = getattr(ops, case.op)(**on_gpu)
        counted = ops.counters.allocations
        results.append((answer, [found.tobytes() for found in fetched(ops, on_gpu).values()]))
    assert results[0] == results[1]
    assert counted == 0


@pytest.mark.parametrize("name", sorted(Ops.__abstractmethods__ | callables(Backend)))
def test_signatures_are_those_of_the_contract(name):
    assert inspect.signature(getattr(CupyOps, name)) == inspect.signature(getattr(Ops, name))


def test_there_is_one_public_method_besides():
    found = {name for name in dir(CupyOps) if callable(getattr(CupyOps, name)) and not name.startswith("_")}
    assert found == public() | callables(Backend) | {"on"}


def arrays(ops, *shapes, kind=F32):
    return [ops.empty(int(np.prod(shape)), kind).reshape(shape) for shape in shapes]


def wrong_types(ops):
    """(operation, arguments with one array of the wrong type, what the message names)"""
    x, y = arrays(ops, (4, 8), (4, 8))
    flat, cube = x.reshape(-1), x.reshape(2, 2, 8)
    other, column, row = arrays(ops, (4, 8), (4,), (8,), kind=F64)
    (whole,), (half,), (narrow,) = (arrays(ops, (4, 8), kind=kind) for kind in (I64, F16, BF16))
    (small,) = arrays(ops, (4, 8), kind=DTYPES["uint8"])
    tokens, index = ops.empty(4, I64), ops.empty(4, DTYPES["uint64"])
    draw, step = Draw(0, 0, 0, 0), AdamWStep(1.0, 1.0, 0.9, 0.9, 1e-8, 0.1, 0.1, ((0, 8, 0.0),))
    single = ops.empty(8, F32)
    yield "matmul", (x, other.T, other[:, :4]), "a float32, b float64, out float64; .* takes"
    yield "matmul", (narrow, narrow.T, other[:, :4]), "out float64; on a GPU it takes .* float32 for 16 bits"
    yield "matmul", (narrow, half.T, other[:, :4]), "a bfloat16, b float16, out float64; .* takes"
    yield "column_sum", (whole, row), "x of int64"
    yield "column_sum", (x, row), "of float32 and float64; .* takes .* of two types bfloat16 with float32, float16 with"
    yield "row_dot", (cube, cube, ops.empty(4, F64).reshape(2, 2)), "out of float64"
    yield "add", (x, other, x), "y of float64; beside arrays of float32 it takes float32"
    yield "add", (x[:, :4], other[:, :4], x[:, :4]), "y of float64; beside arrays of float32 it takes float32"
    yield "multiply", (x, y, other), "arrays of float32 and float64"
    yield "multiply", (x[:, :4], other[:, :4], x[:, :4]), "y of float64"
    yield "multiply", (half, half, narrow), "arrays of float16 and bfloat16"
    yield "gelu", (small, small, True), "arrays of uint8; on a GPU it takes float32, float64, bfloat16 or float16"
    yield "gelu_backward", (x, other, x, True), "dy of float64"
    yield "dropout", (whole, whole, 0.5, draw), "arrays of int64"
    yield "layernorm", (x, row, row, x, column, column, 1e-5), "weight of float64"
    yield "layernorm_backward", (x, single, column, column, x, x, None, single), "mean of float64"
    yield "embedding", (x, index, y), "tokens of uint64; beside arrays of float32 it takes int64"
    yield "embedding_backward", (tokens, x, other), "arrays of float32 and float64"
    yield "causal_softmax", (cube, other.reshape(-1)[:4].reshape(2, 2), 6, 1.0), "lse of float64"
    yield "softmax_backward", (cube, other.reshape(2, 2, 8), ops.empty(4, F32).reshape(2, 2), 1.0), "dp of float64"
    yield "cross_entropy", (x, tokens, column, 1.0, True), "losses of float64"
    yield "sum64", (flat, flat[:1]), "out of float32; beside arrays of float32 it takes float64"
    yield "ordered_sum", ([flat, other.reshape(-1)], flat, True), "out of float32; beside arrays of float64"
    yield "ordered_sum", ([flat, flat], other.reshape(-1), True), "out of float64; beside arrays of float32"
    yield "square_sums", (ops.empty(512, F32), (), ops.empty(1, F32)), "out of float32"
    yield "exact_sum", (flat, ops.empty(21, I64)), "values of float32"
    yield "adamw", (single, single, single, row, step), "exp_avg_sq of float64"
    yield "adamw", (single, single, single, single, step, row), "param of float32; beside arrays of float64"
    yield "normal", (narrow.reshape(-1), draw, 1.0), "out of bfloat16 with strides .* float32 or float64"
    yield "copy", (whole, x), "arrays of int64 and float32"
    yield "copy", (whole[:, :4], x[:, :4]), "arrays of int64 and float32"
    yield "fill", (whole, 1.0), "1.0 for out"
    yield "fingerprint", (ops.empty(3, DTYPES["uint8"]), draw), "x of uint8; it takes elements of 2, 4 or 8 bytes"


def test_wrong_types_are_refused(ops):
    seen = set()
    for name, arguments, message in wrong_types(ops):
        with pytest.raises(ShapeError, match=rf"^{name} was given .*{message}"):
            getattr(ops, name)(*arguments)
        seen.add(name)
    assert seen == public() - {"linear"}


def test_views_that_are_not_contiguous_are_refused_by_name(ops):
    (wide,) = arrays(ops, (4, 16))
    x, row, rows = wide[:, :8], ops.empty(8, F32), ops.empty(4, F32)
    with pytest.raises(ShapeError, match=r"^layernorm was given x \(4, 8\) with strides \(64, 4\); .*copy it first"):
        ops.layernorm(x, row, row, x, rows, rows, 1e-5)
    with pytest.raises(ShapeError, match=r"^column_sum was given"):
        ops.column_sum(x, row)
    scores = ops.empty(64, F32).reshape(2, 4, 8).swapaxes(1, 2)[:, :, :4]
    with pytest.raises(ShapeError, match=r"^causal_softmax was given .*the last axis is contiguous"):
        ops.causal_softmax(scores[:, :4], ops.empty(8, F32).reshape(2, 4), 0, 1.0)


def test_kinds_that_cannot_be_computed_with(ops, monkeypatch):
    for kind in KINDS:
        ops.prepare(DTYPES[kind])
    with pytest.raises(ConfigError, match=r"^element type int64 cannot be computed with on a GPU; use float32"):
        ops.prepare(I64)
    monkeypatch.setattr(ops.gpu, "capability", 75)
    with pytest.raises(ConfigError, match=r"compute capability 7.5; bfloat16 needs 8.0 .* use float16 or float32"):
        ops.prepare(BF16)
    for kind in (F32, F64, F16):
        ops.prepare(kind)


def test_parts_of_sums_cover_the_rows_in_order():
    for rows in (1, 31, 32, 33, 4095, 4096, 100_003):
        for width in (1, 255, 256, 257, 1600, 262_144, 10**6):
            parts, each = parts_of(rows, width)
            assert (parts - 1) * each < rows <= parts * each
            assert parts * -(-width // 256) <= max(1024, -(-width // 256))
            assert each >= min(rows, 32) or parts * each - rows < each


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(3, 300_000), (70, 280_000)])
def test_columns_wider_than_the_scratch_are_rounded_once(ops, rows, width, add):
    import cupy

    small = ops.on(cupy.cuda.Stream(non_blocking=True))
    rng = np.random.default_rng(2)
    x, before = rng.standard_normal((rows, width)).astype(BF16), rng.standard_normal(width).astype(BF16)
    total = np.zeros(width, np.float32)
    for row in x.astype(np.float32):
        total += row
    want = (before.astype(np.float32) + total if add else total).astype(BF16)
    for these, several in ((ops, False), (small, True)):
        there, out = on_device(these, x), on_device(these, before)
        these.counters.reset()
        these.column_sum(there, out, add)
        assert (these.counters.launches > 2) == several
        assert these.fetch(out).tobytes() == want.tobytes()


def test_layernorm_gradients_go_to_arrays_of_either_type_while_dx_is_dy(ops):
    rng = np.random.default_rng(3)
    x, dy, weight = (rng.standard_normal(shape).astype(BF16) for shape in ((70, 40), (70, 40), (40,)))
    mean, rstd = x.astype(float).mean(axis=1), 1 / x.astype(float).std(axis=1)
    hat = (x.astype(float) - mean[:, None]) * rstd[:, None]
    arguments = placed(ops, {"x": x, "weight": weight, "mean": mean.astype(F32), "rstd": rstd.astype(F32), "dy": dy})
    dweight, dbias = ops.empty(40, BF16), ops.empty(40, F32)
    ops.layernorm_backward(**arguments, dx=arguments["dy"], dweight=dweight, dbias=dbias)
    wanted = (dy.astype(float) * hat).sum(axis=0), dy.astype(float).sum(axis=0)
    assert abs(ops.fetch(dweight).astype(float) - wanted[0]).max() < 2**-8 * abs(wanted[0]).max()
    assert abs(ops.fetch(dbias) - wanted[1]).max() < 1e-5 * abs(wanted[1]).max()
