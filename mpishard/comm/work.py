"""One collective from one rank's side: bound to its buffers, started, waited for, counted.

The three moments of a started one are described in :mod:`mpishard.comm.base`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from mpishard.errors import CommError

__all__ = ["Collective", "Tally", "Work"]


@dataclass
class Tally:
    """What one kind of collective has cost this rank so far."""

    calls: int = 0
    #: bytes this rank sent to others
    bytes: int = 0
    #: seconds from start to arrival, summed over calls (calls in flight together count each); on a device from the
    #: moment the stream of the operations had come to the start
    busy: float = 0.0
    #: seconds in which computation stood still for it; on a device, its stream
    waited: float = 0.0


class Work(ABC):
    """One started collective."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._started = time.perf_counter()
        self._arrived = False
        #: when the result was there (perf_counter), once it was waited for
        self.arrival = 0.0

    @abstractmethod
    def _complete(self) -> float | None:
        """Block until the result is in ``out``; return when it arrived (perf_counter) where that is known."""

    @abstractmethod
    def _inputs_free(self) -> None:
        """Block until no peer reads this rank's input."""

    def wait(self) -> None:
        """Block until ``out`` holds the result. Calling it again is free."""
        if self._arrived:
            return
        begin = time.perf_counter()
        arrived = self._complete()
        end = time.perf_counter()
        self._arrived = True
        self.arrival = end if arrived is None else arrived
        self._count(end - begin, self.arrival - self._started)

    def _count(self, waited: float, busy: float) -> None:
        """Note the host's seconds in :meth:`wait`, and from start to arrival."""
        self._tally.waited += waited
        self._tally.busy += busy

    def released(self) -> None:  # noqa: B027 - most transports share nothing
        """Say that this rank no longer reads ``out``, and block until it may be overwritten."""

    def wait_inputs(self) -> None:
        """Block until this rank's input may be overwritten; implies :meth:`wait`."""
        self.wait()
        begin = time.perf_counter()
        self._inputs_free()
        self._count(time.perf_counter() - begin, 0.0)


class Collective(ABC):
    """A collective bound to its buffers; every rank starts it equally often, in the same order."""

    def __init__(self, tally: Tally, nbytes: int) -> None:
        self._tally = tally
        self._nbytes = nbytes
        self._work: Work | None = None

    @abstractmethod
    def _launch(self, add: bool) -> Work:
        """Start the collective."""

    def start(self, add: bool = False) -> Work:
        """Start without blocking. ``add`` (reduce-scatter only) adds into ``out`` instead of writing it.

        Raises:
            CommError: the collective is still in flight.
        """
        if self._work is not None and not self._work._arrived:
            raise CommError("a collective was started again before its last start was waited for")
        self._tally.calls += 1
        self._tally.bytes += self._nbytes
        self._work = self._launch(add)
        return self._work
