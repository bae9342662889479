"""Every operation over its table of cases, on each backend, and the backends against each other."""

import copy
import inspect

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.array.shape_ops import ShapeOps
from tests.array.op_case import Case
from tests.array.op_cases import CASES

BACKENDS = (NumpyOps, ShapeOps)
TOLERANCE = {"float64": 2e-14, "float32": 2e-6}


def public() -> set[str]:
    return {name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")}


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
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(np.float64)
    return [widened(item) for item in value] if isinstance(value, list) else copy.copy(value)


def test_every_public_operation_has_cases():
    assert {case.op for case in CASES} == public() - {"empty"}


def test_every_public_operation_has_a_method_that_backends_implement():
    assert hidden() == {f"_{name}" for name in public() - {"empty", "linear"}}
    assert Ops.__abstractmethods__ == hidden() | {"empty"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(Ops.__abstractmethods__))
def test_backends_implement_with_equal_signatures(backend, name):
    assert inspect.signature(getattr(backend, name)) == inspect.signature(getattr(Ops, name))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_have_no_operation_of_their_own(backend):
    assert {name for name in dir(backend) if callable(getattr(backend, name)) and not name.startswith("_")} == public()


@pytest.mark.parametrize("name", sorted(hidden() - {"_fingerprint"}))
def test_a_backend_takes_the_arguments_of_the_public_operation(name):
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(getattr(Ops, name)) == names(getattr(Ops, name[1:]))


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy_against_the_reference(case: Case, kind):
    arguments = case.make(np.random.default_rng(1), np.dtype(kind))
    before = {name: array.copy() for name, array in arrays_of(arguments).items()}
    expected = case.reference(**{name: widened(value) for name, value in arguments.items()})
    getattr(NumpyOps(), case.op)(**arguments)
    for name, array in arrays_of(arguments).items():
        if name not in expected:
            assert array.tobytes() == before[name].tobytes(), f"{case.op} changed its argument {name}"
        elif not np.isnan(expected[name]).all():
            want = expected[name]
            limit = TOLERANCE[kind] * case.loose * max(1.0, abs(want).max())
            assert abs(array - want).max() <= limit, f"{name}: {abs(array - want).max()} > {limit}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy_gives_the_same_bits_again_and_on_a_used_backend(case: Case):
    """Scratch that an operation reads before it writes it would show here."""
    used = NumpyOps()
    used._scratch.fill(255)
    results = []
    for ops in (used, used, NumpyOps()):
        arguments = case.make(np.random.default_rng(1), np.dtype(np.float32))
        answer = getattr(ops, case.op)(**arguments)
        results.append((answer, [array.tobytes() for array in arrays_of(arguments).values()]))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_take_the_same_arguments_and_note_a_cost(case: Case):
    ops = ShapeOps()

    def shape(value):
        if isinstance(value, np.ndarray):
            return ops.empty(value.size, value.dtype).reshape(value.shape)
        return [shape(item) for item in value] if isinstance(value, list) else value

    arguments = {
        name: shape(value) for name, value in case.make(np.random.default_rng(1), np.dtype(np.float32)).items()
    }
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
        for kind in (np.float32, np.float64, np.uint8):
            found = ops.empty(count, np.dtype(kind))
            assert (found.shape, found.dtype) == ((count,), kind)
            assert not count or found.__array_interface__["data"][0] % 64 == 0
