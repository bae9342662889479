"""How an exception inside a layer is told to its author: in which call it happened, and why, where that is certain.

Every exception of a layer becomes a ContractError with the exception as its cause. It names a reason only where the
exception itself shows it (a parameter that is not declared, an operation that does not exist) or where the suite has
tried the call again without the suspected circumstance (:class:`Trial`) and seen it succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from mpishard.array.ops import Ops
from mpishard.array.shape_ops import ShapeOps
from mpishard.errors import ArenaError
from mpishard.nn.layer import Context, Gradient, Grads, ParamSpec
from mpishard.nn.model import AnyLayer
from mpishard.testing.contract import ContractError, require

__all__ = ["OPERATIONS", "OTHERS", "Handed", "Trial", "circumstances", "declared", "told"]

T = TypeVar("T")

#: operations that are the engine's, the optimiser's and the communicators' own
OTHERS = (
    "adamw",
    "alike",
    "empty",
    "exact_sum",
    "fetch",
    "fingerprint",
    "host_like",
    "ordered_sum",
    "pinned_host",
    "prepare",
    "square_sums",
    "sum64",
    "upload",
)
#: operations that layers may use, sorted
OPERATIONS = tuple(
    sorted(name for name, value in vars(Ops).items() if name[0] != "_" and callable(value) and name not in OTHERS)
)

_ASKED = tuple(name for name in [*Context.__annotations__, *vars(Context)] if name[0] != "_")


class Trial(NamedTuple):
    """The same call without one circumstance; ``advice`` is right if it succeeds where the call itself failed.

    ``shows``: what the exception must say besides.
    """

    advice: str
    call: Callable[[], object]
    shows: str = ""


class _NotHandedError(KeyError):
    """A layer asks for the parameter ``name``, which it was not given; ``names`` are those that it declared."""

    def __init__(self, name: str, what: str, names: tuple[str, ...]) -> None:
        super().__init__(name)
        self.name, self.what, self.names = name, what, names


class Handed(dict[str, T]):
    """``params`` or ``grads`` (``what``) as a layer gets them; ``names`` are those that it declared."""

    def __init__(self, what: str, values: Mapping[str, T], names: Collection[str] | None = None) -> None:
        super().__init__(values)
        self.what, self.names = what, tuple(values if names is None else names)

    def __missing__(self, name: str) -> T:
        raise _NotHandedError(name, self.what, self.names)


@contextmanager
def told(call: str, ops: Ops | None = None, trials: Sequence[Trial] = ()) -> Iterator[None]:
    """Raise as ContractError what the ``with`` block, a call of a layer, raises.

    Args:
        call: what the message calls it, such as ``backward``.
        ops: what the layer was given to compute with, if it was.
        trials: made one after another until one succeeds, where the exception does not tell its reason.
    """
    try:
        yield
    except ContractError:
        raise
    except Exception as error:
        raise ContractError(_reason(call, error, ops) or _tried(call, error, trials)) from error


def declared(layer: AnyLayer) -> tuple[ParamSpec, ...]:
    """Return the parameters that a layer declares.

    Raises:
        ContractError: it fails, declares something else, or one name twice.
    """
    with told("param_specs"):
        specs = tuple(layer.param_specs())
    names = []
    for spec in specs:
        require(
            isinstance(spec, ParamSpec),
            f"param_specs gives a {type(spec).__name__} where a ParamSpec is due; it returns a tuple of them",
        )
        require(
            spec.name not in names,
            f"param_specs declares {spec.name} twice; names are unique within a unit, and parts of a layer that are "
            "of one kind need names of their own",
        )
        names.append(spec.name)
    return specs


def circumstances(grads: Grads | None, dx_left_out: bool) -> str:
    """Say what is special about a call: `` where dx is None``; nothing where all gradients are asked for."""
    if grads is None:
        return " where grads is None"
    found = ["dx is None"] if dx_left_out else []
    found += [f"grads[{name!r}] is None" for name, target in grads.items() if target is None]
    found += [f"grads[{name!r}] is (array, True)" for name, target in grads.items() if _adds(target)]
    return " where " + " and ".join(found) if found else ""


def _adds(target: Gradient) -> bool:
    return target is not None and target[1]


def _text(error: BaseException) -> str:
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))


def _tried(call: str, error: Exception, trials: Sequence[Trial]) -> str:
    advice = next((f"; {trial.advice}" for trial in trials if trial.shows in str(error) and _succeeds(trial)), "")
    return f"{call} fails ({_text(error)}){advice}"


def _succeeds(trial: Trial) -> bool:
    try:
        trial.call()
    except Exception:  # of any kind: the circumstance is not the reason
        return False
    return True


def _reason(call: str, error: Exception, ops: Ops | None) -> str:
    """Say in the contract's words what a layer did; "" where the error alone does not tell."""
    if isinstance(error, _NotHandedError):
        if error.name in error.names:
            return (
                f"{call} reads the parameter {error.name!r}, which no unit of its stage holds; name its unit in "
                "Stage.units, and in Stage.backward_units where backward reads its values"
            )
        return (
            f"{call} asks for {error.what}[{error.name!r}], which param_specs does not declare; it declares "
            f"{', '.join(error.names) or 'none'}"
        )
    if isinstance(error, AttributeError) and ops is not None and error.obj is ops:
        return (
            f"{call} uses ops.{error.name}, which is no operation; layers have {', '.join(OPERATIONS)} "
            "(docs/writing-a-layer.md says what they compute and how one is added, mpishard/array/ops.py holds them)"
        )
    if isinstance(error, AttributeError) and hasattr(error.obj, "draw") and hasattr(error.obj, "scratch"):
        return f"{call} uses ctx.{error.name}, which does not exist; a layer may ask for {', '.join(_ASKED)}"
    if isinstance(error, ValueError) and "read-only" in str(error):
        if isinstance(ops, ShapeOps):
            return f"{call} writes to an array by itself; use the operations of ops, which also run on shapes"
        return f"{call} writes to x, dy or a parameter; they belong to the caller and are read-only"
    if isinstance(error, ArenaError) and not isinstance(ops, ShapeOps):
        return (
            f"{call} takes more memory than the same call on shapes ({error}); what it takes from ctx.keep and "
            "ctx.scratch may depend on shapes only"
        )
    return ""
