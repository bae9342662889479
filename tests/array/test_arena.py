import numpy as np
import pytest

from mpishard.array.arena import CATEGORIES, REGION, Arena
from mpishard.array.dtypes import address
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.numpy_tiles import SCRATCH
from mpishard.array.shape_ops import ShapeOps
from mpishard.errors import ArenaError

F32, F64, I64 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64)


def arena(saved=1024, workspace=1024, poison=False):
    return Arena(NumpyOps(), {"saved": saved, "workspace": workspace}, poison)


def test_arrays_of_a_stack_are_aligned_and_apart():
    stack = arena(saved=4096).saved
    pushed = [
        stack.push(shape, kind) for shape, kind in (((3,), F32), ((2, 5), F64), ((), F32), ((0, 3), F32), ((7,), I64))
    ]
    assert [a.shape for a in pushed] == [(3,), (2, 5), (), (0, 3), (7,)]
    assert [a.dtype for a in pushed] == [F32, F64, F32, F32, I64]
    assert all(address(a) % 64 == 0 and a.flags.c_contiguous for a in pushed if a.size)
    for n, array in enumerate(pushed):
        array[...] = n
    assert all((array == n).all() for n, array in enumerate(pushed))


def test_cut_gives_back_and_the_next_push_takes_the_same_place():
    stack = arena().saved
    first = stack.push((4,), F32)
    top = stack.top
    second = stack.push((4,), F32)
    stack.cut(top)
    assert address(stack.push((4,), F32)) == address(second) != address(first)
    assert stack.peak == 128


def test_frames_nest_and_end_with_errors_too():
    stack = arena().workspace
    with stack.frame():
        stack.push((16,), F32)
        with pytest.raises(KeyError), stack.frame():
            stack.push((16,), F32)
            raise KeyError
        assert stack.top == 64
    assert stack.top == 0
    assert stack.peak == 128


def test_peaks_are_of_the_stacks():
    memory = arena()
    memory.saved.push((3,), F64)
    with memory.workspace.frame():
        memory.workspace.push((100,), np.dtype(np.uint8))
    assert memory.peaks() == {"saved": 64, "workspace": 128}


def test_more_than_was_planned_raises():
    stack = arena(saved=128).saved
    stack.push((16,), F32)
    stack.push((16,), F32)
    with pytest.raises(
        ArenaError, match="saved: 192 bytes are needed and 128 were planned; the step that runs is not the step"
    ):
        stack.push((1,), F32)


def test_nothing_was_planned():
    with pytest.raises(ArenaError, match="workspace: 64 bytes are needed and 0 were planned"):
        arena(workspace=0).workspace.push((1,), F32)


def test_poison_fills_what_is_taken_back():
    memory = arena(poison=True)
    below = memory.saved.push((2,), F32)
    below[...] = 5
    with memory.saved.frame():
        for kind in (np.float16, np.float32, np.float64):
            array = memory.saved.push((3,), np.dtype(kind))
            assert np.isnan(array).all()
            array[...] = 1
        kept = array
    assert np.isnan(kept).all()
    assert (below == 5).all()
    whole = memory.saved.push((3,), I64)
    assert (whole == -1).all()


def test_without_poison_nothing_is_filled():
    memory = arena()
    with memory.saved.frame():
        array = memory.saved.push((3,), F32)
        array[...] = 1
    assert (array == 1).all()


def test_reserved_memory_is_counted_by_category():
    memory = arena(poison=True)
    assert set(memory.held()) == set(memory.reserved()) == {*CATEGORIES, REGION}
    parameters = memory.reserve("parameters", 7, F32)
    assert parameters.shape == (7,) and np.isnan(parameters).all()
    memory.reserve("parameters", 3, F64)
    memory.saved.push((3,), F32)
    held = memory.held()
    assert held["parameters"] == 2 * 64  # 7 * 4 and 3 * 8 bytes, each at a multiple of 64
    assert held["saved"] == 1024
    assert held["workspace"] == 1024 + NumpyOps.own_bytes
    assert NumpyOps.own_bytes == SCRATCH
    assert held["gradients"] == 0
    with pytest.raises(KeyError):
        memory.reserve("elsewhere", 1, F32)


def test_each_category_is_one_block_and_the_transport_takes_the_region():
    taken = []

    def allocate(count, kind):
        taken.append(np.zeros(count, kind))
        return taken[-1]

    planned = Arena(ShapeOps(), None)
    for memory in (planned, None):
        memory = memory or Arena(NumpyOps(), planned.peaks(), True, planned.reserved(), allocate)
        one, other = memory.reserve(REGION, 9, F32), memory.reserve(REGION, 3, F64)
        memory.reserve("workspace", 5, F32)
        with memory.workspace.frame():
            pushed = memory.workspace.push((3,), F32)
    assert memory.held() == planned.held() | {"workspace": 128 + NumpyOps.own_bytes}
    region, *rest = (array for array in taken if array.size)
    assert not rest  # the other categories are not a transport's
    assert region.nbytes == 128 and np.shares_memory(one, region) and np.shares_memory(other, region)
    assert np.isnan(one).all() and np.isnan(other).all()
    assert address(other) - address(one) == 64
    assert not np.shares_memory(pushed, region)
    with pytest.raises(ArenaError, match="region: 192 bytes are to be reserved and 128 were planned"):
        memory.reserve(REGION, 1, F32)


def test_a_peak_can_be_taken_anew():
    stack = arena().saved
    stack.push((16,), F32)
    with stack.frame():
        stack.push((16,), F32)
    assert stack.peak == 128
    stack.restart()
    assert stack.peak == stack.top == 64
    with stack.frame():
        stack.push((1,), F32)
    assert stack.peak == 128


def test_spoil_only_where_poison_is_on():
    for poison in (True, False):
        array = np.ones(3)
        arena(poison=poison).spoil(array)
        assert np.isnan(array).all() == poison


def test_a_plan_on_shapes_has_no_bound_and_the_same_peaks():
    def use(memory):
        with memory.workspace.frame():
            memory.workspace.push((1000, 1000, 1000), F64)
        memory.saved.push((5,), F32)
        return memory.peaks()

    shapes = ShapeOps(own_bytes=77)
    memory = Arena(shapes, None)
    assert use(memory) == {"saved": 64, "workspace": 8 * 10**9}
    assert memory.held()["workspace"] == 8 * 10**9 + 77
