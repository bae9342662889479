"""One layer run as the engine runs a stage, on memory that was planned on shapes and that notices every liberty.

[Note: what is watched]
- Arrays that the layer gives to an operation must be its arguments, or come from ``ctx.keep`` and ``ctx.scratch``: an
  array that it made itself is in no plan.
- What is taken back is filled with NaN, and so are the parameters between forward and backward: backward is given
  them anew, in other memory.
- The plan is the same call on arrays without memory, which nothing can be written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from mpishard.array.arena import Arena
from mpishard.array.dtypes import Array, DType, accumulator
from mpishard.array.ops import Ops
from mpishard.array.shape_ops import ShapeOps
from mpishard.nn.layer import Grads, Layer, LossLayer
from mpishard.nn.model import AnyLayer
from mpishard.shard.runner import StepContext
from mpishard.testing.contract import ContractError, require
from mpishard.testing.told import Handed, Trial, circumstances, told
from mpishard.testing.watched import WatchedOps, inside

__all__ = ["SCALE", "Arrays", "Machine", "Problem", "machine_for", "planned"]

Arrays: TypeAlias = dict[str, Array]
_Call: TypeAlias = "Callable[[Grads | None, Array | None], None]"  # with grads and dx

SCALE = 0.25  # of a loss


@dataclass(frozen=True)
class Problem:
    """A layer's arguments: x, parameters, and dy (of a loss: the targets).

    ``reads`` says whether backward is given the parameters.
    """

    make: Callable[[], AnyLayer]
    x: Array
    params: Arrays
    dy: Array
    training: bool
    reads: bool

    @property
    def integers(self) -> bool:
        """Whether x holds whole numbers, which have no gradient."""
        return bool(self.x.dtype.kind == "i")

    @property
    def kind(self) -> DType:
        """Type of activations."""
        return next((p.dtype for p in self.params.values()), self.x.dtype)


class Machine:
    """Memory and context of one stage.

    Args:
        peaks: bytes of the stacks as :func:`planned` found them; None for a plan.
        kind: name of the type of activations.
        poison: fill with NaN what is taken back.
    """

    def __init__(self, ops: Ops, peaks: dict[str, int] | None, kind: str, training: bool, poison: bool) -> None:
        self.ops = ops
        self.arena = Arena(ops, peaks, poison)
        self.context = StepContext(self.arena, np.dtype(kind), seed=7)
        self.context.training = training
        self.context.step, self.context.stage, self.context.first_row = 3, "h.1", 5
        self.saved, self.workspace = self.arena.saved._base, self.arena.workspace._base

    def run(self, problem: Problem, grads: Grads | None, dx: Array | None) -> Array:
        """Forward, and backward unless ``grads`` is None; return y, or the losses."""
        layer, arena = problem.make(), self.arena
        params = {name: self.array(p.shape, p.dtype, p) for name, p in problem.params.items()}
        outputs = [target[0] for target in (grads or {}).values() if target is not None]
        mine = [problem.x, problem.dy, *problem.params.values(), *params.values(), *outputs]
        self.allow(mine if dx is None else [*mine, dx])
        if isinstance(layer, LossLayer):
            losses: Array = self.array(problem.dy.shape, accumulator(problem.kind)).reshape(-1)
            self.allow([losses], more=True)
            self.loss(layer, params, problem, losses, grads, dx)
            return losses
        with told("output_shape"):
            shape = layer.output_shape(problem.x.shape)
        y = arena.saved.push(shape, problem.kind)
        record = self.forward_twice(layer, params, problem.x, y)
        self.look_at(record, params, problem, y)
        for param in params.values():
            self.spoil(param)  # released; what backward gets was gathered anew
        if grads is not None:
            self.backward(layer, problem, record, grads, dx)
        result: Array = y.copy()
        arena.saved.cut(0)
        return result

    def forward(self, call: str, layer: Layer, params: Arrays, x: Array, y: Array) -> object:
        """One forward; return what it saved."""
        with told(call, self.ops), self.arena.workspace.frame():
            return layer.forward(self.ops, self.context, Handed("params", params), x, y)

    def loss(
        self, layer: LossLayer, params: Arrays, problem: Problem, losses: Array, grads: Grads | None, dx: Array | None
    ) -> None:
        """One call of a loss layer."""

        def call(grads: Grads | None, dx: Array | None) -> None:
            with self.arena.workspace.frame():
                mine = None if grads is None else Handed("grads", grads)
                layer.loss(
                    self.ops, self.context, Handed("params", params), mine, problem.x, problem.dy, losses, SCALE, dx
                )

        trials = self.trials(call, problem, grads, dx)
        with told("loss" + circumstances(grads, dx is None), self.ops, trials):
            call(grads, dx)

    def backward(self, layer: Layer, problem: Problem, record: object, grads: Grads, dx: Array | None) -> None:
        """Backward of another object than ``layer``, whose forward saved ``record``."""
        other = problem.make()  # what backward needs is in saved, not in the layer
        if not isinstance(other, Layer):
            raise ContractError("make gives a layer once and a loss layer the next time")
        values = Handed("params", problem.params) if problem.reads else _Unread()

        def call(grads: Grads | None, dx: Array | None, layer: Layer = other) -> None:
            with self.arena.workspace.frame():
                given = Handed("grads", grads or {})
                layer.backward(self.ops, self.context, values, given, record, problem.dy, dx)

        same = Trial(
            "backward of the object that ran forward succeeds; a layer remembers nothing between calls: what backward "
            "needs is what forward returned",
            lambda: call(grads, dx, layer),
        )
        trials = [same, *self.trials(call, problem, grads, dx)]
        if record is None:
            trials.append(Trial("forward returned None, which backward gets as saved", lambda: None, "NoneType"))
        name = "backward" + circumstances(grads, dx is None and not problem.integers)
        with told(name, self.ops, trials):
            call(grads, dx)

    def trials(self, call: _Call, problem: Problem, grads: Grads | None, dx: Array | None) -> list[Trial]:
        """The call with what it was not asked for: gradients at all, that of x, those of frozen parameters."""

        def new(like: Array) -> Array:
            found = self.array(like.shape, problem.kind)
            self.allow([found], more=True)
            return found

        def asked(name: str) -> tuple[Array, bool]:
            return new(problem.params[name]), False

        if grads is None:
            advice = "grads is None where only losses are wanted; write gradients only if it is not"
            return [Trial(advice, lambda: call({name: asked(name) for name in problem.params}, new(problem.x)))]
        found = []
        if dx is None:
            advice = "dx is None where nobody needs the gradient of x; write it only if dx is not None"
            found.append(Trial(advice, lambda: call(grads, new(problem.x))))
        if None in grads.values():
            advice = "grads[name] is None for a frozen parameter; write its gradient only if that is not None"
            found.append(Trial(advice, lambda: call({n: asked(n) if t is None else t for n, t in grads.items()}, dx)))
        return found

    def forward_twice(self, layer: Layer, params: Arrays, x: Array, y: Array) -> object:
        """Forward, and again in place as recomputation does it; return what the second one saved."""
        top, before = self.arena.saved.top, x.tobytes()
        self.forward("forward", layer, params, x, y)
        require(x.tobytes() == before, "x was changed; it belongs to the caller and is read-only")
        first = y.copy()
        self.arena.saved.cut(top)
        record = self.forward("forward run a second time", layer, params, x, y)
        require(
            first.tobytes() == y.tobytes(),
            "forward gives other bits the second time; it may be recomputed, so its result must depend on its "
            "arguments alone, and randomness must come from ctx.draw",
        )
        return record

    def look_at(self, record: object, params: Arrays, problem: Problem, y: Array) -> None:
        """Refuse in ``saved`` what will not be there any more when backward comes."""
        for kept in _arrays_in(record):
            for name, param in params.items():
                require(
                    not np.shares_memory(kept, param),
                    f"saved holds memory of the parameter {name}, which is released before backward; save none, "
                    "backward gets its values as params",
                )
            require(
                not np.may_share_memory(kept, self.workspace),
                f"saved holds an array {kept.shape} from ctx.scratch, which is gone when forward returns; use ctx.keep",
            )
            require(
                not kept.size or inside(kept, [self.saved, problem.x, y]),
                f"saved holds an array {kept.shape} of memory that the layer made itself, so it is in no plan; "
                "use ctx.keep",
            )

    def allow(self, arrays: list[Array], more: bool = False) -> None:
        """Say what the layer may work on, beside the stacks; ``more``: in addition."""
        if isinstance(self.ops, WatchedOps):
            known = self.ops.known if more and self.ops.known else [self.saved, self.workspace]
            self.ops.known = [*known, *arrays]

    def array(self, shape: tuple[int, ...], kind: DType, values: Array | None = None) -> Array:
        """Return an array of the backend, of NaN or of ``values``."""
        found: Array = self.ops.empty(int(np.prod(shape)), kind).reshape(shape)
        if found.flags.writeable:
            found[...] = np.nan if values is None else values
            found.flags.writeable = values is None
        return found

    def spoil(self, array: Array) -> None:
        """Fill an array with NaN where it has memory."""
        if not isinstance(self.ops, ShapeOps):
            array.flags.writeable = True
            array[...] = np.nan


class _Unread(Mapping[str, Array]):
    """Stands for the parameters where backward is said to read none."""

    def __getitem__(self, name: str) -> Array:
        raise ContractError(f"backward reads the parameter {name}, and was said to read none (reads=False)")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def planned(problem: Problem, kind: str, with_dx: bool) -> dict[str, int]:
    """Return the peaks of the stacks, found by running the problem on shapes."""
    shapes = ShapeOps()
    machine = Machine(shapes, None, kind, problem.training, poison=False)

    def shape(array: Array) -> Array:
        empty: Array = shapes.empty(array.size, array.dtype).reshape(array.shape)
        return empty

    params = {name: shape(param) for name, param in problem.params.items()}
    twin = replace(problem, x=shape(problem.x), params=params, dy=shape(problem.dy))
    grads = {name: (shape(param), False) for name, param in params.items()}
    machine.run(twin, grads, shape(problem.x) if with_dx and not problem.integers else None)
    return machine.arena.peaks()


def machine_for(problem: Problem, *, kind: str = "float64", poison: bool = True) -> Machine:
    """Return a machine with the memory that the problem needs, with dx or without."""
    plans = [planned(problem, kind, with_dx) for with_dx in (True, False)]
    peaks = {name: max(plan[name] for plan in plans) for name in plans[0]}
    return Machine(WatchedOps(), peaks, kind, problem.training, poison)


def _arrays_in(record: object) -> Iterator[Array]:
    if isinstance(record, np.ndarray):
        yield record
    elif isinstance(record, tuple | list):
        for item in record:
            yield from _arrays_in(item)
    elif record is not None and not isinstance(record, int | float):
        raise ContractError(
            f"saved holds a {type(record).__name__}; arrays, numbers, None, and tuples and lists of them are allowed"
        )
