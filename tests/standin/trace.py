"""The record of a run: who touched which bytes, and what ordered one after another.

[Note: agents]
What runs by itself is an agent: each host thread, each stream, and each nonblocking MPI call from its post to its
completion. Accesses of one agent follow one another. A stream's operation follows what its host thread did before it
put it there (queue order). Everything else that orders agents is an *edge*, made by an item of the record:

    A  an access: (block, bytes, written) of one operation
    R  a token takes the agent's past: an event is recorded, a flight handed over
    W  the agent takes over a token's past: a stream or a host thread waits for an event
    J  the agent takes over another one's past: a stream is synchronised, an MPI call is complete
    F  a new agent begins with the agent's past: an MPI call is posted

Each edge carries its *site*: the place in mpishard/ that made it (or of the caller, outside the stand-in), its kind,
and the calls within mpishard/ that led there. Program order and queue order have none.

[Note: handles]
Streams and events are objects that host threads share. Which of two threads' operations comes first on a stream, and
which record of an event a thread waits for, must be ordered like accesses to memory: putting work on a stream and
recording an event write it, waiting and asking read it. Events are counted by their handles, streams by their agents.

[Note: what is seen of host memory]
NumPy reads and writes pinned memory without a sign. What the record has of it: ``host_access``, called by hand;
MPI calls; and, at each copy to a device, that its source has changed since the stand-in last
looked, which is taken for a write by the thread that asks for the copy. CupyOps' uploads and fetches are wrapped
(watching.py). Other host memory is not recorded.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.standin.machine import Access, Machine, Work
from tests.standin.memory import Block
from tests.standin.regions import Pieces, moved, one, pieces

__all__ = ["Item", "Trace"]

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = str(_ROOT / "mpishard") + os.sep
_OWN = str(Path(__file__).parent) + os.sep
_FOREIGN = ("threading.py", "contextlib.py")

#: (letter, agent, thread that put it on the agent's queue or -1, what belongs to the letter, site or -1)
Item = tuple[str, int, int, Any, int]


def _frames() -> Iterator[tuple[str, int]]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def place(beside: str = "") -> str:
    """Return where in mpishard/ the call was made; outside of it, the first place that is not the stand-in's.

    ``beside`` is a file of mpishard/ that does not count.
    """
    return path(beside)[0]


def path(beside: str = "") -> tuple[str, ...]:
    """Return :func:`place`, the place in mpishard/ that called it, and so on."""
    found = []
    other = ""
    for file, line in _frames():
        if file.startswith(_PACKAGE) and not (beside and file.endswith(beside)):
            found.append(f"mpishard/{file[len(_PACKAGE):]}:{line}")
        is_own = file.startswith(_OWN) and not os.path.basename(file).startswith(("test_", "small"))
        if not other and not is_own and not file.endswith(_FOREIGN):
            other = f"{os.path.basename(file)}:{line}"
    return tuple(found) or (other,)


def call_path() -> str:
    """Return where an operation was asked for in mpishard/: the innermost place, and the first outside its array/."""
    inner, rooms = "", _PACKAGE + "array" + os.sep
    for file, line in _frames():
        if file.startswith(_PACKAGE):
            text = f"mpishard/{file[len(_PACKAGE):]}:{line}"
            if not file.startswith(rooms):
                return f"{inner} from {text}" if inner else text
            inner = inner or text
    return inner or place()


class Trace:
    """One process's record. Give it to ``installed(trace)``; then ``ordering.check(trace)`` judges it."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.items: list[Item] = []
        self.agents: list[str] = []
        #: (path, kind) of each edge; the path's first place is the site
        self.sites: list[tuple[tuple[str, ...], str]] = []
        #: number -> (address, bytes, kind, where it was allocated)
        self.blocks: dict[int, tuple[int, int, str, str]] = {}
        #: (block, low, high, text)
        self.labels: list[tuple[int, int, int, str]] = []
        self._site_numbers: dict[tuple[tuple[str, ...], str], int] = {}
        self._streams: dict[Work, int] = {}
        self._lock: Any = threading.RLock()
        self._local = threading.local()
        self._tokens = itertools.count(-1, -1)  # events have positive ones
        self._seen: dict[int, np.ndarray] = {}
        self._machine: Machine | None = None

    # --- what the program or a test says

    def label(self, address: int, nbytes: int, text: str) -> None:
        """Name a range of memory in what is reported."""
        block = self._memory().find(address, nbytes, f"label {text!r}")
        self._know(block)
        self.labels.append((block.number, address, address + nbytes, text))

    def name_stream(self, stream: Any, text: str) -> None:
        """Name a stream in what is reported."""
        agent = self._stream(self._machine_here().work(stream.ptr, "name_stream"))
        self.agents[agent] = f"{self.agents[agent].split(' (')[0]} ({text})"

    def host_access(self, array: Any, write: bool) -> None:
        """Say that the calling thread reads or writes an array in pinned memory now. Other host memory is ignored."""
        view = np.asarray(array)
        block = self._memory().at(view.ctypes.data)
        if block is None or not view.size:
            return
        parts = moved(pieces(view.shape, view.strides, view.itemsize), view.ctypes.data)
        self._access(self._thread(), -1, "host write" if write else "host read", [(block, parts, write)])
        if write:
            self.looked(block, parts)

    def send(self, beside: str = "") -> tuple[int, int, tuple[str, ...]]:
        """Return a token of the calling thread's past, for :meth:`receive` in another one."""
        token, agent, where = next(self._tokens), self._thread(), path(beside)
        self._add("R", agent, -1, token, -1)
        return token, agent, where

    def receive(self, sent: tuple[int, int, tuple[str, ...]] | None, kind: str, where: tuple[str, ...] = ()) -> None:
        """Take over what :meth:`send` returned; an edge unless both are one thread's."""
        if sent is not None and sent[1] != self._thread():
            self._add("W", self._thread(), -1, sent[0], self._site(kind, where))

    # --- what the stand-in says

    @contextmanager
    def recording(self, machine: Machine) -> Iterator[None]:
        """Record what happens on a machine, in threads, in mpishard's pump and in mpi4py."""
        from tests.standin.watching import watched

        self._machine = machine
        with watched(self):
            yield

    def enqueued(self, work: Work, name: str, accesses: list[Access]) -> None:
        stream, where = self._stream(work), call_path()
        self._handles(name, where, (work, True))
        self._access(stream, self._thread(), name, accesses, where)

    def recorded(self, work: Work, event: int) -> None:
        stream = self._stream(work)
        self._handles("event record", place(), (work, True), (event, True))
        self._add("R", stream, self._thread(), event, self._site("event record"))

    def waited(self, work: Work, event: int) -> None:
        stream = self._stream(work)
        self._handles("stream wait", place(), (work, True), (event, False))
        self._add("W", stream, self._thread(), event, self._site("stream wait"))

    def acquired(self, event: int, kind: str) -> None:
        self._handles(kind, place(), (event, False))
        self._add("W", self._thread(), -1, event, self._site(kind))

    def queried(self, event: int) -> None:
        self._handles("event query", place(), (event, False))

    def joined(self, work: Work, kind: str) -> None:
        stream = self._stream(work)
        if kind != "device synchronise":  # which is for whatever there is
            self._handles(kind, place(), (work, False))
        self._add("J", self._thread(), -1, stream, self._site(kind))

    def _handles(self, name: str, where: str, *handles: tuple[Any, bool]) -> None:
        """The calling thread uses streams and events: objects that host threads share, see the note on handles."""
        told = []
        for handle, written in handles:
            number = -handle if isinstance(handle, int) else -1 - self._stream(handle)
            if number not in self.blocks:
                kind = "event" if isinstance(handle, int) else "stream"
                self.blocks[number] = (0, 0, kind, where if kind == "event" else str(self._stream(handle)))
            told.append((number, ((0, 1, 0, 0),), written))
        self._add("A", self._thread(), -1, (name, where, told), -1)

    def allocated(self, block: Block) -> None:
        self._know(block)

    def freed(self, block: Block) -> None:
        self._access(self._thread(), -1, "free", [(block, one(block.address, block.nbytes), True)])

    def host_wrote(self, block: Block, parts: Pieces) -> None:
        """Record a write where pinned memory holds something else than when it was last looked at."""
        if self.looked(block, parts):
            self._access(self._thread(), -1, "host write", [(block, parts, True)])

    def looked(self, block: Block, parts: Pieces) -> bool:
        """Remember what pinned memory holds; return whether that is new."""
        if block.kind != "pinned":
            return False
        seen = self._seen.get(block.number)
        if seen is None:
            seen = self._seen[block.number] = np.full(block.nbytes, 0xFF, np.uint8)
        low, high = min(p[0] for p in parts) - block.address, max(p[1] for p in parts) - block.address
        now = block.bytes[low:high]
        changed = not np.array_equal(now, seen[low:high])
        seen[low:high] = now
        return changed

    def started(self, name: str, accesses: list[Access]) -> int:
        """Begin an agent for a nonblocking call of the calling thread; return it."""
        with self._lock:
            agent = self._agent(f"{name} posted by {self.agents[self._thread()]}")
            self._add("F", self._thread(), -1, agent, -1)
            self._access(agent, -1, name, accesses)
        return agent

    def completed(self, agent: int, kind: str) -> None:
        self._add("J", self._thread(), -1, agent, self._site(kind))

    def thread_access(self, name: str, accesses: list[Access]) -> None:
        """The calling thread touches memory itself, in a call that returns when it is over."""
        if accesses:
            self._access(self._thread(), -1, name, accesses)

    # ---

    def save(self, path: str | Path) -> None:
        data = (self.name, self.items, self.agents, self.sites, self.blocks, self.labels)
        Path(path).write_bytes(pickle.dumps(data))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        trace = cls()
        data = pickle.loads(Path(path).read_bytes())
        trace.name, trace.items, trace.agents, trace.sites, trace.blocks, trace.labels = data
        return trace

    def describe(self, number: int, address: int) -> str:
        """Name a byte: the smallest labelled range that holds it, or its block; or an event, or a stream."""
        start, nbytes, kind, where = self.blocks.get(number, (0, 0, "", ""))
        if kind == "event":
            return f"the event first used at {where}"
        if kind == "stream":
            return f"the order of what is put on {self.agents[int(where)]}"
        if not nbytes:
            return "the workspace of a cuBLAS handle"
        inside = [
            (high - low, -i)
            for i, (block, low, high, _) in enumerate(self.labels)
            if block == number and low <= address < high
        ]
        if inside:
            _, low, _, text = self.labels[-min(inside)[1]]
            return f"{text}+{address - low}"
        return f"block #{number}+{address - start} ({nbytes} bytes of {kind} memory{where and ' from ' + where})"

    def _machine_here(self) -> Machine:
        if self._machine is None:
            raise RuntimeError("the trace is not recording: give it to installed()")
        return self._machine

    def _memory(self) -> Any:
        return self._machine_here().memory

    def _add(self, letter: str, agent: int, host: int, what: Any, site: int) -> None:
        with self._lock:
            self.items.append((letter, agent, host, what, site))

    def _access(self, agent: int, host: int, name: str, accesses: list[Access], where: str = "") -> None:
        told = []
        for block, parts, written in accesses:
            self._know(block)
            told.append((block.number, parts, written))
        self._add("A", agent, host, (name, where or call_path(), told), -1)

    def _know(self, block: Block) -> None:
        if block.number and block.number not in self.blocks:
            self.blocks[block.number] = (block.address, block.nbytes, block.kind, call_path())

    def _site(self, kind: str, where: tuple[str, ...] = ()) -> int:
        key = (where or path(), kind)
        with self._lock:
            number = self._site_numbers.get(key)
            if number is None:
                number = self._site_numbers[key] = len(self.sites)
                self.sites.append(key)
        return number

    def _agent(self, name: str) -> int:
        with self._lock:
            self.agents.append(name)
            return len(self.agents) - 1

    def _stream(self, work: Work) -> int:
        with self._lock:
            agent = self._streams.get(work)
            if agent is None:
                device = f" of device {work.device}" if self._machine_here().devices > 1 else ""
                agent = self._streams[work] = self._agent(work.name + device)
            return agent

    def _thread(self) -> int:
        """Return the agent of the calling thread; a new one begins after what its starter did before."""
        agent: int | None = getattr(self._local, "agent", None)
        if agent is None:
            thread = threading.current_thread()
            sent, starter = thread.__dict__.get("_standin", (None, ""))
            name = "main thread" if thread is threading.main_thread() else f"thread {thread.name!r}"
            agent = self._local.agent = self._agent(name + (f" of {starter}" if starter else ""))
            thread.__dict__["_standin_agent"] = agent
            self.receive(sent, "thread start", sent[2] if sent else ())
        return agent
