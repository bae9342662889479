"""Order on a device: what communication waits for before it begins, and what waits for its end. Written once, here.

[Note: the producing stream]
Everything but communication runs on the stream of the operations, ``ops.stream``. ``Collective.start()`` records the
event *produced* on it: behind it lie the writers of the input, and the last readers and writers of the output and
the scratch. Nothing touches these buffers before that event has passed, in one of two forms:

- on the device: streams of ours wait for it (:meth:`Marks.follow`), and the host goes on;
- on the host: the communication thread waits for it before it calls MPI (:meth:`Marks.ready`). MPI knows no streams.

[Note: the arrival]
When all is queued or done, *arrived* is recorded on the lane's stream. ``Work.wait()`` waits for the thread, where
one owns MPI, and lets ``ops.stream`` wait for *arrived*. The host does not wait for the device, and nobody ever for
the whole device.

[Note: what tallies mean on a device]
``busy`` runs from *produced* to *arrived*. ``waited`` is how long ``ops.stream`` stood still: from *reached*, recorded
on it when the program came to ``wait()``, to *arrived*, where that is later. The device writes these times down; they
are read when it has passed the events, at the next start or when somebody asks for the tallies, and never waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.together import together
from mpishard.comm.work import Collective, Tally, Work
from mpishard.errors import ConfigError

__all__ = ["Begin", "DeviceCollective", "Lane", "Marks", "taken"]

_Made = TypeVar("_Made")


class Lane:
    """A stream for communication beside ``ops.stream``, on its device, which becomes the calling thread's.

    Args:
        ops: operations on a device's arrays.
    """

    def __init__(self, ops: Ops) -> None:
        import cupy

        self.cuda: Any = cupy.cuda
        self.compute: Any = ops.stream  # type: ignore[attr-defined]
        self._device: Any = cupy.cuda.Device(self.compute.device_id)
        self.enter()
        self.stream: Any = self.new_stream()
        #: operations on the lane's stream, with scratch of their own
        self.ops = cast("Ops", ops.on(self.stream))  # type: ignore[attr-defined]

    def new_stream(self) -> Any:
        """Return a stream that waits for no other one by itself."""
        return self.cuda.Stream(non_blocking=True)

    def enter(self) -> None:
        """Make the lane's device the calling thread's: CUDA chooses device 0 in a new thread."""
        self._device.use()

    def marks(self) -> Marks:
        """Return new events."""
        return Marks(self)


def taken(comm: Communicator, make: Callable[[], _Made], what: str) -> _Made:
    """Return what ``make`` takes from the device or its driver. Collective.

    Raises:
        ConfigError: on all ranks, when one of them cannot have it.
    """

    def attempt() -> _Made:
        try:
            return make()
        except (MemoryError, RuntimeError) as error:  # CuPy's errors of the driver are RuntimeErrors
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(f"rank {comm.rank} cannot have {what}: {reason}") from None

    return together(comm, attempt)


class Marks:
    """The events of one start of a collective; see the notes above."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._produced, self._reached, self._arrived = (lane.cuda.Event() for _ in range(3))
        #: whether a tally has not been told yet
        self.owes = False

    def start(self) -> None:
        """The program starts the collective."""
        self._produced.record(self._lane.compute)

    def follow(self, *streams: Any) -> None:
        """Let streams wait for what is behind the start."""
        for stream in streams:
            stream.wait_event(self._produced)

    def ready(self) -> None:
        """Return when the device has done what is behind the start."""
        self._produced.synchronize()

    def finish(self) -> None:
        """All that belongs to the collective is done, or is on the lane's stream."""
        self._arrived.record(self._lane.stream)

    def reach(self) -> None:
        """The program needs the result."""
        self._reached.record(self._lane.compute)

    def join(self) -> None:
        """Let the stream of the operations wait for the arrival; :meth:`finish` was called before."""
        self._lane.compute.wait_event(self._arrived)

    def settle(self, tally: Tally) -> None:
        """Tell the tally what it is owed, where the device has come so far."""
        if self.owes and self._arrived.done:
            self.owes = False
            milliseconds = self._lane.cuda.get_elapsed_time
            tally.busy += 1e-3 * milliseconds(self._produced, self._arrived)
            if self._reached.done:  # else the result was there first
                tally.waited += max(0.0, 1e-3 * milliseconds(self._reached, self._arrived))


#: Begins a start (``add`` for reduce-scatters) and returns what blocks until :meth:`Marks.finish` was called.
Begin: TypeAlias = "Callable[[Marks, bool], Callable[[], None]]"


class _DeviceWork(Work):
    def __init__(self, tally: Tally, marks: Marks, land: Callable[[], None]) -> None:
        super().__init__(tally)
        self._marks, self._land = marks, land

    def _complete(self) -> None:
        self._marks.reach()
        self._land()
        self._marks.join()
        self._marks.owes = True

    def _inputs_free(self) -> None:
        return None

    def _count(self, waited: float, busy: float) -> None:
        """The events tell; see the note on tallies."""


class DeviceCollective(Collective):
    """A collective whose buffers are on the device, with its events.

    One set of events is enough where the tallies are told before the next start. A program that runs ahead of the
    device by more than that makes a further set, once.
    """

    def __init__(self, tally: Tally, nbytes: int, lane: Lane, begin: Begin) -> None:
        super().__init__(tally, nbytes)
        self._lane, self._begin = lane, begin
        self._sets = [lane.marks()]

    def _launch(self, add: bool) -> Work:
        self.settle()
        marks = next((marks for marks in self._sets if not marks.owes), None)
        if marks is None:
            marks = self._lane.marks()
            self._sets.append(marks)
        marks.start()
        return _DeviceWork(self._tally, marks, self._begin(marks, add))

    def settle(self) -> None:
        """Tell the tally what the device has come to."""
        for marks in self._sets:
            marks.settle(self._tally)
