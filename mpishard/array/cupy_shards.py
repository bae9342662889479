"""CuPy's operations on flat shards: ordered sums, norms, AdamW, initial values, fingerprints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.array.backend import AdamWStep, Draw
from mpishard.array.cupy_gpu import KINDS
from mpishard.array.cupy_launch import CupyLaunch
from mpishard.array.dtypes import DTYPES, Array
from mpishard.array.numpy_ops import NumpyOps
from mpishard.errors import ShapeError

__all__ = ["CupyShardOps", "evenly"]

_FLOAT32, _FLOAT64, _UINT64 = DTYPES["float32"], DTYPES["float64"], DTYPES["uint64"]
_PLACE = 0x9E3779B97F4A7C15  # what a fingerprint's weights step by from one place to the next
#: element size -> a type of that size that kernels read; a fingerprint looks at bits alone, so any will do
_BITS = {2: DTYPES["bfloat16"], 4: _FLOAT32, 8: _FLOAT64}


def evenly(places: Sequence[int], step: int) -> tuple[int, int] | None:
    """Return (where block 0 is or would be, the exception) for blocks that are ``step`` apart but for one.

    The exception is -1 where there is none; the result is None where there are two or more.
    """
    for reference in range(min(2, len(places))):
        first = places[reference] - reference * step
        others = [q for q, place in enumerate(places) if place != first + q * step]
        if len(others) < 2:
            return first, others[0] if others else -1
    return None


class CupyShardOps(CupyLaunch):
    """The operations that optimiser, communication and checksums use."""

    _host: NumpyOps | None = None  # what draws initial values

    def _ordered_sum(self, blocks: Sequence[Array], out: Array, add: bool, bracket: int) -> None:
        if not blocks or not out.size:
            if not add:
                self._fill(out, 0.0)
            return
        kind, n, grid = blocks[0].dtype, out.size, self._grid(out.size)
        found = self._in_a_row(blocks) if all(block.dtype == kind for block in blocks) else None
        if found is not None:
            row, own = found
            self._launch("ordered_sum", kind, kind, grid, row, blocks[own], out, n, len(blocks), own, add, bracket)
            return
        if bracket > 1:
            raise ShapeError(
                f"ordered_sum was given brackets of {bracket} blocks that lie apart or are of several types; it takes "
                "blocks of one type, one behind another but for one of them"
            )
        for q, block in enumerate(blocks):
            kind = block.dtype
            self._launch("accumulate", kind, kind, grid, block, out, n, add or q > 0, operation="ordered_sum")

    def _in_a_row(self, blocks: Sequence[Any]) -> tuple[Any, int] | None:
        """Return (the array in which all blocks but one lie one behind another, that one); None where they do not.

        Ranks' blocks lie so in a receive buffer, but for this rank's own, which was not sent and lies elsewhere.
        """
        n, step = blocks[0].size, blocks[0].nbytes
        found = evenly([block.data.ptr for block in blocks], step)
        if found is None:
            return None
        first, own = found
        last = max((q for q in range(len(blocks)) if q != own), default=0)
        memory = blocks[last].data.mem
        start, stop = first - memory.ptr, first + (last + 1) * step - memory.ptr
        if start < 0 or stop > memory.size:
            return None
        cupy = self.gpu.cupy
        row = cupy.ndarray(((last + 1) * n,), blocks[0].dtype, memptr=cupy.cuda.MemoryPointer(memory, start))
        return row, own

    def _square_sums(self, x: Array, holes: Sequence[tuple[int, int]], out: Array) -> None:
        if not out.size:
            return
        ranges: Any = self._no_ranges
        if holes:
            key = tuple(holes)
            ranges = self._known.get(key)
            if ranges is None:
                ranges = self._table(key, np.array(key, np.int64).reshape(-1))
        self._launch("square_sums", x.dtype, x.dtype, out.size, x, ranges, out, out.size, len(holes))

    def _sum64(self, x: Array, out: Array) -> None:
        self._launch("sum64", x.dtype, x.dtype, 1, x, out, x.size)

    def _exact_sum(self, values: Array, out: Array) -> None:
        if values.size:
            self._launch("exact_sum", _FLOAT64, _FLOAT64, self._grid(values.size), values, out, values.size)

    def _adamw(
        self, param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, cast: Array | None, step: AdamWStep
    ) -> None:
        parts = step.segments
        if not parts or not param.size:
            return
        bounds = self._known.get(("bounds", parts))
        if bounds is None:
            bounds = self._table(("bounds", parts), np.array([part[:2] for part in parts], np.int64).reshape(-1))
        decays = self._known.get(("decays", parts))
        if decays is None:
            decays = self._table(("decays", parts), np.array([part[2] for part in parts], np.float64))
        kind = param.dtype if cast is None else cast.dtype
        arrays = (param, grad, exp_avg, exp_avg_sq) if cast is None else (param, grad, exp_avg, exp_avg_sq, cast)
        # Scalars are worked out in double, as NumpyShardOps._adamw does, and rounded once to the arrays' type.
        self._launch(
            "adamw" if cast is None else "adamw_cast",
            kind,
            kind,
            self._grid(param.size),
            *arrays,
            bounds,
            decays,
            len(parts),
            param.size,
            step.factor,
            step.lr / step.correction1,
            step.lr,
            step.beta1,
            1.0 - step.beta1,
            step.beta2,
            1.0 - step.beta2,
            step.eps,
            1.0 / math.sqrt(step.correction2),
            operation="adamw",
        )

    def _normal(self, out: Array, draw: Draw, std: float) -> None:
        # Drawn on the host: a GPU's cosine has other last bits, and initial values are the same on every backend.
        if out.dtype not in (_FLOAT32, _FLOAT64) or not out.flags.c_contiguous:
            raise ShapeError(
                f"normal was given out of {out.dtype} with strides {out.strides}; it takes contiguous float32 or "
                "float64 arrays"
            )
        if self._host is None:
            self._host = NumpyOps()
        host = self._host

        def write(chunk: Array, start: int) -> None:
            host._normal(chunk, draw._replace(first=draw.first + start), std)

        self._transfers.send(out, write)

    def _fingerprint(self, x: Array, draw: Draw) -> int:
        if not x.size:
            return 0
        kind = x.dtype if x.dtype in KINDS else _BITS.get(x.itemsize)
        if kind is None:
            raise ShapeError(f"fingerprint was given x of {x.dtype}; it takes elements of 2, 4 or 8 bytes")
        total = self._temp(0, 1, _UINT64)
        self._memset(total, 0)
        start = (draw.first * _PLACE + draw.stream) % 2**64
        bits = x if x.dtype == kind else x.view(kind)
        self._launch("fingerprint", kind, kind, self._grid(x.size), bits, total, x.size, start)
        return int(self.fetch(total)[0])
