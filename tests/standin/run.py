"""Run a program on the stand-in: ``python -m tests.standin.run [-m MODULE | FILE] ARGS``, also under mpiexec.

Environment: ``STANDIN_DEVICES`` (8), ``STANDIN_STRICT`` (1 for strict; one rank, or NCCL: a
thread that calls MPI writes while a kernel is compared), ``STANDIN_LATE`` (needed, others),
``STANDIN_TRACE`` (a folder: ordering is checked at the end, and what was found is printed and makes the exit code 1;
the record goes to ``rank-N.trace``).
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys

from tests.standin import installed


def main() -> None:
    """Run what the command line names."""
    arguments = sys.argv[1:]
    folder = os.environ.get("STANDIN_TRACE", "")
    trace = None
    if folder:
        with contextlib.suppress(ImportError):
            from mpi4py import MPI  # noqa: F401 - starts MPI before anything is recorded
        from tests.standin.trace import Trace

        trace = Trace()
    settings = {
        "devices": int(os.environ.get("STANDIN_DEVICES", "8")),
        "strict": os.environ.get("STANDIN_STRICT", "") == "1",
        "late": os.environ.get("STANDIN_LATE", ""),
    }
    code: object = 0
    with installed(trace, **settings):  # type: ignore[arg-type]
        try:
            if arguments[:1] == ["-m"]:
                sys.argv = arguments[1:]
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = arguments
                runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as error:
            code = error.code
    if trace is not None:
        code = _report(trace, folder) or code
    sys.exit(code)  # type: ignore[arg-type]


def _report(trace: object, folder: str) -> int:
    from tests.standin.ordering import check

    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    trace.save(os.path.join(folder, f"rank-{rank}.trace"))  # type: ignore[attr-defined]
    conflicts = check(trace)
    for conflict in conflicts[:20]:
        print(f"[rank {rank}] {conflict}", file=sys.stderr)
    return int(bool(conflicts))


if __name__ == "__main__":
    main()
