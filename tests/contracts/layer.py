"""One suite for every layer: gradients, how they are written, and what a layer may touch and keep.

:func:`check_layer` and :func:`check_loss` take a layer and a shape and run all of it in float64. A stage is run as
the runner does it, on an arena that fills with NaN what is taken back, is planned on shapes to the byte, and
whose parameters are replaced between forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mpishard.array.arena import Arena
from mpishard.array.constants import IGNORE
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.array.shape_ops import ShapeOps
from mpishard.nn.layer import Grads, Layer, LossLayer
from mpishard.shard.runner import StepContext

#: largest relative error of a directional derivative, of sums that are added instead of written, and of fp32
DERIVATIVE, ADDED, SINGLE = 1e-7, 1e-12, 2e-5
SCALE = 0.25  # of a loss
# Of differences of the fourth order. A norm of two nearly equal features bends within sqrt(eps) = 3e-3: the error of
# the step, which falls with its fourth power, was 1e-7 there at 1e-4; rounding adds 1e-11 of the largest term.
STEP = 2e-5

AnyLayer: TypeAlias = "Layer | LossLayer"
Arrays: TypeAlias = dict[str, np.ndarray]


@dataclass(frozen=True)
class Problem:
    """A layer's arguments: x, parameters, and dy (of a loss: the targets).

    ``reads`` says whether backward is given the parameters.
    """

    make: Callable[[], AnyLayer]
    x: np.ndarray
    params: Arrays
    dy: np.ndarray
    training: bool
    reads: bool

    @property
    def integers(self) -> bool:
        return self.x.dtype.kind == "i"

    def moved(self, x: np.ndarray, params: Arrays) -> Problem:
        return Problem(self.make, x, params, self.dy, self.training, self.reads)


class Machine:
    """Memory and context of one stage, planned on shapes for the very problem that it will run."""

    def __init__(self, ops: Ops, peaks: dict[str, int] | None, kind: str, training: bool, poison: bool) -> None:
        self.ops = ops
        self.arena = Arena(ops, peaks, poison)
        self.context = StepContext(self.arena, np.dtype(kind), seed=7)
        self.context.training = training
        self.context.step, self.context.stage, self.context.first_row = 3, "h.1", 5

    def run(self, problem: Problem, grads: Grads | None, dx: np.ndarray | None) -> np.ndarray:
        """Forward, and backward unless ``grads`` is None; return y, or the losses."""
        layer, x, arena = problem.make(), problem.x, self.arena
        if isinstance(layer, LossLayer):
            losses = self.array(problem.dy.shape, self.kind(problem)).reshape(-1)
            with arena.workspace.frame():
                layer.loss(self.ops, self.context, problem.params, grads, x, problem.dy, losses, SCALE, dx)
            return losses
        params = {name: self.array(p.shape, p.dtype, p) for name, p in problem.params.items()}
        y = arena.saved.push(layer.output_shape(x.shape), self.kind(problem))
        top = arena.saved.top
        with arena.workspace.frame():
            layer.forward(self.ops, self.context, params, x, y)
        first = y.copy()
        arena.saved.cut(top)
        with arena.workspace.frame():
            record = layer.forward(self.ops, self.context, params, x, y)  # recomputed in place
        assert first.tobytes() == y.tobytes(), "forward gives other bits the second time"
        for kept in arrays_in(record):
            for name, param in params.items():
                assert not np.shares_memory(kept, param), f"saved holds memory of {name}"
        for param in params.values():
            self.spoil(param)  # released; what backward gets was gathered anew
        if grads is not None:
            values = problem.params if problem.reads else {}
            with arena.workspace.frame():
                problem.make().backward(self.ops, self.context, values, grads, record, problem.dy, dx)
        assert arena.workspace.top == 0
        y = y.copy()
        arena.saved.cut(0)
        return y

    def kind(self, problem: Problem) -> np.dtype:
        return next((p.dtype for p in problem.params.values()), problem.x.dtype)

    def array(self, shape: tuple[int, ...], kind: np.dtype, values: np.ndarray | None = None) -> np.ndarray:
        found = self.ops.empty(int(np.prod(shape)), kind).reshape(shape)
        if found.flags.writeable:
            found[...] = np.nan if values is None else values
        return found

    @staticmethod
    def spoil(array: np.ndarray) -> None:
        if array.flags.writeable:
            array[...] = np.nan


def arrays_in(record: Any) -> Iterator[np.ndarray]:
    if isinstance(record, np.ndarray):
        yield record
    elif isinstance(record, tuple | list):
        for item in record:
            yield from arrays_in(item)
    else:
        assert record is None or isinstance(record, int | float), f"saved holds a {type(record).__name__}"


def planned(problem: Problem, kind: str, with_dx: bool) -> dict[str, int]:
    """Peaks of the stacks, found by running the problem on shapes."""
    shapes = ShapeOps()
    machine = Machine(shapes, None, kind, problem.training, poison=False)

    def shape(array: np.ndarray) -> np.ndarray:
        return shapes.empty(array.size, array.dtype).reshape(array.shape)

    params = {name: shape(param) for name, param in problem.params.items()}
    twin = Problem(problem.make, shape(problem.x), params, shape(problem.dy), problem.training, problem.reads)
    grads = {name: (shape(param), False) for name, param in params.items()}
    machine.run(twin, grads, shape(problem.x) if with_dx and not problem.integers else None)
    return machine.arena.peaks()


def machine_for(problem: Problem, *, kind: str = "float64", poison: bool = True) -> Machine:
    plans = [planned(problem, kind, with_dx) for with_dx in (True, False)]
    peaks = {name: max(plan[name] for plan in plans) for name in plans[0]}
    return Machine(NumpyOps(), peaks, kind, problem.training, poison)


def value(machine: Machine, problem: Problem) -> float:
    """The number whose gradient backward gives."""
    y = machine.run(problem, None, None)
    if isinstance(problem.make(), LossLayer):
        return SCALE * float(y.sum())
    return float((y * problem.dy).sum())


def nan_like(arrays: Arrays) -> Arrays:
    return {name: np.full_like(array, np.nan) for name, array in arrays.items()}


def gradients(machine: Machine, problem: Problem) -> Arrays:
    """Gradients of all parameters, and of x under the name ``x``, written over NaN."""
    found = nan_like(problem.params)
    dx = None if problem.integers else np.full_like(problem.x, np.nan)
    machine.run(problem, {name: (array, False) for name, array in found.items()}, dx)
    if dx is not None:
        found["x"] = dx
    for name, gradient in found.items():
        assert np.isfinite(gradient).all(), f"the gradient of {name} is not written everywhere"
    return found


def same_bits(found: Arrays, expected: Arrays, what: str) -> None:
    for name, array in found.items():
        assert array.tobytes() == expected[name].tobytes(), f"{what} changes the bits of the gradient of {name}"


# --- the checks


def check_derivatives(problem: Problem, seed: int) -> float:
    """Return the worst relative error of derivatives along random directions: of x, of each parameter, of all."""
    machine = machine_for(problem)
    slopes = gradients(machine, problem)
    rng = np.random.default_rng(seed)
    worst = 0.0
    for names in [*([name] for name in slopes), list(slopes), list(slopes)]:
        direction = {name: rng.standard_normal(slopes[name].shape) for name in names}

        def along(h: float, direction: Arrays = direction) -> float:
            params = {n: p + h * direction[n] if n in direction else p for n, p in problem.params.items()}
            return value(
                machine, problem.moved(problem.x + h * direction["x"] if "x" in direction else problem.x, params)
            )

        outer, inner = along(2 * STEP) - along(-2 * STEP), along(STEP) - along(-STEP)
        numeric = (8 * inner - outer) / (12 * STEP)
        exact = float(sum((slopes[name] * direction[name]).sum() for name in names))
        largest = max(abs(numeric), abs(exact))
        error = abs(numeric - exact) / largest if largest > 1e-10 else 0.0

        assert error <= DERIVATIVE, (
            f"along {', '.join(names)}: {exact!r} is not {numeric!r}, relative error {error:.1e}"
        )
        worst = max(worst, error)
    return worst


def check_gradient_rule(problem: Problem) -> None:
    """Written, added to what is there, or left alone: each for each parameter, without effect on the others."""
    machine = machine_for(problem)
    expected = gradients(machine, problem)
    rng = np.random.default_rng(99)
    names = list(problem.params)
    for added in [[name] for name in names] + [names]:
        found, before = nan_like(expected), {name: rng.standard_normal(expected[name].shape) for name in added}
        for name in added:
            found[name][...] = before[name]
        dx = found.get("x")
        machine.run(problem, {name: (found[name], name in added) for name in names}, dx)
        for name, array in found.items():
            want = expected[name] + before.get(name, 0.0)
            limit = ADDED * max(1.0, abs(want).max())
            assert abs(array - want).max() <= limit, f"{name} is wrong where {', '.join(added)} are added"
    for frozen in [[name] for name in names] + [names]:
        found = nan_like(expected)
        machine.run(problem, {name: None if name in frozen else (found[name], False) for name in names}, found.get("x"))
        for name in frozen:
            assert np.isnan(found.pop(name)).all()
        same_bits(found, expected, f"freezing {', '.join(frozen)}")
    found = nan_like(problem.params)
    machine.run(problem, {name: (array, False) for name, array in found.items()}, None)
    same_bits(found, expected, "leaving dx out")
    machine.run(problem, dict.fromkeys(names), None)


def check_arguments(problem: Problem) -> None:
    """x, the parameters and dy keep their bits."""
    given = {"x": problem.x, "dy": problem.dy, **problem.params}
    before = {name: array.tobytes() for name, array in given.items()}
    for array in given.values():
        array.flags.writeable = False
    gradients(machine_for(problem), problem)
    for array in given.values():
        array.flags.writeable = True
    for name, array in given.items():
        assert array.tobytes() == before[name], f"{name} was changed"


def check_memory(problem: Problem) -> None:
    """NaN in what was taken back changes nothing, nor does a second run; the plan is right to the byte."""
    plan = planned(problem, "float64", True)
    machine = Machine(NumpyOps(), plan, "float64", problem.training, poison=True)
    expected = gradients(machine, problem)
    assert machine.arena.peaks() == plan, "the plan on shapes is not what the run used"
    same_bits(gradients(machine, problem), expected, "a second run")
    same_bits(gradients(machine_for(problem, poison=False), problem), expected, "poison")
    plan = planned(problem, "float64", False)
    machine = Machine(NumpyOps(), plan, "float64", problem.training, poison=True)
    machine.run(problem, {name: (array, False) for name, array in nan_like(problem.params).items()}, None)
    assert machine.arena.peaks() == plan, "the plan on shapes is not what the run without dx used"


def check_single(problem: Problem) -> None:
    """In fp32 the same gradients, and half the memory or less."""
    wide = gradients(machine_for(problem), problem)
    params = {name: array.astype(np.float32) for name, array in problem.params.items()}
    x, dy = (a if a.dtype.kind == "i" else a.astype(np.float32) for a in (problem.x, problem.dy))
    single = Problem(problem.make, x, params, dy, problem.training, problem.reads)
    machine = machine_for(single, kind="float32")
    for name, array in gradients(machine, single).items():
        assert array.dtype == np.float32
        error, size = np.linalg.norm(array - wide[name]), np.linalg.norm(wide[name])
        # Some gradients are differences of terms near one: dx of a norm over two features is almost zero.
        assert error <= SINGLE * max(0.1, size), f"fp32 {name}: error {error:.1e} of {size:.1e}"


def check_evaluation(problem: Problem) -> None:
    """Without training what is kept goes to the workspace; forward needs nothing else."""
    machine = machine_for(problem)
    layer = problem.make()
    if isinstance(layer, LossLayer):
        losses = machine.run(problem, None, None)
        again = np.full_like(losses, np.nan)
        grads = {name: (array, False) for name, array in nan_like(problem.params).items()}
        layer.loss(machine.ops, machine.context, problem.params, grads, problem.x, problem.dy, again, SCALE, None)
        assert losses.tobytes() == again.tobytes(), "the loss depends on whether there is a gradient"
        return
    peaks = planned(problem, "float64", True)
    machine = Machine(NumpyOps(), {"saved": 0, "workspace": sum(peaks.values())}, "float64", False, poison=True)
    machine.context.kept = machine.arena.workspace
    y = np.full(layer.output_shape(problem.x.shape), np.nan)
    with machine.arena.workspace.frame():
        layer.forward(machine.ops, machine.context, problem.params, problem.x, y)
    assert np.isfinite(y).all()
    if not problem.training:
        assert y.tobytes() == machine_for(problem).run(problem, None, None).tobytes()


def _check(problem: Problem, seed: int) -> float:
    assert {spec.name: spec.shape for spec in problem.make().param_specs()} == {
        n: p.shape for n, p in problem.params.items()
    }
    check_arguments(problem)
    check_gradient_rule(problem)
    check_memory(problem)
    check_single(problem)
    check_evaluation(problem)
    return check_derivatives(problem, seed)


def _params(layer: AnyLayer, rng: np.random.Generator) -> Arrays:
    return {spec.name: spec.value + 0.5 * rng.standard_normal(spec.shape) for spec in layer.param_specs()}


def check_layer(
    make: Callable[[], Layer],
    x_shape: tuple[int, ...],
    *,
    tokens: int = 0,
    training: bool = True,
    reads: bool = True,
    seed: int = 0,
) -> float:
    """Check a layer; return the worst relative error of a directional derivative.

    Args:
        make: gives the layer; each use gets a fresh one, so a layer that remembers is found out.
        tokens: x holds integers below this number, and gets no gradient.
        training: dropout applies.
        reads: backward reads parameters; else it gets none.
    """
    rng, layer = np.random.default_rng(seed), make()
    x = rng.integers(0, tokens, x_shape) if tokens else rng.standard_normal(x_shape)
    dy = rng.standard_normal(layer.output_shape(x_shape))
    return _check(Problem(make, x, _params(layer, rng), dy, training, reads), seed)


def check_loss(
    make: Callable[[], LossLayer], x_shape: tuple[int, ...], *, classes: int, ignored: str = "some", seed: int = 0
) -> float:
    """Check a loss layer on targets of which ``none``, ``some`` or ``all`` are ignored."""
    rng, layer = np.random.default_rng(seed), make()
    targets = rng.integers(0, classes, x_shape[:-1])
    flat = targets.reshape(-1)
    flat[{"none": slice(0, 0), "some": slice(0, None, 3), "all": slice(None)}[ignored]] = IGNORE
    return _check(Problem(make, rng.standard_normal(x_shape), _params(layer, rng), targets, True, True), seed)
