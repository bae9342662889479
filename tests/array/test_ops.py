"""Every operation over its table of cases, on each backend, and the backends against each other."""

import copy
import inspect

import numpy as np
import pytest

from mpishard.array.backend import Backend
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.array.shape_ops import ShapeOps
from tests.array.op_case import ALL, Case
from tests.array.op_cases import CASES

BACKENDS = (NumpyOps, ShapeOps)
TOLERANCE = {"float64": 2e-14, "float32": 2e-6}
#: half a unit of the last place, relative to the value
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}
SMALLEST = {"float16": 2**-14}  # normal number: below it the unit of the last place stays
RUNS = [(case, kind, False) for case in CASES for kind in case.kinds]
RUNS += [(case, kind, True) for case, kind, _ in RUNS if case.either and kind in ("bfloat16", "float16")]


def run_name(value) -> str | None:
    return {True: "widened", False: "plain"}[value] if isinstance(value, bool) else str(value)


def callables(kind) -> set[str]:
    return {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}


def public() -> set[str]:
    return callables(Ops)


def arguments_of(case, kind, widen, seed=1):
    """The case's arguments; ``widen``: those in ``either`` have the accumulator's type."""
    arguments = case.make(np.random.default_rng(seed), DTYPES[kind])
    for name in case.either if widen else ():
        if arguments[name] is not None:
            arguments[name] = arguments[name].astype(accumulator(DTYPES[kind]))
    return arguments


def hidden() -> set[str]:
    return {name for name in Ops.__abstractmethods__ if name.startswith("_")}


def arrays_of(arguments):
    """Name -> array, lists of arrays under name.0, name.1, ..."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            found[name] = value
        elif isinstance(value, list):
            found |= {f"{name}.{i}": item for i, item in enumerate(value)}
    return found


def widened(value):
    if isinstance(value, np.ndarray) and value.dtype.kind not in "iu":
        return value.astype(np.float64)
    return [widened(item) for item in value] if isinstance(value, list) else copy.copy(value)


def test_every_public_operation_has_cases():
    assert {case.op for case in CASES} == public()


def test_every_operation_runs_in_every_type_of_activations():
    masters = {"adamw", "normal", "square_sums"}
    for kind in ALL:
        missing = public() - {case.op for case in CASES if kind in case.kinds}
        assert missing <= masters | {"exact_sum"} if kind != "float64" else not missing


def test_every_public_operation_has_a_method_that_backends_implement():
    assert hidden() == {f"_{name}" for name in public() - {"linear"}}
    assert Ops.__abstractmethods__ == hidden() | {"empty"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(Ops.__abstractmethods__ | callables(Backend)))
def test_backends_implement_with_equal_signatures(backend, name):
    assert inspect.signature(getattr(backend, name)) == inspect.signature(getattr(Ops, name))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_have_no_operation_of_their_own(backend):
    found = {name for name in dir(backend) if callable(getattr(backend, name)) and not name.startswith("_")}
    assert found == public() | callables(Backend)


@pytest.mark.parametrize("name", sorted(hidden() - {"_fingerprint"}))
def test_a_backend_takes_the_arguments_of_the_public_operation(name):
    def names(function):
        return sorted(inspect.signature(function).parameters)

    assert names(getattr(Ops, name)) == names(getattr(Ops, name[1:]))


@pytest.mark.parametrize(("case", "kind", "widen"), RUNS, ids=run_name)
def test_numpy_against_the_reference(case: Case, kind, widen):
    arguments = arguments_of(case, kind, widen)
    before = {name: array.copy() for name, array in arrays_of(arguments).items()}
    expected = case.reference(**{name: widened(value) for name, value in arguments.items()})
    rounded = expected.pop("rounded", 0.0)
    getattr(NumpyOps(), case.op)(**arguments)
    for name, array in arrays_of(arguments).items():
        if name not in expected:
            assert array.tobytes() == before[name].tobytes(), f"{case.op} changed its argument {name}"
            continue
        want = expected[name]
        found = case.read(array) if case.read else array.astype(float)
        counts = ~np.isnan(want)
        limit = TOLERANCE[accumulator(DTYPES[kind]).name] * case.loose * max(1.0, abs(want[counts]).max(initial=0.0))
        # Values of 16 bits are rounded once, by half a unit of the last place.
        size = np.maximum(abs(want) + abs(rounded), SMALLEST.get(array.dtype.name, 0.0))
        limits = limit + ROUNDING.get(array.dtype.name, 0.0) * size
        excess = (abs(found - want) - limits)[counts]
        assert (excess <= 0).all(), f"{name}: {excess.max()} more than the bound"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy_gives_the_same_bits_again_and_on_a_used_backend(case: Case, kind):
    """Scratch that an operation reads before it writes it would show here."""
    used = NumpyOps()
    used.prepare(DTYPES[kind])
    used._scratch.fill(255)
    used._wide.fill(np.nan)
    results = []
    for ops in (used, used, NumpyOps()):
        arguments = arguments_of(case, kind if kind in case.kinds else case.kinds[0], False)
        answer = getattr(ops, case.op)(**arguments)
        results.append((answer, [array.tobytes() for array in arrays_of(arguments).values()]))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_take_the_same_arguments_and_note_a_cost(case: Case, kind):
    ops = ShapeOps()

    def shape(value):
        if isinstance(value, np.ndarray):
            return ops.empty(value.size, value.dtype).reshape(value.shape)
        return [shape(item) for item in value] if isinstance(value, list) else value

    kind = kind if kind in case.kinds else case.kinds[0]
    arguments = {name: shape(value) for name, value in arguments_of(case, kind, False).items()}
    getattr(ops, case.op)(**arguments)
    if case.op == "fingerprint":
        return
    noted = {"linear": "matmul"}.get(case.op, case.op)
    calls, flops, nbytes = ops.costs[noted]
    assert calls == 1
    assert nbytes > 0
    assert (flops > 0) == (case.op not in ("copy", "fill", "embedding") and arguments.get("blocks") != [])


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_arrays_start_at_multiples_of_64_bytes(backend):
    ops = backend()
    for count in (1, 3, 0, 65, 16):
        for kind in (np.float32, np.float64, np.uint8, DTYPES["bfloat16"]):
            found = ops.empty(count, np.dtype(kind))
            assert (found.shape, found.dtype) == ((count,), kind)
            assert not count or found.__array_interface__["data"][0] % 64 == 0
