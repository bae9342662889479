"""Ordered sums in brackets: which numbers are added to which, on both backends, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.numpy_tiles import TILE
from mpishard.errors import ShapeError
from tests.array.cupy_case import on_device, standing_in

F32 = np.dtype(np.float32)
SHAPES = [(1, 1), (4, 1), (4, 2), (4, 4), (6, 3), (6, 2)]


def plainly(blocks: np.ndarray, before: np.ndarray | None, bracket: int) -> np.ndarray:
    """The sum as its definition reads, an addition at a time in float32."""
    wide, total = blocks.astype(F32), before
    for first in range(0, len(wide), bracket):
        part = wide[first]
        for block in wide[first + 1 : first + bracket]:
            part = part + block
        total = part if total is None else total + part
    assert total is not None
    return total


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("count", "bracket"), SHAPES)
def test_brackets_are_summed_by_themselves_first(count, bracket, add, kind):
    rng = np.random.default_rng(count)
    memory = rng.standard_normal((count, TILE + 3)).astype(DTYPES[kind])
    before = rng.standard_normal(TILE + 3).astype(F32)
    want = plainly(memory, before if add else None, bracket)
    out = before.copy()
    NumpyOps().ordered_sum(list(memory), out, add, bracket)
    assert out.tobytes() == want.tobytes()
    with standing_in() as ops:
        there, out = on_device(ops, memory[:, :300].copy()), on_device(ops, before[:300])
        ops.ordered_sum(list(there), out, add, bracket)
        assert ops.fetch(out).tobytes() == want[:300].tobytes()


def test_the_order_shows():
    """2**-24 is half of 1's last place: alone each is lost, two together are not."""
    blocks = [np.full(3, value, F32) for value in (1.0, 2.0**-24, 2.0**-24, 2.0**-24)]
    found = {}
    for bracket in (1, 2, 4):
        out = np.empty(3, F32)
        NumpyOps().ordered_sum(blocks, out, False, bracket)
        found[bracket] = float(out[0])
    assert found == {1: 1.0, 2: 1 + 2.0**-23, 4: 1.0}


def test_what_is_no_bracket_is_refused():
    blocks, out = [np.ones(3, F32)] * 3, np.zeros(3, F32)
    for bracket in (0, 2, 4, -1):
        with pytest.raises(ShapeError, match=rf"^ordered_sum was given 3 blocks and bracket {bracket}; it takes whole"):
            NumpyOps().ordered_sum(blocks, out, False, bracket)
    with standing_in() as ops:
        apart = [on_device(ops, np.ones(300, F32)) for _ in range(4)]
        with pytest.raises(ShapeError, match=r"^ordered_sum was given brackets of 2 blocks that lie apart"):
            ops.ordered_sum(apart, ops.empty(300, F32), False, 2)
