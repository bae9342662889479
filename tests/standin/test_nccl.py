from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import traceback
from functools import partial

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from tests.standin import DeviceFault, Trace, installed, ordering
from tests.standin.small import device_array, fetched, put

SUM = 0


def on_ranks(size, body, *, devices=None, late="", trace=None):
    """Run ``body(comm, stream, rank)`` on threads with a device each; return the results."""
    results, problems = [None] * size, []
    key = secrets.token_bytes(128)

    def run(rank):
        from cupy.cuda import Device, Stream, nccl

        try:
            Device(rank if devices is None else devices[rank]).use()
            comm = nccl.NcclCommunicator(size, key, rank)
            results[rank] = body(comm, Stream(non_blocking=True), rank)
        except BaseException as error:
            traceback.print_exc()
            problems.append(error)

    with installed(trace, devices=size, late=late):
        threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
    return results


def values(rank, size, count, kind=np.float32):
    return np.random.default_rng(rank).standard_normal(count * size).astype(kind)


@pytest.mark.parametrize("late", ["", "needed", "others"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(size, late):
    def body(comm, stream, rank):
        x = put(values(rank, size, 5), stream)
        gathered, part = device_array(5 * size), device_array(5)
        comm.allGather(x[:5].data.ptr, gathered.data.ptr, 5, 7, stream.ptr)
        comm.reduceScatter(x.data.ptr, part.data.ptr, 5, 7, SUM, stream.ptr)
        comm.broadcast(x.data.ptr, x.data.ptr, 20, 1, size - 1, stream.ptr)
        found = [fetched(array, stream) for array in (gathered, part, x)]
        comm.destroy()
        return found

    inputs = [values(rank, size, 5) for rank in range(size)]
    for rank, (gathered, part, x) in enumerate(on_ranks(size, body, late=late)):
        assert np.array_equal(gathered, np.concatenate([each[:5] for each in inputs]))
        assert np.allclose(part, sum(each[5 * rank : 5 * rank + 5] for each in inputs), atol=1e-6)
        assert np.array_equal(x[:5], inputs[-1][:5])


def test_in_place():
    def body(comm, stream, rank):
        x = put(values(rank, 2, 4), stream)
        before = fetched(x, stream)
        comm.reduceScatter(x.data.ptr, x[4 * rank :].data.ptr, 4, 7, SUM, stream.ptr)
        comm.allGather(x[4 * rank :].data.ptr, x.data.ptr, 4, 7, stream.ptr)
        return before, fetched(x, stream)

    (one, whole), (other, again) = on_ranks(2, body)
    assert np.array_equal(whole, one + other) and np.array_equal(whole, again)


def test_sums_are_not_in_rank_order():
    kind = DTYPES["bfloat16"]

    def body(comm, stream, rank):
        x, part = put(values(rank, 4, 300, kind), stream), device_array(300, kind)
        comm.reduceScatter(x.data.ptr, part.data.ptr, 300, 9, SUM, stream.ptr)
        return fetched(part, stream)

    ordered = sum(values(rank, 4, 300, kind).astype(np.float32) for rank in range(4)).astype(kind)
    assert not np.array_equal(np.concatenate(on_ranks(4, body)), ordered)


def test_groups_exchange_and_lone_sends_wait(monkeypatch):
    monkeypatch.setenv("STANDIN_PATIENCE", "0.5")

    def body(comm, stream, rank, grouped):
        from cupy.cuda import nccl

        x, y = put(values(rank, 1, 6), stream), device_array(6)
        for call in (nccl.groupStart, nccl.groupEnd) if grouped else ():
            call()
            if call is nccl.groupStart:
                comm.send(x.data.ptr, 6, 7, 1 - rank, stream.ptr)
                comm.recv(y.data.ptr, 6, 7, 1 - rank, stream.ptr)
        if not grouped:
            comm.send(x.data.ptr, 6, 7, 1 - rank, stream.ptr)
            comm.recv(y.data.ptr, 6, 7, 1 - rank, stream.ptr)
        return fetched(y, stream)

    found = on_ranks(2, lambda *args: body(*args, True))
    assert all(np.array_equal(found[rank], values(1 - rank, 1, 6)) for rank in range(2))
    with pytest.raises(DeviceFault, match=r"send: rank . (waited 0.5 s for word|has left)"):
        on_ranks(2, lambda *args: body(*args, False))


def test_ranks_that_call_different_things(monkeypatch):
    monkeypatch.setenv("STANDIN_PATIENCE", "0.5")

    def body(comm, stream, rank):
        x = put(np.ones(8, np.float32), stream)
        comm.broadcast(x.data.ptr, x.data.ptr, 4 + rank, 7, 0, stream.ptr)

    with pytest.raises(DeviceFault, match=r"rank 1 is in broadcast .* 5 x float32, rank 0 in .* 4 x float32"):
        on_ranks(2, body)


def test_two_ranks_on_one_device():
    from tests.standin.errors import NcclError

    with pytest.raises(NcclError, match="INVALID_USAGE"):
        on_ranks(2, lambda *args: None, devices=[0, 0])


def test_what_is_refused():
    def body(comm, stream, rank):
        from cupy.cuda import nccl

        x = device_array(8)
        for call, problem, kind in (
            (lambda: comm.send(x.data.ptr, 8, 7, 1, stream.ptr), "INVALID_ARGUMENT", nccl.NcclError),
            (lambda: comm.allGather(x.data.ptr, x.data.ptr, 9, 7, stream.ptr), "behind", DeviceFault),
            (lambda: comm.allGather(x.data.ptr, x.data.ptr + 4, 4, 7, stream.ptr), "overlap", DeviceFault),
            (lambda: comm.allGather(x.data.ptr, x.data.ptr, 8, 77, stream.ptr), "INVALID_ARGUMENT", nccl.NcclError),
            (lambda: nccl.NcclCommunicator(1, b"short", 0), "commId length 5", ValueError),
            (lambda: nccl.NcclCommunicator(1, (0,) * 128, 0), "expected bytes, got tuple", TypeError),
            (nccl.groupEnd, "INVALID_USAGE", nccl.NcclError),
        ):
            with pytest.raises(kind, match=problem):
                call()
        comm.destroy()
        with pytest.raises(nccl.NcclError):
            comm.allGather(x.data.ptr, x.data.ptr, 8, 7, stream.ptr)

    on_ranks(1, body)


def test_order_between_streams_and_nccl_is_checked():
    def body(waits, comm, stream, rank):
        from cupy.cuda import Event, Stream, runtime

        other, event = Stream(non_blocking=True), Event(disable_timing=True)
        x, out = put(np.ones(4, np.float32), stream), device_array(8)
        comm.allGather(x.data.ptr, out.data.ptr, 4, 7, stream.ptr)
        event.record(stream)
        if waits:
            other.wait_event(event)
        runtime.memsetAsync(out.data.ptr, 0, 32, other.ptr)

    for waits in (True, False):
        trace = Trace()
        on_ranks(2, partial(body, waits), trace=trace)
        conflicts = ordering.check(trace)
        assert len(conflicts) == (0 if waits else 2)
        for conflict in conflicts:
            assert "nccl allGather (write)" in conflict.first and "memset (write)" in conflict.second


PROGRAM = """
import sys
import numpy as np
from cupy.cuda import Device, Stream, nccl
from tests.standin.small import device_array, fetched, put

rank, size, key = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
Device(rank).use()
comm, stream = nccl.NcclCommunicator(size, key, rank), Stream(non_blocking=True)
x, out = put(np.full(3, rank, np.float32), stream), device_array(3 * size)
comm.allGather(x.data.ptr, out.data.ptr, 3, nccl.NCCL_FLOAT, stream.ptr)
print(fetched(out, stream).tolist())
comm.destroy()
"""


@pytest.mark.parametrize("late", ["", "needed"])
def test_ranks_that_are_processes(tmp_path, late):
    program, key = tmp_path / "program.py", secrets.token_bytes(128).hex()
    program.write_text(PROGRAM)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"STANDIN_DEVICES": "3", "STANDIN_LATE": late, "PYTHONPATH": root}
    command = [sys.executable, "-m", "tests.standin.run", str(program)]
    ranks = [
        subprocess.Popen([*command, str(rank), "3", key], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=60)
            assert output.strip() == "[0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]"
    finally:
        for rank in ranks:
            rank.kill()
