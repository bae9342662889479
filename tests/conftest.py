"""Sessions on several ranks: one readable report, and an end even where a rank fails or hangs.

[Note: one suite on several ranks]
``mpiexec -n N python -m pytest --with-mpi tests/mpi`` starts N sessions that run the same tests in the same order.

- Rank 0 prints; the others are silent. ``--junitxml junit.xml`` becomes ``junit.rank0.xml`` and so on.
- After each test, before its fixtures are torn down, the ranks tell each other whether it failed. A failure anywhere
  is a failure on every rank, and rank 0 prints the report of the first rank that failed, so ``-x`` works.
- A rank that failed waits GRACE seconds for that. If the others do not come, they wait for it in a collective: it
  prints its report, writes its JUnit file and aborts the launch.
- A test that has not ended after LIMIT seconds hangs: every rank prints its stacks, then the launch is aborted. The
  same holds for the collection and for the process's end.

What is printed on the way to an abort starts with ``[ranks]``; scripts/lib/summary.py looks for that.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.junitxml import xml_key

#: Seconds that a failed rank waits for the others to end the test.
GRACE = 5.0
#: Seconds for one test on several ranks, and for one that is marked slow.
LIMIT, SLOW_LIMIT = 90.0, 900.0
#: Folders and files whose calls are left out of the stacks.
OTHERS_CODE = {"_pytest", "pytest", "pluggy", "<frozen runpy>"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    problem = gpu_problem() if marked else None
    if problem:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=problem))


def gpu_problem() -> str | None:
    """Say why no test can use a GPU here; None where one can."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"needs a GPU with CuPy: {error}"
    return None if count else "needs a GPU with CuPy: no device"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if config.getoption("--with-mpi", default=False):
        config.pluginmanager.register(Ranks(config), "mpishard-ranks")


class Ranks:
    """This rank's part in keeping the sessions together; see the note above."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD.Dup()  # what tests leave pending in COMM_WORLD must not meet our messages
        self.rank, self.size = self.comm.rank, self.comm.size
        self.config = config
        self.stderr = os.dup(2)  # pytest captures the one that tests write to
        self.failures: list[str] = []  # of this rank, in the test that runs
        self.waits = False  # for the other ranks, at the end of the test
        if config.option.xmlpath:
            path = Path(config.option.xmlpath)
            config.option.xmlpath = str(path.with_suffix(f".rank{self.rank}{path.suffix}"))
        if config.option.basetemp is None:
            # Ranks that share pytest's numbered directories remove each other's at the end.
            config.option.basetemp = tempfile.mkdtemp(prefix=f"pytest-rank{self.rank}-")
            atexit.register(shutil.rmtree, config.option.basetemp, ignore_errors=True)
        self.watchdog = Watchdog(self.stop_hanging)
        self.watchdog.start("the collection of the tests", LIMIT)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        if self.rank:
            config.pluginmanager.unregister(name="terminalreporter")
            config.pluginmanager.register(pytest.TerminalReporter(config, io.StringIO()), "terminalreporter")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = "\n".join(item.nodeid for item in session.items)
        found = (hashlib.sha256(names.encode()).hexdigest(), len(session.items), "\n".join(self.failures))
        others = self.comm.allgather(found)
        self.watchdog.stop()
        self.failures.clear()
        for rank, (names_found, count, errors) in enumerate(others):
            if names_found != others[0][0]:
                pytest.exit(
                    f"[ranks] the ranks collected different tests: rank 0 has {others[0][1]}, rank {rank} has {count}, "
                    f"perhaps in another order\n{others[0][2]}{errors}",
                    returncode=pytest.ExitCode.USAGE_ERROR,
                )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.failures.clear()
        self.watchdog.start(item.nodeid, SLOW_LIMIT if item.get_closest_marker("slow") else LIMIT, item)
        try:
            return (yield)
        finally:
            self.watchdog.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, pytest.TestReport]:
        report: pytest.TestReport = yield
        if report.failed:
            if report.when == "teardown" and self.rank and not call.excinfo.errisinstance(ElsewhereError):
                self.say(f"{item.nodeid} failed in its teardown\n{report.longreprtext}")
            self.failures.append(report.longreprtext)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        failed = self.agree(item)
        result = yield
        if failed and self.rank not in failed:
            ranks = ", ".join(map(str, failed))
            first = next(iter(failed))
            raise ElsewhereError(f"failed on rank {ranks} of {self.size}; rank {first} reports:\n{failed[first]}")
        return result

    def pytest_internalerror(self, excrepr: Any) -> None:
        self.abort(f"pytest itself failed\n{excrepr}")

    def pytest_unconfigure(self) -> None:
        self.watchdog.start("the process after its tests", LIMIT)

    def agree(self, item: pytest.Item) -> dict[int, str]:
        """Return the reports of the ranks where the test failed, by rank, once every rank has ended it."""
        flags = array("i", bytes(4 * self.size))
        request = self.comm.Iallgather(array("i", [bool(self.failures)]), flags)
        deadline = time.monotonic() + GRACE
        self.waits = True
        while not request.Test():
            if self.failures and time.monotonic() > deadline:
                self.abort(
                    f"{item.nodeid} failed here, and after {GRACE:g} s other ranks are still in it: they wait for "
                    "this rank in a collective\n" + "\n".join(self.failures)
                )
            time.sleep(0.0005)
        self.waits = False
        if not any(flags):
            return {}
        reports = self.comm.allgather("\n".join(self.failures))
        return {rank: report for rank, report in enumerate(reports) if flags[rank]}

    def stop_hanging(self, what: str, seconds: float, item: pytest.Item | None) -> None:
        """Print where this rank stands, leave the other ranks time to do so, and abort; runs in the watchdog."""
        state = "this rank has ended it and waits for the others" if self.waits else "this rank is still in it"
        text = f"{what} has not ended after {seconds:g} s; {state}\n{stacks()}"
        time.sleep(0.2 * self.rank)  # one after another, lest the launcher mix their lines
        self.say(text)
        time.sleep(1 + 0.2 * (self.size - self.rank))
        xml = self.config.stash.get(xml_key, None)
        if xml and item:
            short = f"[ranks] has not ended after {seconds:g} s; the log shows every rank's stacks"
            xml.pytest_runtest_logreport(pytest.TestReport(item.nodeid, item.location, {}, "failed", short, "call"))
        self.abort("the launch is aborted")

    def say(self, text: str) -> None:
        os.write(self.stderr, f"\n[ranks] rank {self.rank} of {self.size}: {text}\n".encode())

    def abort(self, text: str) -> NoReturn:
        """Print the text, write the JUnit file and end all ranks."""
        self.say(text)
        if xml := self.config.stash.get(xml_key, None):
            xml.pytest_sessionfinish()
        time.sleep(0.5)  # for the launcher to read what was printed
        self.mpi.COMM_WORLD.Abort(1)
        os._exit(1)


class ElsewhereError(pytest.fail.Exception):
    """A test that ended well on this rank failed on another one."""

    def __init__(self, text: str) -> None:
        super().__init__(text, pytrace=False)


class Watchdog:
    """Calls ``on_hang(what, seconds, item)`` in a thread of its own where ``what`` is not stopped in time."""

    def __init__(self, on_hang: Callable[[str, float, pytest.Item | None], None]) -> None:
        self.on_hang = on_hang
        self.timer: threading.Timer | None = None

    def start(self, what: str, seconds: float, item: pytest.Item | None = None) -> None:
        self.stop()
        self.timer = threading.Timer(seconds, self.on_hang, (what, seconds, item))
        self.timer.daemon = True
        self.timer.start()

    def stop(self) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer.join()
        self.timer = None


def stacks() -> str:
    """Return the calls of every thread but this one, without those of pytest."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    text = ""
    for ident, frame in sys._current_frames().items():
        calls = [call for call in traceback.extract_stack(frame) if not OTHERS_CODE & set(Path(call.filename).parts)]
        if ident != threading.get_ident():
            text += f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_list(calls))
    return text
