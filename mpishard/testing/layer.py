"""One suite for every layer: its derivative, how gradients are written, and what it may touch, keep and remember.

:func:`check_layer` and :func:`check_loss` take a layer and a shape and run all of it in float64, as the engine runs a
stage (:mod:`mpishard.testing.stage`). The contract is described in :mod:`mpishard.nn.layer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mpishard.array.constants import IGNORE
from mpishard.nn.layer import Gradient, Layer, LossLayer
from mpishard.nn.model import AnyLayer
from mpishard.testing.contract import require
from mpishard.testing.stage import SCALE, Arrays, Machine, Problem, machine_for, planned
from mpishard.testing.told import declared, told
from mpishard.testing.watched import WatchedOps

__all__ = ["DERIVATIVE", "STEP", "check_layer", "check_loss"]

#: Largest relative error of a directional derivative.
DERIVATIVE = 1e-7
#: Of differences of the fourth order. A norm of two nearly equal features bends within sqrt(eps) = 3e-3: the error of
#: the step, which falls with its fourth power, was 1e-7 there at 1e-4; rounding adds 1e-11 of the largest term.
STEP = 2e-5

_FEW, _DRAWN = 4, 6  # parameters that are frozen in every way, and ways to freeze more of them
_ADDED, _SINGLE = 1e-12, 2e-5  # of sums that are added instead of written, and of fp32


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
        x_shape: of its input; try odd sizes, and sizes of one.
        tokens: x holds whole numbers below this one, and gets no gradient.
        training: dropout applies.
        reads: backward reads parameters; else it is given none.

    The gradient of a random projection of y, along random directions of x and of each parameter, must agree with
    differences of forward. Each gradient must be written where ``grads[name]`` is (array, False), added to what is
    there where it is (array, True), left alone where it is None; dx left out where dx is None; the other gradients
    keep their bits all the while, whichever parameters are frozen together. x, dy and the parameters must keep
    their values. The layer may use its arguments and memory from ``ctx.keep`` and ``ctx.scratch`` only, as much as on
    shapes; ``saved`` may hold no parameter and no scratch. Forward must give the same bits again. fp32 must agree
    with float64.

    Raises:
        ContractError: the layer breaks the contract; the message says how. What the layer itself raises is its cause.
    """
    rng, layer = np.random.default_rng(seed), make()
    x = rng.integers(0, tokens, x_shape) if tokens else rng.standard_normal(x_shape)
    with told("output_shape"):
        y_shape = layer.output_shape(x_shape)
    dy = rng.standard_normal(y_shape)
    return _check(Problem(make, x, _params(layer, rng), dy, training, reads), seed)


def check_loss(
    make: Callable[[], LossLayer], x_shape: tuple[int, ...], *, classes: int, ignored: str = "some", seed: int = 0
) -> float:
    """Check a loss layer on targets of which ``none``, ``some`` or ``all`` are ignored; else like :func:`check_layer`.

    Losses must be the same with and without gradients, and gradients those of ``scale * losses.sum()``.
    """
    rng, layer = np.random.default_rng(seed), make()
    targets = rng.integers(0, classes, x_shape[:-1])
    flat = targets.reshape(-1)
    flat[{"none": slice(0, 0), "some": slice(0, None, 3), "all": slice(None)}[ignored]] = IGNORE
    return _check(Problem(make, rng.standard_normal(x_shape), _params(layer, rng), targets, True, True), seed)


def _check(problem: Problem, seed: int) -> float:
    _check_arguments(problem)
    _check_gradient_rule(problem)
    _check_memory(problem)
    _check_single(problem)
    _check_evaluation(problem)
    return _check_derivatives(problem, seed)


def _params(layer: AnyLayer, rng: np.random.Generator) -> Arrays:
    return {spec.name: spec.value + 0.5 * rng.standard_normal(spec.shape) for spec in declared(layer)}


def _value(machine: Machine, problem: Problem) -> float:
    """The number whose gradient backward gives."""
    y = machine.run(problem, None, None)
    if isinstance(problem.make(), LossLayer):
        return SCALE * float(y.sum())
    return float((y * problem.dy).sum())


def _nan_like(arrays: Arrays) -> Arrays:
    return {name: np.full_like(array, np.nan) for name, array in arrays.items()}


def _written(arrays: Arrays) -> dict[str, Gradient]:
    return {name: (array, False) for name, array in arrays.items()}


def _gradients(machine: Machine, problem: Problem) -> Arrays:
    """Gradients of all parameters, and of x under the name ``x``, written over NaN."""
    found = _nan_like(problem.params)
    dx = None if problem.integers else np.full_like(problem.x, np.nan)
    machine.run(problem, _written(found), dx)
    if dx is not None:
        found["x"] = dx
    for name, gradient in found.items():
        bad = int(np.count_nonzero(~np.isfinite(gradient)))
        require(
            bad == 0,
            f"{bad} of {gradient.size} elements of the gradient of {name} are NaN after backward: it did not write all "
            "of them, or read memory that was released; write the whole array where it is not to be added to",
        )
    return found


def _same_bits(found: Arrays, expected: Arrays, what: str) -> None:
    for name, array in found.items():
        require(array.tobytes() == expected[name].tobytes(), f"{what} changes the bits of the gradient of {name}")


# --- the checks


def _check_derivatives(problem: Problem, seed: int) -> float:
    """Return the worst relative error of derivatives along random directions: of x, of each parameter, of all."""
    machine = machine_for(problem)
    slopes = _gradients(machine, problem)
    rng = np.random.default_rng(seed)
    worst = 0.0
    for names in [*([name] for name in slopes), list(slopes), list(slopes)]:
        direction: Arrays = {name: np.asarray(rng.standard_normal(slopes[name].shape)) for name in names}

        def along(h: float, direction: Arrays = direction) -> float:
            params = {n: p + h * direction[n] if n in direction else p for n, p in problem.params.items()}
            x = problem.x + h * direction["x"] if "x" in direction else problem.x
            return _value(machine, replace(problem, x=x, params=params))

        outer, inner = along(2 * STEP) - along(-2 * STEP), along(STEP) - along(-STEP)
        numeric = (8 * inner - outer) / (12 * STEP)
        exact = float(sum((slopes[name] * direction[name]).sum() for name in names))
        largest = max(abs(numeric), abs(exact))
        error = abs(numeric - exact) / largest if largest > 1e-10 else 0.0
        require(
            error <= DERIVATIVE,
            f"the gradient of {', '.join(names)} is wrong: along a random direction backward gives {exact!r} and "
            f"differences of forward {numeric!r}, a relative error of {error:.1e} where {DERIVATIVE} is allowed",
        )
        worst = max(worst, error)
    return worst


def _check_gradient_rule(problem: Problem) -> None:
    """Written, added to what is there, or left alone: each for each parameter, without effect on the others."""
    machine = machine_for(problem)
    expected = _gradients(machine, problem)
    rng = np.random.default_rng(99)
    names = list(problem.params)
    for added in [[name] for name in names] + [names]:
        found, before = _nan_like(expected), {name: rng.standard_normal(expected[name].shape) for name in added}
        for name in added:
            found[name][...] = before[name]
        machine.run(problem, {name: (found[name], name in added) for name in names}, found.get("x"))
        for name, array in found.items():
            want = expected[name] + before.get(name, 0.0)
            right = bool(abs(array - want).max(initial=0.0) <= _ADDED * max(1.0, abs(want).max(initial=0.0)))
            rule = "added to what was there" if name in added else "written"
            require(
                right,
                f"the gradient of {name} is not {rule} where the gradients of {', '.join(added)} are to be added "
                "(grads[name] is (array, True)) and all others written",
            )
    found = _nan_like(problem.params)
    machine.run(problem, _written(found), None)
    _same_bits(found, expected, "leaving dx out")
    for frozen in _frozen_together(names, rng):
        for leave in ("", "leaving dx out and "):
            found = _nan_like(problem.params if leave else expected)
            machine.run(problem, {n: None if n in frozen else (found[n], False) for n in names}, found.get("x"))
            kept = {name: array for name, array in found.items() if name not in frozen}
            _same_bits(kept, expected, f"{leave}freezing {', '.join(frozen)} (grads[name] is None)")


def _frozen_together(names: list[str], rng: np.random.Generator) -> list[list[str]]:
    """Each parameter alone, all of them, and some: in every way where there are few, else in ways that are drawn."""
    ways = list(itertools.product((False, True), repeat=len(names))) if len(names) <= _FEW else []
    drawn = [] if ways else (rng.random((_DRAWN, len(names))) < 0.5).tolist()
    some = [[name for name, one in zip(names, way) if one] for way in [*ways, *drawn]]
    return [[name] for name in names] + [names] * bool(names) + [way for way in some if 1 < len(way) < len(names)]


def _check_arguments(problem: Problem) -> None:
    """x, the parameters and dy keep their bits, and are not written to at all."""
    given = {"x": problem.x, "targets" if problem.dy.dtype.kind == "i" else "dy": problem.dy, **problem.params}
    before = {name: array.tobytes() for name, array in given.items()}
    machine = machine_for(problem)
    found = _nan_like(problem.params)
    machine.run(problem, _written(found), None if problem.integers else np.full_like(problem.x, np.nan))
    for name, array in given.items():
        require(array.tobytes() == before[name], f"{name} was changed; it belongs to the caller and is read-only")
    for array in given.values():
        array.flags.writeable = False
    _gradients(machine, problem)
    for array in given.values():
        array.flags.writeable = True


def _check_memory(problem: Problem) -> None:
    """NaN in what was taken back changes nothing, nor does a second run; the plan is right to the byte."""
    plan = planned(problem, "float64", True)
    machine = Machine(WatchedOps(), plan, "float64", problem.training, poison=True)
    expected = _gradients(machine, problem)
    _same_bits(_gradients(machine, problem), expected, "a second run of the same call")
    _same_bits(_gradients(machine_for(problem, poison=False), problem), expected, "NaN in released memory")
    plans = [(machine, plan)]
    plan = planned(problem, "float64", False)
    machine = Machine(WatchedOps(), plan, "float64", problem.training, poison=True)
    machine.run(problem, _written(_nan_like(problem.params)), None)
    for one, due in [*plans, (machine, plan)]:
        used = one.arena.peaks()
        require(
            used == due,
            f"the layer used {used} bytes and {due} on shapes; what it takes from ctx.keep and ctx.scratch may depend "
            "on shapes only",
        )


def _check_single(problem: Problem) -> None:
    """In fp32 the same gradients."""
    wide = _gradients(machine_for(problem), problem)
    params = {name: array.astype(np.float32) for name, array in problem.params.items()}
    x, dy = (a if a.dtype.kind == "i" else a.astype(np.float32) for a in (problem.x, problem.dy))
    single = replace(problem, x=x, params=params, dy=dy)
    for name, array in _gradients(machine_for(single, kind="float32"), single).items():
        error, size = float(np.linalg.norm(array - wide[name])), float(np.linalg.norm(wide[name]))
        # Some gradients are differences of terms near one: dx of a norm over two features is almost zero.
        require(
            error <= _SINGLE * max(0.1, size),
            f"in float32 the gradient of {name} is off by {error:.1e}, of {size:.1e}; differences of large terms lose "
            "digits",
        )


def _check_evaluation(problem: Problem) -> None:
    """Without training what is kept goes to the workspace; forward needs nothing else."""
    machine = machine_for(problem)
    layer = problem.make()
    if isinstance(layer, LossLayer):
        losses = machine.run(problem, None, None)
        again = machine.run(problem, _written(_nan_like(problem.params)), None)
        require(losses.tobytes() == again.tobytes(), "the losses depend on whether there is a gradient")
        require(bool(np.isfinite(losses).all()), "loss does not write all losses")
        return
    peaks = planned(problem, "float64", True)
    machine = Machine(WatchedOps(), {"saved": 0, "workspace": sum(peaks.values())}, "float64", False, poison=True)
    machine.context.kept = machine.arena.workspace
    y = np.full(layer.output_shape(problem.x.shape), np.nan)
    machine.allow([problem.x, y, *problem.params.values()])
    machine.forward("forward where ctx.training is False", layer, problem.params, problem.x, y)
    require(bool(np.isfinite(y).all()), "forward does not write all of y, or reads memory that was released")
    if not problem.training:
        same = y.tobytes() == machine_for(problem).run(problem, None, None).tobytes()
        require(same, "forward gives other bits where nothing is kept for backward")
