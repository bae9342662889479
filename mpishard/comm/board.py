"""Where ranks that share memory say how far they are: a few words of each rank that all others read.

[Note: the words of a rank]
``begun``: how many collectives it has started. ``released``: how often it has let go of memory that several ranks write
(:mod:`mpishard.comm.pool`). For the collective ``n`` of a communicator, in place ``n % PLACES``:
*what* it started, and *done*: ``n + 1`` once it has read all that it needs of its peers; and, where peers read what
arrives in the rank's ``out``, *arrived*: ``n + 1`` once it is there. Only the rank itself writes its words; each is 8
aligned bytes, written by one store, and only grows.

[Note: two threads of a rank]
The program's thread begins collectives and waits. A thread that moves data has a board :meth:`Board.beside` it, with a
fence of its own: it looks, and never waits. No word is written by both.

[Note: order in memory]
Who writes a word has written before it what the word speaks of; who has read a word reads afterwards what it speaks
of. Processors may swap these, so a *fence* stands between: releasing and taking a lock that nobody else uses. To
CPython that is a semaphore, or a mutex, and POSIX makes both synchronise memory (Base Definitions, 4.12).

[Note: waiting]
First by looking again and again, where each rank has a core; then by giving the core away between looks, since the
peer may need it; then by sleeping, longer and longer. A peer that is gone never comes: the watch
(:mod:`mpishard.comm.watch`) ends this process then.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mpishard.array.dtypes import Array
from mpishard.errors import CommError

__all__ = ["BOARD_WORDS", "Board"]

#: collectives that may be in flight at once
_PLACES = 1024
#: words of a rank
BOARD_WORDS = 8 + 3 * _PLACES
_BEGUN, _RELEASED, _WHAT, _DONE, _ARRIVED = 0, 1, 8, 8 + _PLACES, 8 + 2 * _PLACES
#: looks in a row where each rank has a core, then looks between which the core is given away
_SPINS, _LOOKS = 2000, 200
#: seconds between looks afterwards: the first and the longest
_EAGER, _IDLE = 2e-5, 2e-4


class Board:
    """The words of all ranks of a communicator, from one rank's side. For one thread.

    Args:
        rank: this rank.
        words: each rank's BOARD_WORDS words (int64), zero at first.
        names: what collectives are called, for messages.
        first: what messages call rank 0.
        meanwhile: called between looks of who waits.
    """

    def __init__(
        self,
        rank: int,
        words: Sequence[Array],
        names: Mapping[int, str],
        *,
        first: int = 0,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self._rank, self._names, self._first, self._meanwhile = rank, names, first, meanwhile
        self._arrays = words  # which keep the memory
        self._words = [memoryview(array.data) for array in words]
        self._spins = _SPINS if len(words) <= len(os.sched_getaffinity(0)) else 0
        self._begun = 0
        self._lock = _held_lock()

    def beside(self) -> Board:
        """Return this board for another thread, which begins nothing and never waits."""
        other = copy.copy(self)
        other._lock = _held_lock()
        return other

    def _fence(self) -> None:
        self._lock.release()
        self._lock.acquire()

    def begin(self, what: int) -> int:
        """Say that this rank's input of a collective is ready, and return the collective's number.

        Args:
            what: names it, not 0; alike on all ranks.

        Raises:
            CommError: this rank has not waited for the one that was started so many before that there is no place.
        """
        number, own = self._begun, self._words[self._rank]
        place = number % _PLACES
        if number >= _PLACES:  # the place's last collective is over on every rank
            if own[_DONE + place] <= number - _PLACES:
                raise CommError(
                    f"{_PLACES} collectives are in flight and another one is started; wait for some before, or set "
                    "shard.prefetch lower"
                )
            for rank in range(len(self._words)):
                self._reach(rank, _DONE + place, number - _PLACES + 1)
        own[_WHAT + place] = what
        self._begun = number + 1
        self._fence()
        own[_BEGUN] = number + 1
        return number

    def started(self, rank: int, number: int) -> None:
        """Return when a rank has started a collective: then its input may be read.

        Raises:
            CommError: it has started another one.
        """
        self._reach(rank, _BEGUN, number + 1)
        self._compare(rank, number)

    def have_started(self, number: int) -> bool:
        """Return whether every rank has started a collective, without waiting.

        Raises:
            CommError: one has started another one.
        """
        if any(words[_BEGUN] <= number for words in self._words):
            return False
        self._fence()
        for rank in range(len(self._words)):
            self._compare(rank, number)
        return True

    def _compare(self, rank: int, number: int) -> None:
        place = _WHAT + number % _PLACES
        theirs, mine = self._words[rank][place], self._words[self._rank][place]
        if theirs != mine:
            raise CommError(
                f"ranks start different collectives: rank {self._first + rank} starts "
                f"{self._names.get(theirs, 'another one')}, rank {self._first + self._rank} starts "
                f"{self._names[mine]}; every rank must start the same ones in the same order"
            )

    def arrive(self, number: int) -> None:
        """Say that what peers read in this rank's ``out`` is there."""
        self._fence()
        self._words[self._rank][_ARRIVED + number % _PLACES] = number + 1

    def arrived(self, rank: int, number: int) -> None:
        """Return when what peers read in a rank's ``out`` is there.

        Raises:
            CommError: it has started another collective.
        """
        self.started(rank, number)
        self._reach(rank, _ARRIVED + number % _PLACES, number + 1)

    @property
    def releases(self) -> int:
        """How often this rank has called :meth:`release`."""
        return int(self._words[self._rank][_RELEASED])

    def release(self) -> None:
        """Say that this rank no longer reads what it lets go of."""
        self._fence()
        self._words[self._rank][_RELEASED] += 1

    def all_released(self, releases: int, wait: bool = True) -> bool:
        """Return whether every rank has let go that often, at once or after waiting until it has."""
        if wait:
            for rank in range(len(self._words)):
                self._reach(rank, _RELEASED, releases)
        elif any(words[_RELEASED] < releases for words in self._words):
            return False
        else:
            self._fence()
        return True

    def all_arrived(self, number: int) -> None:
        """Return when what every rank writes is there.

        Raises:
            CommError: one has started another collective.
        """
        for rank in range(len(self._words)):
            self.arrived(rank, number)

    def end(self, number: int) -> None:
        """Say that this rank has read all that it needs."""
        self._fence()
        self._words[self._rank][_DONE + number % _PLACES] = number + 1

    def ended(self, number: int) -> None:
        """Return when every rank has read all that it needs: then what it read may be overwritten."""
        for rank in range(len(self._words)):
            self._reach(rank, _DONE + number % _PLACES, number + 1)

    def _reach(self, rank: int, place: int, least: int) -> None:
        words, looks = self._words[rank], -self._spins
        while words[place] < least:
            looks += 1
            if self._meanwhile is not None:
                self._meanwhile()
            if looks >= _LOOKS:
                time.sleep(min(_IDLE, _EAGER + 1e-6 * (looks - _LOOKS)))
            elif looks >= 0:
                os.sched_yield()
        self._fence()


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
