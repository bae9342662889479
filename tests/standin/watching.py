"""Recording what does not pass through the stand-in: threads, mpishard's pump, mpi4py. mpishard needs no hooks.

[Note: the boundaries]
- ``threading.Thread.start`` and ``join`` hand over, for every thread but the stand-in's own.
- ``Pump.submit`` hands over to ``Pump._post``, ``Flight.end`` to ``Pump.finish`` (mpishard/comm/pump.py).
- ``Transfers._copy`` and ``Transfers._receive`` (mpishard/array/cupy_host.py) tell what the host writes and reads in
  their pinned slots.
- Operations on NumPy arrays tell what they read and write, where these are in pinned memory; so do ``host_like`` and
  ``fetch`` (of such an array: itself) for who asks, and ``Transfers.upload`` for its source.
- ``MPI.COMM_WORLD``, ``MPI.COMM_SELF`` and ``MPI.Request`` of mpi4py are replaced by subclasses that record
  (messages.py); communicators duplicated or split from them record too.

Modules that are not imported yet are taken care of when they are.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from tests.standin.trace import path

__all__ = ["patched", "watched"]

#: Hand-overs are the sites of who asks the pump.
_PUMP = "comm/pump.py"


@contextmanager
def watched(trace: Any) -> Iterator[None]:
    """Record threads, the pump and MPI until the end of the block."""
    with ExitStack() as stack:
        _threads(trace, stack)
        stack.enter_context(_when_imported("mpishard.comm.pump", lambda module: _pump(trace, module, stack)))
        stack.enter_context(_when_imported("mpishard.array.cupy_host", lambda module: _transfers(trace, module, stack)))
        stack.enter_context(_when_imported("mpishard.array.ops", lambda module: _host_arrays(trace, module, stack)))
        stack.enter_context(_when_imported("mpishard.array.cupy_launch", lambda module: _fetches(trace, module, stack)))
        stack.enter_context(_when_imported("mpi4py.MPI", lambda module: _mpi(trace, module, stack)))
        yield


def patched(stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by ``make(of it)`` until the stack is left."""
    before = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, make(before))
    stack.callback(setattr, owner, name, before)


def _threads(trace: Any, stack: ExitStack) -> None:
    def start(before: Any) -> Any:
        @functools.wraps(before)
        def call(thread: threading.Thread) -> None:
            if not thread.name.startswith("standin"):
                thread.__dict__["_standin"] = (trace.send(), trace.agents[trace._thread()])
            before(thread)

        return call

    def join(before: Any) -> Any:
        @functools.wraps(before)
        def call(thread: threading.Thread, timeout: float | None = None) -> None:
            before(thread, timeout)
            agent = thread.__dict__.get("_standin_agent")
            if agent is not None and not thread.is_alive():
                trace.completed(agent, "thread join")

        return call

    patched(stack, threading.Thread, "start", start)
    patched(stack, threading.Thread, "join", join)


def _pump(trace: Any, module: Any, stack: ExitStack) -> None:
    def submit(before: Any) -> Any:
        @functools.wraps(before)
        def call(pump: Any, flight: Any) -> None:
            flight._standin_submitted = trace.send(_PUMP)
            before(pump, flight)

        return call

    def post(before: Any) -> Any:
        @functools.wraps(before)
        def call(pump: Any, flight: Any) -> None:
            sent = flight._standin_submitted
            trace.receive(sent, "hand-over to the communication thread", sent[2])
            before(pump, flight)

        return call

    def end(before: Any) -> Any:
        @functools.wraps(before)
        def call(flight: Any, error: BaseException | None = None) -> None:
            flight._standin_ended = trace.send()
            before(flight, error)

        return call

    def finish(before: Any) -> Any:
        @functools.wraps(before)
        def call(pump: Any, flight: Any) -> None:
            try:
                before(pump, flight)
            finally:
                ended = getattr(flight, "_standin_ended", None)
                trace.receive(ended, "hand-over from the communication thread", path(_PUMP))

        return call

    patched(stack, module.Pump, "submit", submit)
    patched(stack, module.Pump, "_post", post)
    patched(stack, module.Flight, "end", end)
    patched(stack, module.Pump, "finish", finish)


def _transfers(trace: Any, module: Any, stack: ExitStack) -> None:
    def copy(before: Any) -> Any:
        @functools.wraps(before)
        def call(transfers: Any, target: int, source: int, nbytes: int, kind: int, slot: Any) -> None:
            if source == slot.ptr:
                trace.host_access(slot.bytes[:nbytes], True)
            before(transfers, target, source, nbytes, kind, slot)

        return call

    def receive(before: Any) -> Any:
        @functools.wraps(before)
        def call(transfers: Any, flat: Any, slot: Any, start: int, stop: int) -> None:
            before(transfers, flat, slot, start, stop)
            trace.host_access(slot.bytes[: stop - start], False)

        return call

    def upload(before: Any) -> Any:
        @functools.wraps(before)
        def call(transfers: Any, host: Any, x: Any) -> None:
            trace.host_access(host, False)
            before(transfers, host, x)

        return call

    patched(stack, module.Transfers, "_copy", copy)
    patched(stack, module.Transfers, "upload", upload)
    patched(stack, module.Transfers, "_receive", receive)


#: operation -> (places of arrays that it reads, of one that it writes), for those used on arrays that are offloaded
_OPERATIONS = {"copy": ((0,), 1), "fill": ((), 0), "normal": ((), 0), "fingerprint": ((0,), -1)}


def _host_arrays(trace: Any, module: Any, stack: ExitStack) -> None:
    def told(name: str, before: Any) -> Any:
        reads, written = _OPERATIONS[name]

        @functools.wraps(before)
        def call(ops: Any, *args: Any) -> Any:
            result = before(ops, *args)
            for place in reads:
                _tell(trace, args[place], False)
            if written >= 0:
                _tell(trace, args[written], True)
            return result

        return call

    for name in _OPERATIONS:
        patched(stack, module.Ops, name, functools.partial(told, name))
    patched(stack, module.Backend, "host_like", functools.partial(_given, trace, True))
    patched(stack, module.Backend, "fetch", functools.partial(_given, trace, False))


def _fetches(trace: Any, module: Any, stack: ExitStack) -> None:
    patched(stack, module.CupyLaunch, "fetch", functools.partial(_given, trace, False))


def _given(trace: Any, write: bool, before: Any) -> Any:
    """Wrap what returns its argument itself where that is host memory, for the caller to read or write."""

    @functools.wraps(before)
    def call(ops: Any, x: Any) -> Any:
        found = before(ops, x)
        if found is x:
            _tell(trace, x, write)
        return found

    return call


def _tell(trace: Any, array: Any, write: bool) -> None:
    if type(array) is np.ndarray:
        trace.host_access(array, write)


def _mpi(trace: Any, module: Any, stack: ExitStack) -> None:
    from tests.standin.messages import recording_classes

    comm, request = recording_classes(trace, module)
    patched(stack, module, "COMM_WORLD", comm)
    patched(stack, module, "COMM_SELF", comm)
    patched(stack, module, "Request", lambda before: request)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as others would, and has something done when it has been executed."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def _when_imported(name: str, then: Callable[[Any], None]) -> Iterator[None]:
    if name in sys.modules:
        then(sys.modules[name])
        yield
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
