"""What a backend implements: one method for each operation of :class:`~mpishard.array.ops.Ops`, signatures as there.

The public methods have checked shapes and noted costs before they call these, so a backend only computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpishard.array.dtypes import Array, DType

if TYPE_CHECKING:
    from mpishard.array.pinned import PinnedHost

__all__ = ["AdamWStep", "Backend", "Draw"]


class Draw(NamedTuple):
    """Where random numbers stand: element ``first + i`` of the stream (seed, stream, step) goes to element i.

    ``stream`` names what is drawn (a parameter, a dropout layer), ``first`` is a *global* element index, so
    no draw depends on the number of ranks.
    """

    seed: int
    stream: int
    step: int
    first: int


class AdamWStep(NamedTuple):
    """Scalars of one AdamW update (Loshchilov & Hutter 2019, algorithm 2, with decoupled decay ``lr * decay``).

    ``factor`` turns the summed gradient into the clipped mean gradient. ``correction1`` and ``correction2``
    are ``1 - beta ** t``. ``segments`` are (start, stop, decay) ranges of the flat arrays that hold elements.
    """

    factor: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float
    segments: tuple[tuple[int, int, float], ...]


class Backend(ABC):
    """The operations of one kind of array."""

    #: bytes of scratch that the backend holds for itself
    own_bytes: int = 0
    #: what computes, in words
    device: str = "cpu"

    # --- memory, and the way between host and device

    def prepare(self, kind: DType) -> None:  # noqa: B027 - most need nothing
        """Take the scratch that arrays of ``kind`` need. Before memory is planned; again is free."""

    @abstractmethod
    def empty(self, count: int, dtype: DType) -> Array:
        """Return an uninitialised 1-D array that starts at a multiple of 64 bytes."""

    def host_like(self, x: Array) -> Array:
        """Return a NumPy array for values that go to x by :meth:`upload`: x itself where x is host memory."""
        return x

    def upload(self, host: Array, x: Array) -> None:
        """``x = host`` (equal shapes and types) in the order of the operations; host may be changed at once."""
        if host is not x:
            x[...] = host

    def fetch(self, x: Array) -> Array:
        """Return x's values as a NumPy array, waiting for what computes them; x itself where x is host memory."""
        return x

    def pinned_host(self) -> PinnedHost | None:
        """Return host memory beside the device, of which nothing is taken yet; None where arrays are host memory."""
        return None

    def alike(self, count: int) -> range:
        """Return the numbers of ``count`` parts on which a layer does the same, in memory that each takes in turn.

        Those after the first are of its shapes, or smaller; so a plan, which is made on shapes, needs the first alone.
        """
        return range(count)

    # --- operations

    @abstractmethod
    def _copy(self, x: Array, out: Array) -> None: ...
    @abstractmethod
    def _fill(self, out: Array, value: float) -> None: ...
    @abstractmethod
    def _matmul(self, a: Array, b: Array, out: Array, add: bool) -> None: ...
    @abstractmethod
    def _column_sum(self, x: Array, out: Array, add: bool) -> None: ...
    @abstractmethod
    def _row_dot(self, x: Array, y: Array, out: Array) -> None: ...
    @abstractmethod
    def _add(self, x: Array, y: Array, out: Array) -> None: ...
    @abstractmethod
    def _multiply(self, x: Array, y: Array, out: Array, add: bool) -> None: ...
    @abstractmethod
    def _gelu(self, x: Array, y: Array, tanh: bool) -> None: ...
    @abstractmethod
    def _gelu_backward(self, x: Array, dy: Array, dx: Array, tanh: bool) -> None: ...
    @abstractmethod
    def _dropout(self, x: Array, y: Array, rate: float, draw: Draw) -> None: ...
    @abstractmethod
    def _layernorm(
        self, x: Array, weight: Array, bias: Array, y: Array, mean: Array, rstd: Array, eps: float
    ) -> None: ...
    @abstractmethod
    def _layernorm_backward(
        self,
        x: Array,
        weight: Array,
        mean: Array,
        rstd: Array,
        dy: Array,
        dx: Array,
        dweight: Array | None,
        dbias: Array | None,
        add_weight: bool,
        add_bias: bool,
    ) -> None: ...
    @abstractmethod
    def _embedding(self, table: Array, tokens: Array, out: Array) -> None: ...
    @abstractmethod
    def _embedding_backward(self, tokens: Array, dy: Array, dtable: Array, add: bool) -> None: ...
    @abstractmethod
    def _causal_softmax(self, scores_: Array, lse: Array, first_row: int, scale: float, replay: bool) -> None: ...
    @abstractmethod
    def _softmax_backward(self, p: Array, dp_: Array, delta: Array, scale: float) -> None: ...
    @abstractmethod
    def _cross_entropy(self, logits_: Array, targets: Array, losses: Array, scale: float, gradient: bool) -> None: ...
    @abstractmethod
    def _sum64(self, x: Array, out: Array) -> None: ...
    @abstractmethod
    def _exact_sum(self, values: Array, out: Array) -> None: ...
    @abstractmethod
    def _ordered_sum(self, blocks: Sequence[Array], out: Array, add: bool, bracket: int) -> None: ...
    @abstractmethod
    def _square_sums(self, x: Array, holes: Sequence[tuple[int, int]], out: Array) -> None: ...
    @abstractmethod
    def _adamw(
        self, param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, cast: Array | None, step: AdamWStep
    ) -> None: ...
    @abstractmethod
    def _normal(self, out: Array, draw: Draw, std: float) -> None: ...
    @abstractmethod
    def _fingerprint(self, x: Array, draw: Draw) -> int: ...
