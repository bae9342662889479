"""Programs that are ordered give the same on a late machine, and others do not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.standin import DeviceFault, installed
from tests.standin.small import Pair, device_array, pinned, put

LATE = ["", "needed", "others"]


@pytest.mark.parametrize("late", LATE)
def test_a_program_that_is_ordered(late):
    with installed(late=late):
        assert (Pair().run(5) == 15).all()


def test_work_waits_until_somebody_waits_for_it():
    with installed(late="needed"):
        import cupy

        stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
        x, host = put(np.ones(4, np.float32), stream), pinned(4)
        cupy.cuda.runtime.memcpyAsync(host.ctypes.data, x.data.ptr, 16, 2, stream.ptr)
        event.record(stream)
        cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, 16, stream.ptr)
        assert np.isnan(host).all() and not event.done and not stream.done
        event.synchronize()
        assert (host == 1).all() and event.done and not stream.done
        cupy.cuda.Device().synchronize()
        assert stream.done


def test_who_asks_long_enough_gets_the_work_done():
    with installed(late="needed"):
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        x, host = put(np.ones(4, np.float32), stream), pinned(4)
        cupy.cuda.runtime.memcpyAsync(host.ctypes.data, x.data.ptr, 16, 2, stream.ptr)
        while not stream.done:
            pass
        assert (host == 1).all()


@pytest.mark.parametrize(("late", "without"), [("needed", "ready"), ("needed", "up"), ("others", "used")])
def test_a_program_that_is_not_ordered(late, without):
    with installed(late=late):
        assert not (Pair(without=without).run(5) == 15).all()


def test_memory_that_is_freed_while_work_is_queued():
    with pytest.raises(DeviceFault, match="was freed before the device came to it"), installed(late="needed"):
        import cupy

        stream, x = cupy.cuda.Stream(non_blocking=True), device_array(4)
        cupy.cuda.runtime.memsetAsync(x.data.ptr, 0, 16, stream.ptr)
        cupy.cuda.runtime.free(x.data.ptr)


def test_events_that_were_never_recorded_order_nothing():
    with installed(late="needed"):
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.synchronize()
        cupy.cuda.Stream(non_blocking=True).wait_event(event)
        assert event.done


def test_times_need_events_that_are_over_and_timed():
    with installed(late="needed"):
        import cupy
        from cupy.cuda import runtime

        stream = cupy.cuda.Stream(non_blocking=True)
        first, second, untimed = cupy.cuda.Event(), cupy.cuda.Event(), cupy.cuda.Event(disable_timing=True)
        first.record(stream)
        runtime.memsetAsync(device_array(4).data.ptr, 0, 16, stream.ptr)
        second.record(stream)
        untimed.record(stream)
        with pytest.raises(runtime.CUDARuntimeError, match="not ready"):
            cupy.cuda.get_elapsed_time(first, second)
        stream.synchronize()
        assert cupy.cuda.get_elapsed_time(first, second) >= 0
        with pytest.raises(runtime.CUDARuntimeError, match="invalid resource handle"):
            cupy.cuda.get_elapsed_time(first, untimed)
