"""The machine that the stand-in pretends to have: devices, memory, streams with their work, and who looks on.

[Note: when work runs]
``submit`` puts an operation on a stream. On an *eager* machine it runs at once. On a *late* one it stays in the
stream's queue until somebody waits for it: an event or stream is synchronised, or asked again and again whether it is
done. What is waited for runs, with what it waits for itself, and no more (``late="needed"``), or all other streams run
first, as far as they can without it (``late="others"``). A stream whose queue holds an operation that
meets other ranks runs by itself after ``PATIENCE`` seconds, as a device would: the other ranks may be waiting.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.standin.memory import Block, DeviceFault, Memory
from tests.standin.regions import Pieces

__all__ = ["Access", "Machine", "Operation", "Work", "here"]

#: Seconds after which an operation that meets other ranks runs though nobody waits for it here.
PATIENCE = 0.03
#: How often ``done`` may say no before the work is run.
POLLS = 50

#: (block, bytes, whether they are written)
Access = tuple[Block, Pieces, bool]


@dataclass(eq=False)
class Operation:
    """Work on a stream; ``after`` are places in other streams that it waits for."""

    name: str
    run: Callable[[], None]
    after: tuple[Work, int] | None = None
    meets: bool = False
    born: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Work:
    """A stream as the machine sees it; equal to its handle in the program's hands."""

    handle: int
    device: int
    name: str
    queue: deque[Operation] = field(default_factory=deque)
    submitted: int = 0
    executed: int = 0
    polls: int = 0
    destroyed: bool = False
    lock: Any = field(default_factory=threading.RLock)
    #: place -> when the operation before it was over, on a late machine
    ends: dict[int, float] = field(default_factory=dict)


class Machine:
    """See :func:`tests.standin.installed` for the arguments."""

    def __init__(
        self, devices: int = 1, capacity: int = 2**32, trace: Any = None, strict: bool = False, late: str = ""
    ) -> None:
        if late not in ("", "needed", "others"):
            raise ValueError(f"late is {late!r}; choose '', 'needed' or 'others'")
        self.devices, self.trace, self.strict, self.late = devices, trace, strict, late
        self.memory = Memory(capacity)
        self.streams: dict[int, Work] = {}
        self.local = threading.local()
        self.failure: BaseException | None = None
        self.counts: dict[str, int] = {}
        self._lock = threading.RLock()
        self._handle = 0x5D000000
        self._closed = threading.Event()
        self._null: dict[int, Work] = {}
        if late:
            threading.Thread(target=self._drain_slowly, name="standin drain", daemon=True).start()

    # --- devices and streams

    @property
    def device(self) -> int:
        """The current device of the calling thread."""
        return getattr(self.local, "device", 0)

    @device.setter
    def device(self, number: int) -> None:
        self.local.device = number

    def handle(self) -> int:
        with self._lock:
            self._handle += 16
            return self._handle

    def new_stream(self) -> Work:
        work = Work(self.handle(), self.device, "")
        work.name = f"stream {len(self.streams) + 1}"
        self.streams[work.handle] = work
        return work

    def work(self, handle: int, what: str) -> Work:
        """Return the stream with the handle; 0 is the null stream of the current device.

        Raises:
            DeviceFault: there is none, or it is another device's.
        """
        if handle == 0:
            with self._lock:
                return self._null.setdefault(self.device, Work(0, self.device, f"null stream {self.device}"))
        work = self.streams.get(handle)
        if work is None or work.destroyed:
            raise DeviceFault(f"{what}: {handle:#x} is no live stream")
        return work

    def current(self) -> Any:
        """The current stream of the calling thread on its current device (a program's Stream); None for null."""
        return getattr(self.local, "current", {}).get(self.device)

    def current_work(self, what: str) -> Work:
        stream = self.current()
        return self.work(stream.ptr if stream is not None else 0, what)

    # --- work

    def submit(
        self,
        work: Work,
        name: str,
        accesses: list[Access],
        run: Callable[[], None],
        meets: bool = False,
    ) -> None:
        """Put an operation on a stream."""
        self.counts[name] = self.counts.get(name, 0) + 1
        if self.trace is not None:
            self.trace.enqueued(work, name, accesses)
        if not self.late:
            with work.lock:
                work.submitted += 1
                run()
                work.executed += 1
            return
        blocks = [block for block, _, _ in accesses]

        def checked() -> None:
            for block in blocks:
                if block.freed:
                    raise DeviceFault(f"{name}: {block} was freed before the device came to it")
            run()

        self._put(work, Operation(name, checked, meets=meets))

    def wait_for(self, work: Work, other: Work, place: int) -> None:
        """Let a stream wait for what another one held up to a place."""
        if self.late and other is not work and other.executed < place:
            self._put(work, Operation("wait", lambda: None, after=(other, place)))

    def _put(self, work: Work, operation: Operation) -> None:
        with self._lock:
            work.queue.append(operation)
            work.submitted += 1

    def finish(self, work: Work, place: int) -> None:
        """Return when a stream has executed its operations up to a place."""
        if self.failure is not None:
            raise self.failure
        if self.late == "others" and work.executed < place:
            for other in [*self.streams.values(), *self._null.values()]:
                if other is not work:
                    self._advance(other)
        while work.executed < place:
            # Who has the lock may come to the place, and then wait for the stream whose lock is held here.
            if not work.lock.acquire(timeout=0.002):
                continue
            try:
                if work.executed < place:
                    operation = work.queue[0]
                    if operation.after is not None:
                        self.finish(*operation.after)
                    self._run(work)
            finally:
                work.lock.release()

    def is_done(self, work: Work, place: int) -> bool:
        """What a query says: on a late machine no for some time."""
        if work.executed >= place:
            return True
        work.polls += 1
        if work.polls > POLLS:
            work.polls = 0
            self.finish(work, place)
        return work.executed >= place

    def finish_all(self) -> None:
        for work in [*self.streams.values(), *self._null.values()]:
            self.finish(work, work.submitted)

    def close_down(self) -> None:
        self._closed.set()

    def _run(self, work: Work) -> None:
        operation = work.queue[0]
        operation.run()
        with self._lock:
            work.queue.popleft()
            work.executed += 1
            work.ends[work.executed] = time.perf_counter()

    def _advance(self, work: Work) -> None:
        """Run a stream as far as it can without others and without other ranks."""
        if not work.lock.acquire(blocking=False):
            return
        try:
            while work.queue:
                operation = work.queue[0]
                if operation.meets or (operation.after and operation.after[0].executed < operation.after[1]):
                    return
                self._run(work)
        finally:
            work.lock.release()

    def _drain_slowly(self) -> None:
        while not self._closed.wait(PATIENCE / 3):
            for work in list(self.streams.values()):
                with self._lock:
                    due = [i for i, op in enumerate(work.queue) if op.meets and time.monotonic() - op.born > PATIENCE]
                    place = work.executed + due[-1] + 1 if due else 0
                try:
                    self.finish(work, place)
                except BaseException as error:
                    self.failure = self.failure or error
                    traceback.print_exc()
                    return


_installed: list[Machine] = []


def here() -> Machine:
    """Return the machine that is installed.

    Raises:
        DeviceFault: none is.
    """
    if not _installed:
        raise DeviceFault("the stand-in is not installed (any more)")
    return _installed[-1]


@contextmanager
def switched_on(machine: Machine) -> Iterator[Machine]:
    _installed.append(machine)
    try:
        yield machine
    finally:
        _installed.remove(machine)
