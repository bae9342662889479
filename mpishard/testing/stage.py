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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from mpishard.array.arena import Arena
from mpishard.array.dtypes import Array, DType
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.array.shape_ops import ShapeOps
from mpishard.errors import ArenaError
from mpishard.nn.layer import Grads, Layer, LossLayer
from mpishard.nn.model import AnyLayer
from mpishard.shard.runner import StepContext
from mpishard.testing.contract import ContractError, require

__all__ = ["SCALE", "Arrays", "Machine", "Problem", "WatchedOps", "machine_for", "planned"]

Arrays: TypeAlias = dict[str, Array]

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


class WatchedOps(NumpyOps):
    """NumPy's operations on ``known`` memory alone; without a list, on any."""

    known: list[Array] | None = None

    def guard(self, operation: str, arguments: tuple[Any, ...]) -> None:
        """Refuse an array that lies in no known one."""
        for array in arguments if self.known is not None else ():
            if isinstance(array, np.ndarray) and array.size and not _inside(array, self.known or []):
                raise ContractError(
                    f"{operation} was given an array {array.shape} of memory that the layer made itself, so it is in "
                    "no plan; take memory from ctx.keep or ctx.scratch (a reshape of an array that is not contiguous "
                    "makes some too)"
                )


def _guarded(name: str) -> Callable[..., Any]:
    inner = getattr(NumpyOps, name)

    def call(self: WatchedOps, *arguments: Any) -> Any:
        self.guard(name.lstrip("_"), arguments)
        return inner(self, *arguments)

    return call


for _name in Ops.__abstractmethods__ - {"empty"}:
    setattr(WatchedOps, _name, _guarded(_name))


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
            losses: Array = self.array(problem.dy.shape, problem.kind).reshape(-1)
            self.allow([losses], more=True)
            with self.explained("loss"), arena.workspace.frame():
                layer.loss(self.ops, self.context, params, grads, problem.x, problem.dy, losses, SCALE, dx)
            return losses
        y = arena.saved.push(layer.output_shape(problem.x.shape), problem.kind)
        record = self.forward_twice(layer, params, problem.x, y)
        self.look_at(record, params, problem, y)
        for param in params.values():
            self.spoil(param)  # released; what backward gets was gathered anew
        if grads is not None:
            values = problem.params if problem.reads else _Unread()
            other = problem.make()  # what backward needs is in saved, not in the layer
            if not isinstance(other, Layer):
                raise ContractError("make gives a layer once and a loss layer the next time")
            with self.explained("backward"), arena.workspace.frame():
                other.backward(self.ops, self.context, values, grads, record, problem.dy, dx)
        result: Array = y.copy()
        arena.saved.cut(0)
        return result

    def forward_twice(self, layer: Layer, params: Arrays, x: Array, y: Array) -> object:
        """Forward, and again in place as recomputation does it; return what the second one saved."""
        top = self.arena.saved.top
        with self.explained("forward"), self.arena.workspace.frame():
            layer.forward(self.ops, self.context, params, x, y)
        first = y.copy()
        self.arena.saved.cut(top)
        with self.explained("forward"), self.arena.workspace.frame():
            record = layer.forward(self.ops, self.context, params, x, y)
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
                not kept.size or _inside(kept, [self.saved, problem.x, y]),
                f"saved holds an array {kept.shape} of memory that the layer made itself, so it is in no plan; "
                "use ctx.keep",
            )

    def allow(self, arrays: list[Array], more: bool = False) -> None:
        """Say what the layer may work on, beside the stacks; ``more``: in addition."""
        if isinstance(self.ops, WatchedOps):
            known = self.ops.known if more and self.ops.known else [self.saved, self.workspace]
            self.ops.known = [*known, *arrays]

    @contextmanager
    def explained(self, call: str) -> Iterator[None]:
        """Say in the contract's words what a layer did where an error says it in NumPy's or the arena's."""
        try:
            yield
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            if isinstance(self.ops, ShapeOps):
                told = f"{call} writes to an array by itself; use the operations of ops, which also run on shapes"
            else:
                told = f"{call} writes to x, dy or a parameter; they belong to the caller and are read-only"
            raise ContractError(told) from error
        except AttributeError as error:
            if call != "backward":
                raise
            raise ContractError(
                f"backward of another object of the same layer fails ({error}); a layer remembers nothing between "
                "calls: what backward needs is what forward returned"
            ) from error
        except ArenaError as error:
            raise ContractError(
                f"{call} takes more memory than the same call on shapes ({error}); what it takes from ctx.keep and "
                "ctx.scratch may depend on shapes only"
            ) from error

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


def _inside(array: Array, known: list[Array]) -> bool:
    return any(np.may_share_memory(array, one) for one in known)


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
