"""Reads what scripts/test left, prints it, and ends with the counts: python summary.py FOLDER [--filtered].

A launch is a folder with ``log``, ``status`` (exit status), ``seconds`` and ``expected``: the JUnit reports that it
had to leave, one for each rank; a check without reports (lint, types) is one test. A test counts once in each
launch: failed if it failed on any rank, skipped if every rank skipped it. A launch that ended badly although no
report shows a failed test has itself failed, and so has one that met its time limit or ran no test, unless the
tests were filtered.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: Lines of a failing launch's log that are shown, from the first report of a failure on.
SHOWN_LINES = 150
#: Where the reports begin: pytest's sections, or what tests/conftest.py prints before it ends a launch.
REPORT_MARKS = ("= FAILURES =", "= ERRORS =", "[ranks]")
#: Exit statuses of ``timeout``: it ended the command, or had to kill it.
TIMED_OUT = (124, 137)
#: pytest's exit status where no test was collected.
NO_TESTS = 5


@dataclass
class Launch:
    """What happened in one launch: outcomes by test, the reasons of skips, and what went wrong beside tests."""

    name: str
    seconds: int
    log: str
    outcomes: dict[str, str] = field(default_factory=dict)
    where: dict[str, list[str]] = field(default_factory=dict)
    skips: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        """Count the tests with this outcome; problems of the launch itself are one failure."""
        return sum(o == outcome for o in self.outcomes.values()) + (outcome == "failed" and bool(self.problems))


def read_report(launch: Launch, path: Path) -> None:
    """Add one rank's JUnit report to the launch."""
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            launch.outcomes[name] = "failed"
            launch.where.setdefault(name, []).append(path.stem.rpartition(".")[2])
        elif skip is not None:
            launch.outcomes.setdefault(name, "skipped")
            launch.skips[name] = skip.get("message") or "no reason given"
        elif launch.outcomes.get(name) != "failed":
            launch.outcomes[name] = "passed"


def read_launch(folder: Path, filtered: bool) -> Launch:
    """Read one launch's folder."""
    log = (folder / "log").read_text(errors="replace")
    launch = Launch(folder.name, int((folder / "seconds").read_text()), log)
    status = int((folder / "status").read_text())
    expected = (folder / "expected").read_text().split()
    if not expected:
        launch.outcomes[folder.name] = "failed" if status else "passed"
        return launch
    missing = []
    for name in expected:
        try:
            read_report(launch, folder / name)
        except (OSError, ElementTree.ParseError):
            missing.append(name)
    explained = "failed" in launch.outcomes.values()
    if status in TIMED_OUT:
        launch.problems.append("met its time limit")
    elif status == NO_TESTS and not missing:
        launch.problems += [] if filtered else ["ran no test"]
    elif status and not explained:
        launch.problems.append(f"ended with exit status {status}")
    if missing and not explained:
        launch.problems.append(f"left no {', '.join(missing)}")
    return launch


def excerpt(log: str) -> str:
    """Return the part of a log that shows its failures: from the first report on, or its end."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if any(mark in line for mark in REPORT_MARKS)), None)
    if first is None:
        return "\n".join(lines[-SHOWN_LINES // 2 :])
    more = len(lines) - first - SHOWN_LINES
    return "\n".join(lines[first : first + SHOWN_LINES] + ([f"... {more} more lines"] if more > 0 else []))


def show(launches: list[Launch], folder: Path) -> None:
    """Print failing launches, then the reasons of skips, then a row for each launch."""
    for launch in launches:
        if not launch.count("failed"):
            continue
        print(f"\n--- {launch.name} failed; its log is {folder / launch.name / 'log'}")
        print(excerpt(launch.log))
        for problem in launch.problems:
            print(f"failed: {launch.name} {problem}")
        for test, ranks in launch.where.items():
            print(f"failed: {launch.name} {test} ({', '.join(ranks)})")
    reasons = Counter(launch.skips[t] for launch in launches for t, o in launch.outcomes.items() if o == "skipped")
    if reasons:
        print("\nskipped:")
    for reason, count in sorted(reasons.items()):
        print(f"  {count:4d} x {reason}")
    print(f"\n{'launch':22s} {'passed':>7s} {'failed':>7s} {'skipped':>7s} {'seconds':>7s}")
    for launch in launches:
        counts = " ".join(f"{launch.count(outcome):7d}" for outcome in ("passed", "failed", "skipped"))
        print(f"{launch.name:22s} {counts} {launch.seconds:7d}")


def main(arguments: list[str]) -> int:
    """Print the summary; return 1 if anything failed or nothing ran."""
    folder = Path(arguments[0])
    started = sorted(folder.glob("*/status"), key=lambda path: path.stat().st_mtime_ns)
    launches = [read_launch(path.parent, "--filtered" in arguments) for path in started]
    show(launches, folder)
    passed, failed, skipped = (sum(launch.count(o) for launch in launches) for o in ("passed", "failed", "skipped"))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
