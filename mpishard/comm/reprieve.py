"""Time to tell which rank has died, under a launcher that ends all ranks as soon as it sees that one has.

[Note: what a launcher sees]
Hydra, which is the mpiexec of MPICH, sees the end of a rank by its descriptors: the socket of PMI, on which they speak,
and standard output and error. Where these close and the rank has not taken its leave by PMI, it sends SIGKILL to all
process groups of that host, within a millisecond. The kernel closes a process's descriptors before it tells others
that the process has ended; so no rank can be told in time. A child of each rank therefore holds them open for
``SECONDS`` longer. It is a shell that sleeps, in a session of its own, since the launcher ends process groups. It needs
no rank to be well: its standard input closes with its rank, and it ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

from mpishard.launched import in_step

__all__ = ["SECONDS", "Reprieve"]

#: for which a launcher does not see that a rank has died
SECONDS = 1


class Reprieve:
    """Holds this process's descriptors that Hydra looks at, from now to :meth:`close`, and ``SECONDS`` beyond its end.

    Under other launchers, which leave time themselves, it does nothing.
    """

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None
        number = os.environ.get("PMI_FD", "")
        if number.isdecimal() and not in_step():
            # Where there is no such descriptor, or no room for a process, it is as without.
            with contextlib.suppress(OSError, ValueError, OverflowError):
                os.fstat(int(number))
                self._holder = subprocess.Popen(
                    ["/bin/sh", "-c", f"read line; sleep {SECONDS}"],
                    stdin=subprocess.PIPE,
                    pass_fds=[int(number)],
                    start_new_session=True,
                )

    def close(self) -> None:
        """End it. Again is free."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()
            self._holder = None
