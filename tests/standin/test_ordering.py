from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.standin import Trace, installed, ordering
from tests.standin.small import Pair, add, compiled_kernel, device_array, fetched, pinned, put


def conflicts_of(program, **settings):
    trace = Trace()
    with installed(trace, **settings):
        program(trace)
    return ordering.check(trace)


@pytest.mark.parametrize("late", ["", "needed", "others"])
def test_a_program_that_is_ordered(late):
    assert conflicts_of(lambda trace: Pair(trace).run(5), late=late) == []


@pytest.mark.parametrize(
    ("without", "buffer", "first", "second"),
    [
        ("ready", "batch+0", "stream 2 (copies): copy host to device (write)", "stream 1 (compute): add (read)"),
        ("early", "batch+0", "stream 2 (copies): copy host to device (write)", "stream 1 (compute): add (read)"),
        ("used", "batch+0", "stream 1 (compute): add (read)", "stream 2 (copies): copy host to device (write)"),
        ("up", "pinned batch+0", "stream 2 (copies): copy host to device (read)", "main thread: host write (write)"),
    ],
)
def test_an_order_that_is_missing(without, buffer, first, second):
    conflicts = conflicts_of(lambda trace: Pair(trace, without).run())
    wanted = (buffer, first, second)
    found = [c for c in conflicts if (c.buffer, c.first.split(" at ")[0], c.second.split(" at ")[0]) == wanted]
    assert found, conflicts
    assert str(found[0]).endswith("not ordered") or "times" in str(found[0])
    assert "at small.py:" in found[0].first


def test_a_result_that_the_host_reads_too_early():
    def program(trace, waits):
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        x, host = put(np.ones(4, np.float32), stream), pinned(4)
        cupy.cuda.runtime.memcpyAsync(host.ctypes.data, x.data.ptr, 16, 2, stream.ptr)
        if waits:
            stream.synchronize()
        trace.host_access(host, write=False)
        stream.synchronize()

    assert conflicts_of(lambda trace: program(trace, True)) == []
    (conflict,) = conflicts_of(lambda trace: program(trace, False))
    assert "copy device to host (write)" in conflict.first and "host read" in conflict.second


def test_asking_whether_it_is_done_orders_nothing():
    def program(trace):
        import cupy

        one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        x, event = put(np.ones(4, np.float32), one), cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, 16, one.ptr)
        event.record(one)
        assert event.done and one.done
        cupy.cuda.runtime.memsetAsync(x.data.ptr, 1, 16, two.ptr)

    assert len(conflicts_of(program)) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_is_freed_while_it_is_in_use(waits):
    def program(trace):
        import cupy

        stream, x = cupy.cuda.Stream(non_blocking=True), device_array(4)
        cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, 16, stream.ptr)
        if waits:
            stream.synchronize()
        cupy.cuda.runtime.free(x.data.ptr)

    conflicts = conflicts_of(program)
    assert [c.second.split(" at ")[0] for c in conflicts] == ([] if waits else ["main thread: free (write)"])


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_that_goes_while_a_copy_reads_it(waits):
    def program(trace):
        import cupy

        stream, x, host = cupy.cuda.Stream(non_blocking=True), device_array(4), pinned(4)
        cupy.cuda.runtime.memcpyAsync(x.data.ptr, host.ctypes.data, 16, 1, stream.ptr)
        if waits:
            stream.synchronize()
        del host

    assert len(conflicts_of(program)) == (0 if waits else 1)


def test_columns_of_one_matrix_on_two_streams():
    def program(trace, width):
        import cupy

        one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        x = put(np.zeros((8, 16), np.float32), one)
        host = pinned(8 * 8)
        for stream, column in ((one, 0), (two, width)):
            cupy.cuda.runtime.memcpy2DAsync(
                x[:, column:].data.ptr, 64, host.ctypes.data, 32, 32, 8, 1, stream.ptr
            )
        cupy.cuda.Device().synchronize()

    assert conflicts_of(lambda trace: program(trace, 8)) == []
    assert len(conflicts_of(lambda trace: program(trace, 7))) == 1


def test_scratch_of_one_stream_used_on_two():
    def program(trace):
        import cupy

        one, two = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        kernel, x = compiled_kernel("add"), put(np.ones(4, np.float32), one)
        scratch = device_array(4)
        trace.label(scratch.data.ptr, 16, "scratch")
        for stream in (one, two):
            add(kernel, x, x, scratch, stream)

    (conflict,) = conflicts_of(program)
    assert conflict.buffer == "scratch+0"


def test_one_cublas_handle_on_two_streams():
    def program(trace):
        import cupy
        from cupy.cuda import cublas

        handle, scalars = cublas.create(), np.array([1, 0], np.float32).ctypes
        for _ in range(2):
            stream = cupy.cuda.Stream(non_blocking=True)
            x, out = put(np.ones((2, 2), np.float32), stream), device_array(4)
            with stream:
                cublas.gemmEx(
                    handle, 0, 0, 2, 2, 2, scalars.data, x.data.ptr, 0, 2, x.data.ptr, 0, 2, scalars.data + 4,
                    out.data.ptr, 0, 2, 68, -1,
                )  # fmt: skip

    (conflict,) = conflicts_of(program)
    assert "workspace" in conflict.buffer


@pytest.mark.parametrize("handed_over", [True, False])
def test_threads(handed_over):
    """A thread copies what another one has prepared; a token is all that orders them."""

    def program(trace):
        import cupy

        stream, x, host = cupy.cuda.Stream(non_blocking=True), device_array(4), pinned(4)
        told, done = threading.Event(), threading.Event()
        tokens = []

        def body():
            told.wait()
            trace.receive(tokens[0], "queue")
            cupy.cuda.runtime.memcpyAsync(x.data.ptr, host.ctypes.data, 16, 1, stream.ptr)
            stream.synchronize()
            done.set()

        early = trace.send()
        thread = threading.Thread(target=body, name="copier")
        thread.start()
        trace.host_access(host, write=True)
        host[:] = 1
        tokens.append(trace.send() if handed_over else early)
        told.set()
        done.wait()
        thread.join()
        assert (fetched(x, stream) == 1).all()

    conflicts = conflicts_of(program)
    if handed_over:
        assert conflicts == []
    else:
        assert any("main thread: host write" in c.first and "copier" in c.second for c in conflicts)


def test_two_threads_on_one_stream_and_one_event():
    def program(trace):
        import cupy

        stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
        x = device_array(8)
        thread = threading.Thread(
            target=lambda: (cupy.cuda.runtime.memsetAsync(x[4:].data.ptr, 0, 16, stream.ptr), event.record(stream)),
            name="other",
        )
        thread.start()
        cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, 16, stream.ptr)
        event.synchronize()
        thread.join()

    buffers = {conflict.buffer for conflict in conflicts_of(program)}
    assert any(buffer == "the order of what is put on stream 1" for buffer in buffers)
    assert any(buffer.startswith("the event first used at") for buffer in buffers)


def test_a_record_can_be_kept(tmp_path):
    trace = Trace("kept")
    with installed(trace):
        Pair(trace, "used").run()
    trace.save(tmp_path / "trace")
    assert ordering.check(Trace.load(tmp_path / "trace")) == ordering.check(trace) != []
    with pytest.raises(AssertionError, match="kept: batch"):
        ordering.assert_ordered(trace)
