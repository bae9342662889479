"""The layer contract: pure, stateless, owning no array.

[Note: who owns what]
A layer is a description. Its parameters, gradients, inputs and outputs belong to the caller and are passed
in each time, so parameters may be gathered before a call and gone after it. ``saved`` therefore never holds a
parameter. What backward needs is allocated with ``ctx.keep``; what one call needs, with ``ctx.scratch``.

[Note: gradients]
``grads[name]`` is ``(array, add)``: write the gradient, or add to what is there; or None for a frozen
parameter. ``dy`` is read-only. ``dx`` is written, or None where nobody needs it.

Shape legend: B sequences, T positions, C features, N = B * T tokens, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Draw, Ops

__all__ = ["Context", "Frame", "Gradient", "Grads", "Layer", "LossLayer", "ParamSpec", "Params", "Saved"]

Params: TypeAlias = Mapping[str, Array]
Gradient: TypeAlias = "tuple[Array, bool] | None"
Grads: TypeAlias = Mapping[str, Gradient]
Saved: TypeAlias = Any


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as its layer declares it.

    ``std`` > 0: initial values are normal with that deviation; else they are all ``value``. ``decay`` says
    whether weight decay applies (matrices, by custom). A frozen parameter is not ``trainable``.
    """

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    value: float = 0.0
    decay: bool = False
    trainable: bool = True


class Frame(Protocol):
    """A ``with`` block; memory taken inside it is given back at its end."""

    def __enter__(self) -> object: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Context(Protocol):
    """What a layer may ask of its caller during one call."""

    #: whether dropout applies
    training: bool

    def keep(self, shape: tuple[int, ...], dtype: DType | None = None) -> Array:
        """Return an uninitialised array that lives until this stage's backward has run."""

    def scratch(self, shape: tuple[int, ...], dtype: DType | None = None) -> Array:
        """Return an uninitialised array that lives until the innermost frame ends."""

    def frame(self) -> Frame:
        """Open a frame of scratch inside this call."""

    def draw(self, name: str, features: int) -> Draw:
        """Return where the random numbers of the layer ``name``, with ``features`` a token, stand now."""


class Layer(ABC):
    """A computation with a hand-written backward. See the module's notes for the contract."""

    @abstractmethod
    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Return the parameters, in the order in which they lie in memory."""

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return y's shape for an x of ``shape``."""
        return shape

    @abstractmethod
    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Write y; return what backward needs."""

    @abstractmethod
    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """Write dx and each gradient, from dy and what forward saved."""


class LossLayer(ABC):
    """The last computation: predictions and loss, forward and backward in one call, so neither is kept whole."""

    @abstractmethod
    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Return the parameters, in the order in which they lie in memory."""

    @abstractmethod
    def loss(
        self,
        ops: Ops,
        ctx: Context,
        params: Params,
        grads: Grads | None,
        x: Array,
        targets: Array,
        losses: Array,
        scale: float,
        dx: Array | None,
    ) -> None:
        """Write the loss of each target into losses (N,); unless grads is None also the gradients of
        ``scale * losses.sum()`` into grads and dx."""

    @abstractmethod
    def outputs(self) -> int:
        """Return the number of predictions a token or sample has."""

    @abstractmethod
    def predict(self, ops: Ops, ctx: Context, params: Params, x: Array, logits: Array) -> None:
        """Write logits (N, outputs) for x (N, C)."""
