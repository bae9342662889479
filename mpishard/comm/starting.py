"""MPI is loaded and started: at once, or with a device chosen between the two.

[Note: the order on a GPU]
Some MPIs take a context on the current device when they start (MPICH issue 5810), and all ranks would take it on the
first one; MPICH finds freed GPU memory only where it was loaded before the CUDA driver (MPICH issue 7304). So on a GPU
it goes: load libmpi, choose the device, start MPI. That needs the local rank from the launcher; where it does not say,
MPI starts first and the device follows.

mpi4py starts MPI when it is imported, and finalises it at exit if it has started it. Both settings are read once, at
the import; so they are set in the environment for that moment, and what mpi4py would have done is done here.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

__all__ = ["load_mpi", "meeting"]

#: Seconds in which all ranks must have started MPI; then the process ends with a traceback of where it waited.
_MEETING = 300.0

_INITIALIZE, _FINALIZE = "MPI4PY_RC_INITIALIZE", "MPI4PY_RC_FINALIZE"
#: What mpi4py takes for no, in the environment and in its ``rc``.
_NO = ("0", "n", "no", "false", "off")


@contextmanager
def meeting(several: bool) -> Iterator[None]:
    """End this process where MPI's start takes too long: it waits for all ranks, also for one that cannot start."""
    if not several or "mpi4py.MPI" in sys.modules:
        yield
        return
    with open(os.devnull, "w") if sys.stderr is None else nullcontext(sys.stderr) as told:
        faulthandler.dump_traceback_later(_MEETING, exit=True, file=told)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def load_mpi(between: Callable[[], None] | None = None) -> Any:
    """Return ``mpi4py.MPI``, started unless the program has forbidden that.

    Args:
        between: called when the library is loaded and MPI has not started; None for an import like any other. Where
            the program has MPI loaded already, it is called all the same.

    Raises:
        ImportError, RuntimeError, OSError: MPI cannot be loaded or started.
    """
    # Open MPI does not start where no home directory is told; it only looks for settings there.
    os.environ.setdefault("HOME", tempfile.gettempdir())
    if between is None or "mpi4py.MPI" in sys.modules or not _starts_at_import():
        from mpi4py import MPI

        if between is not None:
            between()
        return MPI
    with _unstarted():
        from mpi4py import MPI
    between()
    _start(MPI)
    return MPI


def _starts_at_import() -> bool:
    import mpi4py

    return str(os.environ.get(_INITIALIZE, mpi4py.rc.initialize)).lower() not in _NO


@contextmanager
def _unstarted() -> Iterator[None]:
    """Let mpi4py be imported without a start, and finalise at exit as if it had started MPI."""
    import mpi4py

    before = {name: os.environ.get(name) for name in (_INITIALIZE, _FINALIZE)}
    initialize, finalize = mpi4py.rc.initialize, mpi4py.rc.finalize
    os.environ[_INITIALIZE] = "0"
    if before[_FINALIZE] is None and finalize is None:
        os.environ[_FINALIZE] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        mpi4py.rc.initialize = initialize
        if before[_FINALIZE] is None:
            mpi4py.rc.finalize = finalize


def _start(MPI: Any) -> None:
    """Start MPI with the thread level that mpi4py would have asked for; its ``rc`` has the environment's by now."""
    import mpi4py

    levels = {
        "single": MPI.THREAD_SINGLE,
        "funneled": MPI.THREAD_FUNNELED,
        "serialized": MPI.THREAD_SERIALIZED,
        "multiple": MPI.THREAD_MULTIPLE,
    }
    if MPI.Is_initialized():
        return
    if str(mpi4py.rc.threads).lower() in _NO:
        MPI.Init()
    else:
        MPI.Init_thread(levels.get(str(mpi4py.rc.thread_level).lower(), MPI.THREAD_MULTIPLE))
