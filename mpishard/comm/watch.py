"""A rank that is gone or silent ends the job: MPI alone would let its peers wait for ever.

[Note: who watches whom]
Each rank has a record (:mod:`mpishard.comm.record`) and a thread that ticks every half second. A tick gives a sign
of life and looks at peers: at all ranks of the own node, and, from the first rank of a node, at the first rank of
the next node. So the load of a file system that the nodes share grows with ranks, not with their square.

- A peer on the same kernel and in the same PID namespace has a handle (:mod:`mpishard.comm.mates`), which tells at
  once that its process has ended; each tick looks it up by pid and start time too. A process that is stopped or slow
  is still there; one that has ended, waited for or not, is gone, unless its record says that it has ended or failed.
- Any other peer is known by its beats. It is *silent* when they have stood still over so many successful ticks of
  the watching rank as make up ``silence`` seconds. Ticks count, not the clock: nobody is taken for silent because
  the whole job was suspended or because the file system stood still for all.

[Note: how ranks learn of it]
The folder holds ``ended``, made empty at the start, because a file that is there is seen to change sooner over NFS
than a new one is seen to appear. Who finds a peer gone says so in it, and every rank reads it in each tick. Who
can make the file ``found`` is the one that prints. Then each rank waits for ``GRACE`` seconds, in which a launcher
that ends the job by itself does so with its own exit code, and leaves by ``os._exit``: the main thread may sit in
MPI, or in a computation, and never come back. What was printed stands in ``why`` too: launchers lose output. A
launcher that would end all ranks before anybody can print is kept from it for a moment (:mod:`mpishard.comm.reprieve`).

A rank that ends by an error that it tells itself says in its record that it has failed, before it aborts. Whose process
ends after that is not the cause, and is not told of while the launcher may still be ending the job.

Where no rank makes progress any more (:mod:`mpishard.comm.stall`), who finds it says that instead. Each rank then
leaves its Python stacks beside its record, and ``GRACE`` seconds later one of them tells of all.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from mpishard.comm.base import Communicator
from mpishard.comm.mates import Mates, hurried, is_gone
from mpishard.comm.record import RankRecord, State, kernel_identity, process_start, read_record, record_path
from mpishard.comm.reprieve import Reprieve
from mpishard.comm.stall import Stall
from mpishard.comm.standstill import EXIT_STALLED, read_standings, report, write_stack
from mpishard.comm.together import on_rank_zero, together
from mpishard.errors import ConfigError
from mpishard.launched import abort_stopped

__all__ = ["EXIT_PEER_GONE", "EXIT_STALLED", "GRACE", "TICK", "Watch"]

#: The exit code of a rank that ends because a peer is gone, silent or has failed.
EXIT_PEER_GONE = 3
#: Seconds from tick to tick.
TICK = 0.5
#: Seconds between learning of a failure and ending.
GRACE = 2.0

#: node, rank in the node, pid, start time, identity: what ranks tell each other at the start
_PLACE = struct.Struct("=qqqq16s")
#: kind and rank of the failure that ``ended`` names
_ENDED = struct.Struct("=8sq")
_FAILED, _GONE, _STALLED, _TOLD = b"failed", b"gone", b"stalled", b"told"
#: what is news where something was found before
_WORSE = (_GONE, _STALLED, _TOLD)


@dataclass
class _Peer:
    """A rank that this one watches."""

    rank: int
    pid: int
    started: int
    #: its process can be looked up from here
    visible: bool
    beats: int = -1
    #: successful ticks since its beats moved; looks since its process has ended while another failure ends the job
    quiet: int = 0


class Watch:
    """Watches the peers of this rank from :meth:`__enter__` to :meth:`__exit__`; both are collective.

    ::

        with Watch(comm, run_dir / "ranks", silence=120) as watch:
            for step in range(steps):
                watch.at_step(step)
                ...

    Leaving in order waits for all ranks, so that nobody takes one that has ended for one that is gone. Leaving by
    an exception waits for nobody: the others end after ``GRACE`` seconds, unless the launcher is faster. One rank,
    or ranks that are threads of one process, keep their records and watch nobody.

    Args:
        comm: the ranks.
        folder: on a file system that all ranks see; made where it is missing. What an earlier run left is removed.
        silence: seconds without a beat after which a rank on another machine is taken for gone; 0 for never. More
            than a beat can be late: a beat waits for code that holds the interpreter's lock.
        stall: seconds without progress of any rank after which the job ends; 0 for never.
        waits: names of operations, without what stands in brackets, in which a rank waits for others.

    Raises:
        ConfigError: ``silence`` or ``stall`` is negative or not finite.
    """

    def __init__(
        self, comm: Communicator, folder: Path, *, silence: float, stall: float = 0.0, waits: Collection[str] = ()
    ) -> None:
        for what, seconds in (("silence", silence), ("stall", stall)):
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"a {what} of {seconds:g} s was asked for; give seconds, or 0 to wait for ever")
        self.folder = folder
        self._comm, self._silence = comm, silence
        self._limit, self._waits = stall, waits
        self._stall: Stall | None = None
        self._peers: list[_Peer] = []
        self._failed_ticks = 0
        self._failing = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._exit: Callable[[int], object] = os._exit

    def note(self, name: bytes) -> None:
        """Say which operation begins; see :meth:`RankRecord.note`."""
        self._record.note(name)

    def at_step(self, step: int) -> None:
        """Say which step begins."""
        self._record.at_step(step)

    def __enter__(self) -> Watch:
        """Make the records and begin to watch.

        Raises:
            ConfigError: on all ranks, when one cannot make its record.
        """
        comm = self._comm
        on_rank_zero(comm, self._clean)
        self._record = together(comm, lambda: RankRecord(self.folder, comm.rank, comm.size))
        self._find_peers()
        seen = {peer.rank: (peer.pid, peer.started) for peer in self._peers if peer.visible}
        self._mates = Mates(self.folder, comm.rank, seen)
        if self._peers:
            self._reprieve = Reprieve()
            comm.before_abort = self._record.fail
            self._thread = threading.Thread(target=self._run, name="mpishard-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        state = State.FAILED
        try:
            if kind is None:
                self._comm.barrier()  # still watched: a peer may be gone now too
                state = State.ENDED
        finally:
            if state is State.FAILED and error is not None and self._comm.size > 1:
                self._mourn(error)
            self._stop.set()
            if self._thread is not None:
                self._comm.before_abort = None
                self._mates.ring()
                self._thread.join()
                self._reprieve.close()
            self._mates.close()
            with contextlib.suppress(OSError):
                self._record.close(state)
            if state is State.FAILED:
                self._tell(_FAILED, self._comm.rank)

    # --- the start

    def _clean(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in [path for name in ("rank-*", "stack-*", "found", "why") for path in self.folder.glob(name)]:
            path.unlink(missing_ok=True)
        (self.folder / "ended").write_bytes(b"")

    def _find_peers(self) -> None:
        node, pid, identity = self._comm.node, os.getpid(), kernel_identity()
        mine = _PLACE.pack(node.index, node.local_rank, pid, process_start(pid) or 0, identity)
        self._flushes = node.local_rank == 0 and node.count > 1
        mates, leaders = [], []
        for rank, record in enumerate(self._comm.exchange(mine, "places of the ranks")):
            index, local_rank, other, started, theirs = _PLACE.unpack(record)
            near = index == node.index
            if near and rank != self._comm.rank:
                mates.append(rank)
            elif not near and local_rank == 0:
                leaders.append(rank)
            next_leader = self._flushes and local_rank == 0 and index == (node.index + 1) % node.count
            if (near or next_leader) and (other, theirs) != (pid, identity):
                # A kernel may hide processes even so; then beats have to do.
                peer = _Peer(rank, other, started, visible=True)
                peer.visible = theirs == identity and not is_gone(other, started)
                self._peers.append(peer)
        if self._limit:
            self._stall = Stall(
                self.folder, self._record, mates, leaders, seconds=self._limit, waits=self._waits
            )

    # --- the thread

    def _run(self) -> None:
        due = time.monotonic() + TICK
        while not self._stop.is_set():
            rung, ended = self._mates.wait(due - time.monotonic())
            if rung:
                break
            if ended:
                with hurried():
                    self._look_up(ended)
            if time.monotonic() >= due:
                self._look_up()
                self._tick()
                due = time.monotonic() + TICK

    def _look_up(self, ended: Collection[int] = ()) -> None:
        """Find out who is gone: those whose processes are known to have ended, or all that can be seen."""
        for peer in self._peers:
            if peer.rank in ended or (not ended and peer.visible and is_gone(peer.pid, peer.started)):
                self._lost(peer)
        self._peers = [peer for peer in self._peers if peer.rank >= 0]

    def _tick(self) -> None:
        # A tick in which the file system fails is none: it counts for nobody's silence.
        with contextlib.suppress(OSError):
            self._record.beat(self._flushes)
            self._hear()
            for peer in self._peers:
                if not peer.visible:
                    self._listen(peer)
            if self._stall is not None and not self._stop.is_set() and self._stall.tick(TICK):
                self._stand_still()
        self._peers = [peer for peer in self._peers if peer.rank >= 0]

    def _lost(self, peer: _Peer) -> None:
        """Its process has ended: in order, by an exception, or by something that left it no time."""
        snapshot = self._mates.read(peer.rank)
        if snapshot is not None and snapshot.state is not State.RUNNING:
            self._let_go(peer, snapshot.state)
        elif self._fails() and peer.quiet * TICK < GRACE:
            peer.quiet += 1  # whoever has failed tells why, and the launcher ends the others
        else:
            self._end(peer.rank, "is gone")

    def _fails(self) -> bool:
        """Return whether a rank that can be seen from here has failed and said so."""
        found = (self._mates.read(peer.rank) for peer in self._peers if peer.visible and peer.rank >= 0)
        self._failing = self._failing or any(each is not None and each.state is State.FAILED for each in found)
        return self._failing

    def _let_go(self, peer: _Peer, state: State) -> None:
        if state is State.FAILED:
            self._failing = True
            self._tell(_FAILED, peer.rank)  # it may not have come to that itself
        peer.rank = -1

    def _listen(self, peer: _Peer) -> None:
        snapshot = read_record(record_path(self.folder, peer.rank))
        if snapshot is None:
            return
        if snapshot.state is not State.RUNNING:
            self._let_go(peer, snapshot.state)
        elif snapshot.beats != peer.beats:
            peer.beats, peer.quiet = snapshot.beats, 0
        else:
            peer.quiet += 1
            if self._silence and peer.quiet * TICK >= self._silence:
                self._end(peer.rank, f"has given no sign of life for {self._silence:g} s", asks=True)

    def _hear(self) -> None:
        """Read what others have found."""
        data = (self.folder / "ended").read_bytes()
        if len(data) < _ENDED.size:
            return
        kind, rank = _ENDED.unpack_from(data)
        kind = kind.rstrip(b"\0")
        if kind == _GONE:
            self._leave()
            return
        if kind in (_STALLED, _TOLD):
            self._stand_still(told=kind == _TOLD)
            return
        self._failed_ticks += 1
        if self._failed_ticks * TICK > GRACE:
            self._end(rank, "has failed")

    # --- the end

    def _end(self, rank: int, what: str, *, asks: bool = False) -> None:
        """Print one line, unless another rank has, and end this process."""
        text = f"mpishard: {self._describe(rank, what)}\n"
        if self._claims():
            self._say(text)
            self._tell(_GONE, rank)
        self._leave(asks=asks)

    def _say(self, text: str) -> None:
        os.write(2, text.encode(errors="replace"))  # sys.stderr may be locked for ever
        with contextlib.suppress(OSError):
            (self.folder / "why").write_text(text, encoding="utf-8", errors="replace")

    def _mourn(self, error: BaseException) -> None:
        """Say, of an exception that ends all ranks, where this one was; what users can mend is told by itself."""
        if isinstance(error, Exception) and not isinstance(error, ConfigError | BrokenPipeError) and self._claims():
            first = (str(error).strip().splitlines() or [""])[0]
            what = f"has failed: {type(error).__name__}: {first}"
            text = f"{self._who(self._comm.rank)} {what}; all ranks end, its traceback says where"
            if (rank := self._mates.ending()) is not None:  # MPI may see it before the process has quite ended
                text = self._describe(rank, "is gone")
            self._say(f"mpishard: {text}\n")

    def _leave(self, code: int = EXIT_PEER_GONE, seconds: float | None = None, *, asks: bool = False) -> None:
        """End this process; ``asks``: the launcher too, which may have to end one that is stopped."""
        time.sleep(GRACE if seconds is None else seconds)
        if asks:
            abort_stopped(code)
        self._exit(code)
        self._stop.set()

    def _stand_still(self, *, told: bool = False) -> None:
        """No rank makes progress: leave this one's stacks; one rank tells of all; end this process."""
        if not told:
            write_stack(self.folder, self._comm.rank)
            self._record.beat(True)
        if told or not self._claims():
            self._await_report()
            self._leave(EXIT_STALLED, GRACE / 4, asks=True)
            return
        self._tell(_STALLED, self._comm.rank)
        time.sleep(GRACE)
        quiet = [self._stall.quiet(rank) if self._stall else 0.0 for rank in range(self._comm.size)]
        lines = report(read_standings(self.folder, self._comm.size, quiet), self._limit, self.folder)
        self._say("\n".join(lines) + "\n")
        self._tell(_TOLD, self._comm.rank)
        self._leave(EXIT_STALLED, GRACE / 4, asks=True)

    def _await_report(self) -> None:
        """Return when the report was printed, or its time is over: the first rank that leaves may end them all."""
        limit = time.monotonic() + 5 * GRACE
        while time.monotonic() < limit:
            with contextlib.suppress(OSError, struct.error):
                if _ENDED.unpack_from((self.folder / "ended").read_bytes())[0].rstrip(b"\0") in (_TOLD, _GONE):
                    return
            time.sleep(min(TICK, GRACE / 4))

    def _claims(self) -> bool:
        try:
            os.close(os.open(self.folder / "found", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        except OSError:
            return True  # rather twice than not at all
        return True

    def _tell(self, kind: bytes, rank: int) -> None:
        """Write into ``ended``, where that can be done; that a rank has failed is no news where one is gone."""
        with contextlib.suppress(OSError), open(self.folder / "ended", "r+b", buffering=0) as file:
            if kind in _WORSE or not file.read(1):
                file.seek(0)
                file.write(_ENDED.pack(kind, rank))

    def _who(self, rank: int) -> str:
        snapshot = self._mates.read(rank)
        return f"rank {rank}" + (f" (host {snapshot.host}, pid {snapshot.pid}, {snapshot})" if snapshot else "")

    def _describe(self, rank: int, what: str) -> str:
        places = self._mates.places(rank)
        return (
            f"{self._who(rank)} {what}; the other ranks end with exit code {EXIT_PEER_GONE}; look for the cause "
            f"where it ran (memory, a signal, a traceback), then resume from the last checkpoint{places}"
        )
