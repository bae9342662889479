import numpy as np
import pytest

from mpishard.array.ops import Draw
from mpishard.array.shape_ops import ShapeOps
from mpishard.errors import ArenaError

F32 = np.dtype(np.float32)


def test_arrays_cannot_be_written():
    array = ShapeOps().empty(10, F32)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        np.add(array, 1, out=array[:])
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_arrays_are_apart_and_views_keep_their_place():
    ops = ShapeOps()
    first, second = ops.empty(10, F32), ops.empty(5, F32)
    assert not np.shares_memory(first, second)
    view = first[2:8].reshape(2, 3).T
    assert view.shape == (3, 2)
    assert np.shares_memory(view, first)
    assert view.__array_interface__["data"][0] == first.__array_interface__["data"][0] + 8


def test_huge_arrays_cost_nothing():
    array = ShapeOps().empty(10**12, F32)
    assert array.nbytes == 4 * 10**12
    assert array[10**11 :].reshape(-1, 10**5).shape == (9 * 10**6, 10**5)


def test_the_address_space_has_an_end():
    ops = ShapeOps()
    with pytest.raises(ArenaError, match=r"a plan of more than \d+ bytes does not fit the address space"):
        ops.empty(1 << 46, F32)


def test_costs_add_up():
    ops = ShapeOps(own_bytes=5)
    assert ops.own_bytes == 5
    a, b, out = (ops.empty(n, F32).reshape(shape) for n, shape in ((6, (2, 3)), (15, (3, 5)), (10, (2, 5))))
    ops.matmul(a, b, out)
    assert ops.costs["matmul"] == [1, 2 * 2 * 3 * 5, 4 * (6 + 15 + 10)]
    ops.matmul(a, b, out, add=True)
    assert ops.costs["matmul"] == [2, 4 * 2 * 3 * 5, 4 * (2 * (6 + 15 + 10) + 10)]
    ops.linear(a, b, ops.empty(5, F32), out)
    assert ops.costs["add"] == [1, 10, 4 * (10 + 5 + 10)]
    assert set(ops.costs) == {"matmul", "add"}


def test_a_fingerprint_of_shapes_is_nothing():
    ops = ShapeOps()
    assert ops.fingerprint(ops.empty(3, F32), Draw(0, 0, 0, 0)) == 0
