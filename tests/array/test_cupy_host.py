"""Memory of the GPU, and the way between it and the host: what is taken, what waits, and for what."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from mpishard.array.cupy_blas import workspace_bytes
from mpishard.array.cupy_host import SLOT
from mpishard.array.cupy_launch import SCRATCH, SMALL_SCRATCH, TABLES
from mpishard.array.cupy_ops import CupyOps
from mpishard.array.dtypes import DTYPES, address
from mpishard.errors import ShapeError
from tests.array.cupy_case import on_device, standing_in
from tests.standin import installed

F32 = DTYPES["float32"]


def numbers(kind, *shape):
    return np.random.default_rng(5).integers(0, 200, shape).astype(DTYPES[kind])


@pytest.fixture(scope="module")
def ops():
    with standing_in() as found:
        yield found


@pytest.fixture
def late():
    """A device that does nothing before somebody waits for it."""
    with standing_in(late="needed") as found:
        yield found


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (), (3, 5), (2, 0, 4), (2, 3, 4)])
def test_every_type_goes_to_the_gpu_and_back(ops, kind, shape):
    x = numbers(kind, *shape)
    there = ops.empty(x.size, x.dtype).reshape(shape)
    ops.upload(x, there)
    found = ops.fetch(there)
    assert (found.shape, found.dtype, found.tobytes()) == (shape, x.dtype, x.tobytes())
    assert isinstance(found, np.ndarray)
    assert ops.fetch(found) is found


@pytest.mark.parametrize("nbytes", [SLOT - 2, SLOT, SLOT + 2, 2 * SLOT, 3 * SLOT + 6])
def test_large_arrays_go_in_chunks_and_the_host_array_may_change_at_once(late, nbytes):
    x = np.random.default_rng(6).integers(0, 2**16, nbytes // 2).astype(np.uint16)
    before, there = x.tobytes(), late.empty(x.size, x.dtype)
    late.upload(x, there)
    x[:] = 7
    for start in range(0, 10, 2):  # the slots go round
        small = np.arange(start, start + 2, dtype=np.uint16)
        late.upload(small, there[start : start + 2])
        small[:] = 9
    found = late.fetch(there)
    assert found[:10].tolist() == list(range(10))
    assert found[10:].tobytes() == before[20:]


def test_views_of_the_host_and_of_the_gpu(ops):
    x = np.arange(60, dtype=np.float32).reshape(5, 12)
    there = on_device(ops, np.zeros((5, 12), np.float32))
    ops.upload(x[:, ::2], there[:, 3:9])
    assert (ops.fetch(there)[:, 3:9] == x[:, ::2]).all()
    assert (ops.fetch(there[1:4, 4:6]) == x[1:4, 2:6:2]).all()
    for operation, arguments in (("upload", (x[0, :6], there[0, ::2])), ("fetch", (there[0, ::2],))):
        with pytest.raises(ShapeError, match=rf"^{operation} was given x with strides \(8,\); its last axis must be"):
            getattr(ops, operation)(*arguments)


def test_upload_takes_equal_shapes_and_types(ops):
    there = ops.empty(6, F32)
    for host in (np.zeros(5, np.float32), np.zeros(6), np.zeros((2, 3), np.float32)):
        with pytest.raises(ShapeError, match=r"^upload was given host \(.*; it takes equal shapes and types$"):
            ops.upload(host, there)


def test_host_like_is_an_array_that_upload_takes(ops):
    x = ops.empty(6, DTYPES["bfloat16"]).reshape(2, 3)
    host = ops.host_like(x)
    assert (host.shape, host.dtype) == ((2, 3), DTYPES["bfloat16"])
    host[...] = 1
    ops.upload(host, x)
    assert (ops.fetch(x).astype(float) == 1).all()


def test_fetch_waits_for_its_own_stream_and_no_other(late):
    import cupy

    other = late.on(cupy.cuda.Stream(non_blocking=True))
    x, y = late.empty(4, F32), late.empty(4, F32)
    other.fill(y, 3.0)
    late.fill(x, 2.0)
    assert late.fetch(x).tolist() == [2.0] * 4
    assert other.stream._work.executed < other.stream._work.submitted
    assert other.fetch(y).tolist() == [3.0] * 4


def test_only_what_must_wait_waits(late):
    x = late.empty(8, F32)
    late.counters.reset()
    late.fill(x, 2.0)
    late.upload(np.zeros(4, np.float32), x[:4])
    late.add(x, x, x)
    assert late.counters.waits == 0
    assert (late.counters.launches, late.counters.copies) == (2, 1)
    late.fetch(x)
    assert late.counters.waits == 1


def test_memory_is_aligned_and_given_back():
    with installed() as machine:
        ops = CupyOps()
        held = machine.memory.used[0]
        assert (ops.counters.allocations, ops.counters.allocated_bytes) == (2, SCRATCH + TABLES)
        assert ops.own_bytes == SCRATCH + TABLES + workspace_bytes(90)
        assert held == SCRATCH + TABLES
        x = [ops.empty(count, F32) for count in (0, 1, 63, 64, 65)]
        assert [array.shape for array in x] == [(0,), (1,), (63,), (64,), (65,)]
        assert all(address(array) % 256 == 0 for array in x if array.size)
        assert machine.memory.used[0] - held == 256 * 4 + 512
        part = x[4][10:20].reshape(2, 5)[1]
        del x
        gc.collect()
        assert machine.memory.used[0] - held == 512, "a view keeps its memory, and that alone"
        del part
        gc.collect()
        assert machine.memory.used[0] == held
        assert ops.room == machine.memory.capacity - held


def test_no_room_is_a_memory_error_that_says_how_much_was_there():
    with installed(capacity=32 << 20) as machine:
        ops = CupyOps()
        free = machine.memory.capacity - machine.memory.used[0]
        with pytest.raises(
            MemoryError, match=rf"^{64 << 20} bytes were asked of Stand-in \(device 0\), which has {free}"
        ):
            ops.empty(16 << 20, F32)
        assert ops.empty(256, F32).size == 256
    with installed(capacity=1 << 20), pytest.raises(MemoryError, match=r"^8388608 bytes were asked of .*nvidia-smi"):
        CupyOps()


def test_another_error_of_the_device_is_no_lack_of_memory(ops, monkeypatch):
    def fails(nbytes):
        raise ops.gpu.runtime.CUDARuntimeError(700)

    monkeypatch.setattr(ops.gpu.runtime, "malloc", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        ops.empty(4, F32)


def test_operations_of_another_stream(late):
    """They share kernels, and nothing else; the streams meet where an event says so."""
    import cupy

    other = late.on(cupy.cuda.Stream(non_blocking=True))
    assert other.own_bytes == 2 * SMALL_SCRATCH
    assert other.gpu is late.gpu
    assert other.counters is not late.counters
    x, y = late.empty(1000, F32), late.empty(1000, F32)
    late.upload(np.ones(1000, np.float32), x)
    other.stream.wait_event(late.stream.record())
    found = []

    def work():
        other.add(x, x, y)
        other.copy(y, x)
        found.append(other.fetch(x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (found[0] == 2).all()
    late.stream.wait_event(other.stream.record())
    late.add(x, y, x)
    assert (late.fetch(x) == 4).all()


def test_any_thread_may_work_on_any_device():
    with installed(devices=3):
        import cupy

        ops, found = CupyOps(2), []
        assert ops.device == "cuda:2 Stand-in"
        cupy.cuda.runtime.setDevice(0)
        x = ops.empty(5, F32)

        def work():
            ops.fill(x, 4.0)
            found.append((ops.fetch(x), x.data.device_id))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        values, device = found[0]
        assert (values == 4).all()
        assert device == 2
        cupy.cuda.runtime.setDevice(0)


def test_kernels_are_compiled_once(monkeypatch):
    with installed():
        import cupy

        made, compiler = [], cupy.cuda.compiler
        plain = compiler.compile_using_nvrtc
        monkeypatch.setattr(
            compiler, "compile_using_nvrtc", lambda *given, **more: (made.append(given), plain(*given, **more))[1]
        )
        ops = CupyOps()
        other = ops.on(cupy.cuda.Stream(non_blocking=True))
        x, y = ops.empty(4, F32), ops.empty(4, F32)
        for these in (ops, other, ops):
            these.add(x, y, x)
            these.multiply(x, y, x)
            these.gelu(x, y)
        assert len(made) == 1
