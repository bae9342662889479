"""Ranks as threads of one process. They read each other's arrays directly, so nothing is staged or sent.

[Note: a meeting]
Each rank numbers the collectives that it starts on a communicator. Those of one number are one *meeting*: a
rank publishes what it offers and goes on; who needs the peers' offers waits for them, reads them where they
lie, and signs as reader. An offer is a peer's own array, so it may be overwritten only when all have signed;
that is ``Work.wait_inputs()``. Meetings are independent of each other and may be waited for in any order.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from mpishard.array.dtypes import Array, DType, overlap
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.comm.base import Collective, Communicator, Node, Tally, Work
from mpishard.errors import CommError, ConfigError

__all__ = ["DEADLINE", "ThreadsCommunicator", "run"]

T = TypeVar("T")

#: Seconds after which a rank that waits for others gives up.
DEADLINE = 120.0

#: Seconds that ``run`` gives the other ranks to notice a failure before it leaves their threads behind.
_GRACE = 10.0


class _Job:
    """What all communicators of one run share: one lock, and how the run fails."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: tuple[int, BaseException] | None = None
        self.ended: set[int] = set()

    def fail(self, rank: int, error: BaseException) -> None:
        """Keep the first failure and wake everybody who waits."""
        with self.changed:
            if self.failure is None:
                self.failure = (rank, error)
            self.changed.notify_all()

    def end(self, rank: int) -> None:
        """Note that a rank will publish and read no more."""
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()


@dataclass
class _Meeting:
    """One collective: what the ranks offer, and who has read all that it needs."""

    name: str
    offers: dict[int, Any] = field(default_factory=dict)
    readers: set[int] = field(default_factory=set)
    children: dict[tuple[int, ...], _Group] = field(default_factory=dict)


class _Group:
    """The meetings of one communicator. ``members`` are ranks of the run, in this communicator's order."""

    def __init__(self, job: _Job, members: Sequence[int]) -> None:
        self.job = job
        self.members = tuple(members)
        self._meetings: dict[int, _Meeting] = {}

    def publish(self, number: int, name: str, rank: int, offer: object) -> _Meeting:
        """Add a rank's offer to the meeting of this number; never blocks."""
        with self.job.changed:
            meeting = self._meetings.setdefault(number, _Meeting(name))
            if meeting.name != name:
                first = next(iter(meeting.offers))
                raise CommError(
                    f"ranks start different collectives: rank {first} starts {meeting.name}, rank {rank} starts "
                    f"{name}; every rank must start the same ones in the same order"
                )
            meeting.offers[rank] = offer
            self.job.changed.notify_all()
        return meeting

    def sign(self, number: int, meeting: _Meeting, rank: int) -> None:
        """Say that a rank has read what it needs; the last one forgets the offers."""
        with self.job.changed:
            meeting.readers.add(rank)
            if len(meeting.readers) == len(self.members):
                meeting.offers.clear()
                del self._meetings[number]
            self.job.changed.notify_all()

    def wait(self, meeting: _Meeting, deed: str, here: Collection[int], wanted: Sequence[int], seconds: float) -> None:
        """Block until every wanted rank is ``here``; raise when one of them cannot come any more."""
        limit = time.monotonic() + seconds
        with self.job.changed:
            while late := [rank for rank in wanted if rank not in here]:
                names = ", ".join(map(str, late))
                if self.job.failure is not None:
                    failed, error = self.job.failure
                    raise CommError(f"{meeting.name} cannot end: rank {failed} of the run failed with {error!r}")
                if gone := [rank for rank in late if self.members[rank] in self.job.ended]:
                    names = ", ".join(map(str, gone))
                    raise CommError(f"{meeting.name} cannot end: rank {names} returned and has not {deed} it")
                left = limit - time.monotonic()
                if left <= 0:
                    raise CommError(f"{meeting.name} did not end in {seconds:g} s: rank {names} has not {deed} it")
                self.job.changed.wait(left)


class _ThreadsWork(Work):
    """A meeting from one rank's side."""

    def __init__(
        self, tally: Tally, comm: ThreadsCommunicator, name: str, offer: Array, take: Callable[[list[Array]], None]
    ) -> None:
        super().__init__(tally)
        self._comm, self._take = comm, take
        self._number, self._meeting = comm._publish(name, offer)

    def _complete(self) -> None:
        self._take(self._comm._offers(self._meeting))
        self._comm._group.sign(self._number, self._meeting, self._comm.rank)

    def _inputs_free(self) -> None:
        self._comm._wait_readers(self._meeting)


class _ThreadsCollective(Collective):
    """What a rank offers, and what it does with everybody's offers, in rank order."""

    def __init__(
        self,
        tally: Tally,
        nbytes: int,
        comm: ThreadsCommunicator,
        name: str,
        offer: Array,
        take: Callable[[list[Array], bool], None],
    ) -> None:
        super().__init__(tally, nbytes)
        self._comm, self._name, self._offer, self._take = comm, name, offer, take

    def _launch(self, add: bool) -> Work:
        return _ThreadsWork(self._tally, self._comm, self._name, self._offer, lambda offers: self._take(offers, add))


class ThreadsCommunicator(Communicator):
    """One rank of :func:`run`.

    Args:
        rank: this rank in the group.
        group: the ranks that meet; made by :func:`run` and by :meth:`split`.
        ops: this rank's own operations.
        deadline: seconds after which waiting for a peer becomes a CommError that names it.
    """

    transport = "threads"
    progress = "copies"

    def __init__(self, rank: int, group: _Group, ops: Ops, deadline: float = DEADLINE) -> None:
        size = len(group.members)
        super().__init__(rank, size, Node(rank, size, 0, 1), ops)
        self._group, self._deadline = group, deadline
        self._started = 0

    def _publish(self, name: str, offer: object) -> tuple[int, _Meeting]:
        number = self._started
        self._started += 1
        return number, self._group.publish(number, name, self.rank, offer)

    def _offers(self, meeting: _Meeting) -> list[Any]:
        self._group.wait(meeting, "started", meeting.offers, range(self.size), self._deadline)
        return [meeting.offers[rank] for rank in range(self.size)]

    def _wait_readers(self, meeting: _Meeting) -> None:
        self._group.wait(meeting, "read", meeting.readers, range(self.size), self._deadline)

    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        places = [out[rank * shard.size : (rank + 1) * shard.size] for rank in range(self.size)]
        in_place = overlap(shard, out)

        def take(shards: list[Array], add: bool) -> None:
            for rank, place in enumerate(places):
                if not (in_place and rank == self.rank):
                    self.ops.copy(shards[rank], place)

        return _ThreadsCollective(tally, nbytes, self, f"all-gather number {self._bound - 1}", shard, take)

    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        block, bracket = slice(self.rank * out.size, (self.rank + 1) * out.size), self.bracket

        def take(fulls: list[Array], add: bool) -> None:
            self.ops.ordered_sum([full[block] for full in fulls], out, add, bracket)

        return _ThreadsCollective(tally, nbytes, self, f"reduce-scatter number {self._bound - 1}", full, take)

    def _exchange(self, record: bytes) -> list[bytes]:
        number, meeting = self._publish("an exchange", record)
        records: list[bytes] = self._offers(meeting)
        self._group.sign(number, meeting, self.rank)
        return records

    def _broadcast(self, array: Array, root: int) -> None:
        number, meeting = self._publish(f"a broadcast from rank {root}", array)
        if self.rank != root:
            self._group.wait(meeting, "started", meeting.offers, [root], self._deadline)
            self.ops.copy(meeting.offers[root], array)
        self._group.sign(number, meeting, self.rank)
        if self.rank == root:
            self._wait_readers(meeting)

    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        number, meeting = self._publish("a split", own)
        self._offers(meeting)
        with self._group.job.changed:
            members = [self._group.members[rank] for rank in own]
            group = meeting.children.setdefault(tuple(own), _Group(self._group.job, members))
        self._group.sign(number, meeting, self.rank)
        return ThreadsCommunicator(list(own).index(self.rank), group, self.ops, self._deadline)

    def abort(self, message: str, code: int = 1) -> None:
        """Fail the run with ``message``: every rank leaves by a CommError, and so does this call."""
        print(message, file=sys.stderr, flush=True)
        error = CommError(f"rank {self._group.members[self.rank]} aborted the run: {message}")
        self._group.job.fail(self._group.members[self.rank], error)
        raise error


def run(
    size: int,
    main: Callable[[ThreadsCommunicator], T],
    make_ops: Callable[[], Ops] = NumpyOps,
    *,
    deadline: float = DEADLINE,
) -> list[T]:
    """Call ``main(comm)`` on ``size`` ranks at once; return the results in rank order.

    Raises:
        ConfigError: ``size`` is below 1.
        BaseException: the first failure of any rank, as it was raised there. The other ranks leave at their
            next collective; a thread that reaches none within some seconds is left behind.
    """
    if size < 1:
        raise ConfigError(f"{size} ranks were asked for; at least 1 is needed")
    job = _Job()
    group = _Group(job, range(size))
    results: list[T | None] = [None] * size

    def body(rank: int) -> None:
        try:
            results[rank] = main(ThreadsCommunicator(rank, group, make_ops(), deadline))
        except BaseException as error:
            job.fail(rank, error)
        finally:
            job.end(rank)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    with job.changed:
        job.changed.wait_for(lambda: len(job.ended) == size or job.failure is not None)
        job.changed.wait_for(lambda: len(job.ended) == size, _GRACE)
    if job.failure is not None:
        raise job.failure[1]
    return cast("list[T]", results)
