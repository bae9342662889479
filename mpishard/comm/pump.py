"""What makes the MPI calls: posts them in order, and tests them until they are complete.

[Note: progress]
MPI moves data only while it is called, so a thread of ours, the *pump*, owns the calls (that needs
MPI_THREAD_SERIALIZED, not MULTIPLE). It posts *flights* in order, tests them and sleeps between tests, longer
and longer; while a rank stands still for one it tests more eagerly. With nothing in flight it is asleep, so calls
that the program makes between steps never meet ours. Without a thread, who submits posts and who waits tests.

[Note: blocking posts]
What MPI does with a device's memory is asked for by blocking calls, because nonblocking collectives on it are not
promised (Open MPI's documentation of CUDA support lists them as unsupported). Such a post holds the pump until it is
over. Without a thread it would hold who submits; so there it is put off until somebody waits, and what is submitted
after it, too.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from mpishard.errors import CommError

__all__ = ["Flight", "Post", "Pump"]

T = TypeVar("T")
Post = Callable[[], list[MPI.Request]]

#: Seconds between tests while nobody stands still: first, after something was posted or has arrived, and at most;
#: each pause is _GROWTH times the one before. Ranks that begin a transfer answer each other in short turns; then
#: what lies in the sockets' buffers keeps a network busy. A test costs the computation 20 to 30 us of its core, nearly
#: all for waking up: at 0.2 ms throughout a tenth of a core. Over a link of 175 Mbit/s communicating took 10 % of its
#: own time from the computation with 1 ms, and 7 to 8 % with 3 ms.
_IDLE, _IDLE_MOST, _GROWTH = 2e-4, 3e-3, 1.5
#: While somebody stands still: tests in a row, then seconds between tests, which grow up to _IDLE.
_SPINS = 100
_EAGER = 2e-5
#: Seconds that an abort waits for the pump to come free.
_ABORT = 1.0


class Flight:
    """One thing that the pump does: posted once, then tested until its requests are complete.

    Args:
        name: for messages.
        post: starts it and returns its requests; none where it is over when this returns.
        blocking: ``post`` may wait for other ranks.
    """

    def __init__(self, name: str, post: Post, *, blocking: bool = False) -> None:
        self.name, self.post, self.blocking = name, post, blocking
        self.requests: list[MPI.Request] = []
        self.awaited = False
        self.done = threading.Event()
        self.arrived = 0.0
        self.error: BaseException | None = None

    def test(self) -> bool:
        """Return whether the flight is over, or has come further."""
        try:
            if MPI.Request.Testall(self.requests):
                self.end()
        except BaseException as error:
            self.end(error)
        return self.done.is_set()

    def end(self, error: BaseException | None = None) -> None:
        """Let go of the buffers and wake who waits."""
        self.error = error
        self.requests = []
        self.arrived = time.perf_counter()
        self.done.set()


class Pump:
    """Posts and tests flights for a communicator and those split from it, in a thread or in the caller."""

    def __init__(self, threaded: bool) -> None:
        self.users = 1
        self._flights: list[Flight] = []
        # Not a queue.SimpleQueue: in CPython 3.11 its get() can sleep for ever if its timeout is tiny.
        self._inbox: deque[Flight] = deque()
        self._bell = threading.Event()
        self._open = True
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="mpishard communication", daemon=True)
            self._thread.start()

    @property
    def threaded(self) -> bool:
        """Whether a thread of ours makes the calls."""
        return self._thread is not None

    def submit(self, flight: Flight) -> None:
        """Post a flight, after all that were submitted before it."""
        if not self._open:
            raise CommError(f"{flight.name}: the communicator is closed")
        if self._thread is None and not (flight.blocking or self._inbox):
            self._post(flight)
            self._test()
        elif self._thread is None:
            self._inbox.append(flight)  # until somebody waits
        else:
            self._inbox.append(flight)
            self._bell.set()

    def finish(self, flight: Flight) -> None:
        """Block until a submitted flight is over."""
        flight.awaited = True
        if self._thread is not None and not flight.done.is_set():
            self._bell.set()  # the pump may sleep between two tests
            flight.done.wait()
        while not flight.done.is_set() and self._inbox:
            self._post(self._inbox.popleft())
            self._test()
        tests = 0
        while not flight.done.is_set():
            tests = 0 if self._test() else tests + 1
            if pause := _pause(tests):
                time.sleep(pause)
        if flight.error is not None:
            raise CommError(f"{flight.name} failed in MPI: {flight.error}") from flight.error

    def do(self, name: str, post: Post, *, blocking: bool = False) -> None:
        """Submit a flight and wait for it."""
        flight = Flight(name, post, blocking=blocking)
        self.submit(flight)
        self.finish(flight)

    def call(self, name: str, function: Callable[[], T]) -> T:
        """Make a blocking MPI call where MPI calls are made."""
        results: list[T] = []

        def post() -> list[MPI.Request]:
            results.append(function())
            return []

        self.do(name, post)
        return results[0]

    def busy(self) -> bool:
        """Whether something was submitted that is not over."""
        return bool(self._inbox) or any(not flight.done.is_set() for flight in self._flights)

    def look(self) -> None:
        """Test once where no thread of ours does, for who waits for what is not MPI's."""
        if self._thread is None:
            self._test()

    def attempt(self, function: Callable[[], None]) -> None:
        """Make a call that does not return; give up when the pump is held by another call."""
        if self._thread is None:
            if threading.current_thread() is threading.main_thread():
                function()
        elif self._open:
            threading.Thread(target=self.call, args=("abort", function), daemon=True).start()
            time.sleep(_ABORT)

    def leave(self) -> None:
        """One communicator less; the last one ends the thread."""
        self.users -= 1
        if self.users == 0:
            self._open = False
            if self._thread is not None:
                self._bell.set()
                self._thread.join()

    def _loop(self) -> None:
        tests = 0
        while self._open:
            if not self._flights:
                self._bell.wait()
            elif tests and not any(flight.awaited for flight in self._flights):
                self._bell.wait(_idle(tests))
            elif pause := _pause(tests):
                self._bell.wait(pause)
            if self._bell.is_set():
                self._bell.clear()  # before the inbox is emptied, so that no ring is lost
                tests = 0
            while self._inbox:
                self._post(self._inbox.popleft())
            tests = 0 if self._test() else tests + 1

    def _post(self, flight: Flight) -> None:
        try:
            flight.requests = flight.post()
        except BaseException as error:
            flight.end(error)
        else:
            self._flights.append(flight)

    def _test(self) -> bool:
        """Test all flights once; return whether one ended or came further."""
        moved = [flight.test() for flight in self._flights]
        self._flights = [flight for flight in self._flights if not flight.done.is_set()]
        return any(moved)


def _idle(tests: int) -> float:
    """Seconds to sleep after so many tests in vain, while nobody stands still."""
    return min(_IDLE_MOST, _IDLE * _GROWTH ** min(tests - 1, 10))


def _pause(tests: int) -> float:
    """Seconds to sleep after so many tests in vain, for somebody who stands still."""
    if tests > _SPINS:
        return min(_IDLE, _EAGER + 1e-6 * (tests - _SPINS))
    os.sched_yield()  # ranks may outnumber cores, and the peer that is awaited may need this one
    return 0.0
