"""A flight of several parts: some are under way at a time, and as one arrives the next leaves.

[Note: one order]
MPI matches nonblocking collectives by the order in which they are posted, and when a part leaves depends on when others
arrived. So series share a communicator with nothing else, and stand in a *line*: a series posts when all parts of those
before it have been posted. Then every rank posts the parts in the order in which the series were started.

[Note: who works]
Parts are posted, and finished when they have arrived, where MPI is called: by the pump's thread, so a series goes on
while the program computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mpi4py import MPI

from mpishard.comm.pump import Flight

__all__ = ["Series"]


class Series(Flight):
    """A flight of ``parts`` parts, of which at most ``ahead`` are under way.

    Args:
        send: posts a part and returns its requests.
        land: makes use of a part that has arrived; parts land in order.
        line: the series that have parts to post, in the order of their starts.
    """

    def __init__(
        self,
        name: str,
        parts: int,
        ahead: int,
        send: Callable[[int], list[MPI.Request]],
        land: Callable[[int], None],
        line: deque[Series],
    ) -> None:
        super().__init__(name, self._begin)
        self._parts, self._ahead, self._send, self._land, self._line = parts, ahead, send, land, line
        self._under_way: deque[list[MPI.Request]] = deque()
        self._posted = self._landed = 0

    def _begin(self) -> list[MPI.Request]:
        self._line.append(self)
        self._go_on()
        return []

    def _go_on(self) -> None:
        while self._line and self._line[0] is self and len(self._under_way) < self._ahead:
            self._under_way.append(self._send(self._posted))
            self._posted += 1
            if self._posted == self._parts:
                self._line.popleft()

    def test(self) -> bool:
        """Let at most one part land; return whether one did."""
        try:
            self._go_on()
            if not self._under_way or not MPI.Request.Testall(self._under_way[0]):
                return False
            self._land(self._landed)
            self._under_way.popleft()
            self._landed += 1
            if self._landed == self._parts:
                self.end()
            else:
                self._go_on()
        except BaseException as error:
            self.end(error)
        return True

    def end(self, error: BaseException | None = None) -> None:
        """Let go of the buffers and of the place in the line, and wake who waits."""
        self._under_way.clear()
        if self in self._line:
            self._line.remove(self)
        super().end(error)
