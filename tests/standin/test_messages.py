"""MPI and mpishard's pump in the record, in a process of its own: one rank shows what is read and written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin import Trace, mutate, ordering

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import sys
import numpy as np
import cupy
from cupy.cuda import Event, Stream, runtime
from mpi4py import MPI
from mpishard.comm.pump import Flight, Pump
from tests.standin.machine import here
from tests.standin.small import device_array, fetched, pinned, put

without = sys.argv[1]
compute, copies, event = Stream(non_blocking=True), Stream(non_blocking=True), Event(disable_timing=True)
trace, comm = here().trace, MPI.COMM_SELF.Dup()
trace.name_stream(compute, "compute")
x, y = device_array(8), device_array(8)
send, receive = pinned(8), pinned(8)
for array, name in ((x, "x"), (y, "y")):
    trace.label(array.data.ptr, array.nbytes, name)
for array, name in ((send, "send"), (receive, "receive")):
    trace.label(array.ctypes.data, array.nbytes, name)

class Wire:
    def __init__(self, array):
        self.nbytes = array.nbytes
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": "<f4", "data": (array.data.ptr, False), "version": 3,
        }
"""
#: Computed on a stream, sent by MPI on device memory in a communication thread, used on the stream.
DEVICE = """
pump = Pump(True)
for step in range(3):
    runtime.memsetAsync(x.data.ptr, step, 32, compute.ptr)
    event.record(compute)

    def post():
        if without != "ready":
            event.synchronize()
        comm.Allgather([Wire(x), 8, MPI.FLOAT], [Wire(y), 8, MPI.FLOAT])
        return []

    flight = Flight("all-gather", post)
    pump.submit(flight)
    if without != "finish":
        pump.finish(flight)
    else:
        flight.done.wait()
    runtime.memcpyAsync(x.data.ptr, y.data.ptr, 32, runtime.memcpyDeviceToDevice, compute.ptr)
pump.leave()
compute.synchronize()
"""
#: Pinned memory: copied down, sent by nonblocking MPI, copied up.
PINNED = """
for step in range(3):
    runtime.memsetAsync(x.data.ptr, step, 32, compute.ptr)
    runtime.memcpyAsync(send.ctypes.data, x.data.ptr, 32, runtime.memcpyDeviceToHost, compute.ptr)
    event.record(compute)
    if without != "left":
        event.synchronize()
    requests = [comm.Irecv([receive, 8, MPI.FLOAT], 0, 1), comm.Isend([send, 8, MPI.FLOAT], 0, 1)]
    if without == "arrived":
        runtime.memcpyAsync(y.data.ptr, receive.ctypes.data, 32, runtime.memcpyHostToDevice, copies.ptr)
    while not MPI.Request.Testall(requests):
        pass
    if without != "arrived":
        runtime.memcpyAsync(y.data.ptr, receive.ctypes.data, 32, runtime.memcpyHostToDevice, copies.ptr)
    if without != "landed":
        copies.synchronize()
copies.synchronize()
compute.synchronize()
"""


def run(folder, program, without=""):
    path = folder / "program.py"
    path.write_text(HEAD + program)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "PMIX", "HYDI"))}
    environment |= {"STANDIN_TRACE": str(folder), "PYTHONPATH": str(ROOT), "OMPI_MCA_osc": "^ucx"}
    command = [sys.executable, "-m", "tests.standin.run", str(path), without]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    trace = Trace.load(folder / "rank-0.trace")
    assert done.returncode == (1 if ordering.check(trace) else 0), done.stderr
    return trace, done.stderr


@pytest.mark.parametrize("program", [DEVICE, PINNED], ids=["device", "pinned"])
def test_programs_that_are_ordered(tmp_path, program):
    trace, errors = run(tmp_path, program)
    assert ordering.check(trace) == [] and errors == ""
    unneeded = {row.kind for row in mutate.survivors([trace])}
    assert unneeded <= {"thread start", "thread join", "stream synchronise"}


@pytest.mark.parametrize(
    ("program", "without", "buffer", "first", "second"),
    [
        (DEVICE, "ready", "x+0", "(compute): memset (write)", "'mpishard communication' of main thread: MPI Allgather"),
        (DEVICE, "finish", "y+0", "MPI Allgather (write)", "(compute): copy device to device (read)"),
        (PINNED, "left", "send+0", "copy device to host (write)", "MPI Isend posted by main thread: MPI Isend (read)"),
        (PINNED, "arrived", "receive+0", "MPI Irecv (write)", "copy host to device (read)"),
        (PINNED, "landed", "receive+0", "copy host to device (read)", "MPI Irecv (write)"),
    ],
)
def test_an_order_that_is_missing(tmp_path, program, without, buffer, first, second):
    trace, errors = run(tmp_path, program, without)
    found = [c for c in ordering.check(trace) if c.buffer == buffer and first in c.first and second in c.second]
    assert found and str(found[0]) in errors


@pytest.mark.parametrize("call", ["Allreduce(send, receive)", "Bcast_init([send, 8], 0)"])
def test_calls_that_are_not_recorded_are_refused(tmp_path, call):
    program = f"try:\n    comm.{call}\nexcept RuntimeError as error:\n    print(error, file=sys.stderr)\n"
    _, errors = run(tmp_path, program)
    assert "does not record it" in errors
