"""Arrays that have a shape, a dtype and a place but no memory, and operations that only check and count.

[Note: the memory plan]
A plan is the step *run* on these arrays, so it cannot drift from the code. They are views of an untouched,
read-only mapping: slices, ``reshape`` and ``T`` are NumPy's own, the address is the place, and a write raises.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence

import numpy as np

from mpishard.array.backend import AdamWStep, Draw
from mpishard.array.dtypes import Array, DType
from mpishard.array.ops import Ops
from mpishard.array.pinned import Pairs, PinnedHost
from mpishard.errors import ArenaError

__all__ = ["ShapeOps"]

_SPACE = 1 << 46  # bytes of address space asked for first; less where the system limits it


@functools.cache
def _mapping() -> Array:
    """Return the mapping; nobody can write to it, so one serves every plan of the process."""
    size = _SPACE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    while True:
        try:
            return np.frombuffer(mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ), dtype=np.uint8)
        except (OSError, ValueError):  # noqa: PERF203
            size //= 2
            if size < 1 << 28:
                raise


class ShapeOps(Ops):
    """Checks shapes and adds up costs; moves and computes nothing.

    Args:
        own_bytes: the scratch of the backend that is planned for.
    """

    def __init__(self, own_bytes: int = 0) -> None:
        self.own_bytes = own_bytes
        #: operation -> [calls, floating-point operations, bytes touched]
        self.costs: dict[str, list[float]] = {}
        self._space = _mapping()
        self._used = 0

    @property
    def room(self) -> int:
        """Bytes of address space in all; a limit of the system makes it smaller."""
        return int(self._space.size)

    def alike(self, count: int) -> range:
        """Return the first of parts that are alike."""
        return range(min(1, count))

    def _note(self, operation: str, flops: float, nbytes: float) -> None:
        cost = self.costs.setdefault(operation, [0.0, 0.0, 0.0])
        cost[0] += 1
        cost[1] += flops
        cost[2] += nbytes

    def pinned_host(self) -> PinnedHost | None:
        """Return what counts the bytes of host memory, and has none."""
        return _ShapePinnedHost(self)

    def empty(self, count: int, dtype: DType) -> Array:
        """Return a 1-D array without memory, at a multiple of 64 bytes."""
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes > self._space.size:
            raise ArenaError(
                f"a plan of more than {self._space.size} bytes does not fit the address space (ulimit -v limits it?)"
            )
        # Nobody writes, so where all together are larger than the space, later arrays may lie where earlier ones do.
        start = self._used if self._used + nbytes <= self._space.size else 0
        self._used = -(-(start + nbytes) // 64) * 64
        view: Array = self._space[start : start + nbytes].view(dtype)
        return view

    def upload(self, host: Array, x: Array) -> None:
        """Nothing moves."""

    def _copy(self, x: Array, out: Array) -> None: ...
    def _fill(self, out: Array, value: float) -> None: ...
    def _matmul(self, a: Array, b: Array, out: Array, add: bool) -> None: ...
    def _column_sum(self, x: Array, out: Array, add: bool) -> None: ...
    def _row_dot(self, x: Array, y: Array, out: Array) -> None: ...
    def _add(self, x: Array, y: Array, out: Array) -> None: ...
    def _multiply(self, x: Array, y: Array, out: Array, add: bool) -> None: ...
    def _gelu(self, x: Array, y: Array, tanh: bool) -> None: ...
    def _gelu_backward(self, x: Array, dy: Array, dx: Array, tanh: bool) -> None: ...
    def _dropout(self, x: Array, y: Array, rate: float, draw: Draw) -> None: ...
    def _layernorm(
        self, x: Array, weight: Array, bias: Array, y: Array, mean: Array, rstd: Array, eps: float
    ) -> None: ...
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
    def _embedding(self, table: Array, tokens: Array, out: Array) -> None: ...
    def _embedding_backward(self, tokens: Array, dy: Array, dtable: Array, add: bool) -> None: ...
    def _causal_softmax(self, scores_: Array, lse: Array, first_row: int, scale: float, replay: bool) -> None: ...
    def _softmax_backward(self, p: Array, dp_: Array, delta: Array, scale: float) -> None: ...
    def _cross_entropy(self, logits_: Array, targets: Array, losses: Array, scale: float, gradient: bool) -> None: ...
    def _sum64(self, x: Array, out: Array) -> None: ...
    def _ordered_sum(self, blocks: Sequence[Array], out: Array, add: bool, bracket: int) -> None: ...
    def _square_sums(self, x: Array, holes: Sequence[tuple[int, int]], out: Array) -> None: ...
    def _adamw(
        self, param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, cast: Array | None, step: AdamWStep
    ) -> None: ...
    def _exact_sum(self, values: Array, out: Array) -> None: ...
    def _normal(self, out: Array, draw: Draw, std: float) -> None: ...
    def _fingerprint(self, x: Array, draw: Draw) -> int:
        return 0


class _ShapePinnedHost(PinnedHost):
    """Host memory that is not there."""

    def _allocate(self, nbytes: int) -> Array:
        return self.ops.empty(nbytes, np.dtype(np.uint8))

    def copy_in(self, slot: int, pairs: Pairs) -> None:
        """Nothing moves."""

    def copy_out(self, slot: int, pairs: Pairs) -> None:
        """Nothing moves."""

    def settle(self) -> None:
        """Nothing is under way."""
