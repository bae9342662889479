"""``cupy.cuda.Stream``, ``Event``, ``Device`` and the current stream.

[Note: queries]
Whether an event or a stream is ``done`` depends on time, so the answer orders nothing in the record: what a program
does only where it is yes has to be ordered by something else.
"""

from __future__ import annotations

import time
from typing import Any

from tests.standin.errors import CUDARuntimeError
from tests.standin.machine import Machine, Work, here
from tests.standin.memory import DeviceFault

__all__ = ["Device", "Event", "Stream", "get_current_stream", "get_elapsed_time"]


class Event:
    """A place in a stream. What waits for an event that was never recorded does not wait, as with CUDA."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise DeviceFault("the stand-in has no events between processes")
        machine = here()
        self.ptr = machine.handle()
        self._device = machine.device
        self._timed, self._time = not disable_timing, 0.0
        self._place: tuple[Work, int] | None = None

    @property
    def done(self) -> bool:
        """True if the event is done."""
        machine = here()
        if machine.trace is not None:
            machine.trace.queried(self.ptr)
        return self._place is None or machine.is_done(*self._place)

    def record(self, stream: Stream | None = None) -> None:
        """Stand at the end of what the stream (the current one by default) holds now."""
        machine = here()
        work = machine.current_work("Event.record") if stream is None else _work(machine, stream, "Event.record")
        if work.device != self._device:
            raise CUDARuntimeError(400)
        self._place, self._time = (work, work.submitted), time.perf_counter()
        if machine.trace is not None:
            machine.trace.recorded(work, self.ptr)

    def synchronize(self) -> None:
        """Return when the stream has come to the event."""
        machine = here()
        if self._place is not None:
            machine.finish(*self._place)
        if machine.trace is not None:
            machine.trace.acquired(self.ptr, "event synchronise")


class Stream:
    """A stream that waits for no other one: ``non_blocking=True`` is all that is offered."""

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        if null or ptds or not non_blocking or priority is not None:
            raise DeviceFault("the stand-in offers Stream(non_blocking=True) only: other streams wait for each other")
        machine = here()
        self._work = machine.new_stream()
        self.ptr, self.device_id = self._work.handle, self._work.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    def __enter__(self) -> Stream:
        machine = here()
        self._check(machine)
        stack = machine.local.__dict__.setdefault("stack", [])
        stack.append((machine.device, machine.current()))
        self._set(machine)
        return self

    def __exit__(self, *args: object) -> None:
        machine = here()
        device, before = machine.local.stack.pop()
        machine.local.current[device] = before

    def use(self) -> Stream:
        """Make this the current stream of the calling thread."""
        machine = here()
        self._check(machine)
        self._set(machine)
        return self

    @property
    def done(self) -> bool:
        """True if all work on this stream has been done."""
        machine = here()
        work = _work(machine, self, "Stream.done")
        return machine.is_done(work, work.submitted)

    def synchronize(self) -> None:
        """Return when all work on this stream has been done."""
        machine = here()
        work = _work(machine, self, "Stream.synchronize")
        machine.finish(work, work.submitted)
        if machine.trace is not None:
            machine.trace.joined(work, "stream synchronise")

    def record(self, event: Event | None = None) -> Event:
        """Record an event here; a new one by default."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what is put on this stream from now on wait for what the event was last recorded behind."""
        machine = here()
        work = _work(machine, self, "Stream.wait_event")
        if not isinstance(event, Event):
            raise AttributeError(f"'{type(event).__name__}' object has no attribute 'ptr'")
        if event._place is not None:
            machine.wait_for(work, *event._place)
        if machine.trace is not None:
            machine.trace.waited(work, event.ptr)

    def _check(self, machine: Machine) -> None:
        if self.device_id not in (-1, machine.device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device "
                f"({machine.device})"
            )

    def _set(self, machine: Machine) -> None:
        machine.local.__dict__.setdefault("current", {})[machine.device] = self

    def __repr__(self) -> str:
        return f"<Stream {self.ptr} (device {self.device_id})>"


def _null() -> Stream:
    stream = object.__new__(Stream)
    stream.ptr, stream.device_id = 0, -1
    return stream


#: The null stream: not offered by name, but current until another one is.
_NULL = _null()


def _work(machine: Machine, stream: Any, what: str) -> Work:
    if not isinstance(stream, Stream):
        raise AttributeError(f"'{type(stream).__name__}' object has no attribute 'ptr'")
    return machine.work(stream.ptr, what)


def get_current_stream(device_id: int = -1) -> Stream:
    """Return the current stream of the calling thread."""
    machine = here()
    if device_id not in (-1, machine.device):
        return getattr(machine.local, "current", {}).get(device_id) or _NULL
    return machine.current() or _NULL


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return the milliseconds between the moments when the streams came to two events, which must be over."""
    moments = []
    for event in (start_event, end_event):
        if event._place is None or not event._timed:
            raise CUDARuntimeError(400)
        if event._place[0].executed < event._place[1]:
            raise CUDARuntimeError(600)
        work, place = event._place
        moments.append(max(event._time, work.ends.get(place, 0.0)))
    return 1e3 * (moments[1] - moments[0])


class Device:
    """A device by number; the current one by default."""

    def __init__(self, device: Any = None) -> None:
        self.id = here().device if device is None else device.id if isinstance(device, Device) else int(device)

    def use(self) -> None:
        """Make this the current device of the calling thread."""
        machine = here()
        self._check(machine)
        machine.device = self.id

    def synchronize(self) -> None:
        """Return when all streams of the device have done their work."""
        machine = here()
        self._check(machine)
        for work in [*machine.streams.values(), *machine._null.values()]:
            if work.device == self.id:
                machine.finish(work, work.submitted)
                if machine.trace is not None:
                    machine.trace.joined(work, "device synchronise")

    @property
    def mem_info(self) -> tuple[int, int]:
        """Free bytes and bytes in all."""
        machine = here()
        self._check(machine)
        return machine.memory.capacity - machine.memory.used.get(self.id, 0), machine.memory.capacity

    @property
    def compute_capability(self) -> str:
        self._check(here())
        return "90"

    @property
    def pci_bus_id(self) -> str:
        self._check(here())
        return f"0000:{self.id + 1:02X}:00.0"

    def _check(self, machine: Machine) -> None:
        if not 0 <= self.id < machine.devices:
            raise CUDARuntimeError(101)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"
