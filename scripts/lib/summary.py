"""Reads what scripts/test left, prints it, and ends with the counts: python summary.py FOLDER [--filtered].

A launch is a folder with ``log``, ``status`` (exit status), ``seconds`` and ``expected``: the JUnit reports that it
had to leave, one for each rank; a check without reports (lint, types) is one test. A test counts once in each
launch: failed if it failed on any rank, skipped if every rank skipped it. A launch that ended badly although no
report shows a failed test has itself failed, and so has one that met its time limit or ran no test, unless the
tests were filtered. The report of a failed test is printed once, with the launches and ranks that gave it.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: Lines that are shown of one report or log.
SHOWN_LINES = 120
#: What tests/conftest.py prints on the way to an abort, or writes in place of a report, begins so.
RANKS_MARK = "[ranks]"
#: How the report of a rank begins that only repeats another's, in tests/conftest.py.
ECHO = "failed on rank"
#: A call of pytest in the stacks that faulthandler prints.
PYTEST_CALL = re.compile(r'  File "(<frozen runpy>|.*/(_pytest|pytest|pluggy)/[^"]*)", line \d+ in ')
#: Exit statuses of ``timeout``: it ended the command, or had to kill it.
TIMED_OUT = (124, 137)
#: pytest's exit status where no test was collected.
NO_TESTS = 5


@dataclass
class Launch:
    """What happened in one launch: outcomes, reports and reasons of skips by test, and problems beside tests."""

    name: str
    seconds: int
    log: str
    outcomes: dict[str, str] = field(default_factory=dict)
    reports: dict[str, dict[str, str]] = field(default_factory=dict)  # test -> rank -> text
    skips: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    ended_early: bool = False

    def count(self, outcome: str) -> int:
        """Count the tests with this outcome; problems of the launch itself are one failure."""
        return sum(o == outcome for o in self.outcomes.values()) + (outcome == "failed" and bool(self.problems))


def read_report(launch: Launch, path: Path) -> bool:
    """Add one rank's JUnit report to the launch; return False where it is missing or cut off."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return False
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}".lstrip(":")
        skip = case.find("skipped")
        parts = [part for tag in ("failure", "error") for part in case.findall(tag)]
        if parts:
            launch.outcomes[name] = "failed"
            printed = [part for tag in ("system-out", "system-err") for part in case.findall(tag)]
            texts = [(part.text or "").strip("\n") for part in parts + printed]
            text = "\n".join(text for text in texts if not text.startswith("---") or "\n" in text)
            ranks = launch.reports.setdefault(name, {})
            rank = path.stem.rpartition(".")[2] if path.stem.startswith("junit.") else "one process"
            ranks[rank] = "\n".join(filter(None, [ranks.get(rank), text]))
        elif skip is not None:
            launch.outcomes.setdefault(name, "skipped")
            launch.skips[name] = skip.get("message") or "no reason given"
        elif launch.outcomes.get(name) != "failed":
            launch.outcomes[name] = "passed"
    return True


def read_launch(folder: Path, filtered: bool) -> Launch:
    """Read one launch's folder."""
    log = (folder / "log").read_text(errors="replace").replace("\0", "")
    launch = Launch(folder.name, int((folder / "seconds").read_text()), log)
    status = int((folder / "status").read_text())
    expected = (folder / "expected").read_text().split()
    if not expected:
        launch.outcomes[folder.name] = "failed" if status else "passed"
        return launch
    missing = [name for name in expected if not read_report(launch, folder / name)]
    explained = bool(launch.reports)
    launch.ended_early = bool(missing)
    if status in TIMED_OUT:
        launch.problems.append("met its time limit")
    elif status == NO_TESTS and not missing:
        launch.problems += [] if filtered else ["ran no test"]
    elif status and not explained:
        launch.problems.append(f"ended with exit status {status}")
    if missing and not explained:
        launch.problems.append(f"left no {', '.join(missing)}")
    return launch


def shorten(text: str, last: bool = False) -> str:
    """Return the first lines of a text, or its last ones."""
    lines = text.splitlines()
    more = len(lines) - SHOWN_LINES
    if more <= 0:
        return text
    note = [f"... {more} more lines"]
    return "\n".join(note + lines[more:] if last else lines[:SHOWN_LINES] + note)


def wrong_lines(text: str) -> str:
    """Return the lines of a report that say what went wrong; all if none is marked."""
    return "\n".join(line for line in text.splitlines() if line.startswith("E ")) or text


def show_log(launch: Launch, folder: Path) -> None:
    """Print what a launch printed on the way to its abort, or the end of its log, without pytest's own calls."""
    log = "\n".join(line for line in launch.log.splitlines() if not PYTEST_CALL.match(line))
    mark = log.find(RANKS_MARK)
    print(f"\n--- {launch.name}, from {folder / launch.name / 'log'}")
    print(shorten(log, last=True) if mark < 0 else shorten(log[mark:]))


def show_failures(launches: list[Launch], folder: Path) -> None:
    """Print the report of each failed test once, then the logs of launches where no report tells enough."""
    seen: dict[str, dict[str, list[str]]] = {}  # test -> text -> places
    for launch in launches:
        for test, reports in launch.reports.items():
            own = {rank: text for rank, text in reports.items() if not text.startswith(ECHO)} or reports
            for rank, text in own.items():
                seen.setdefault(test, {}).setdefault(text, []).append(f"{launch.name} {rank}")
    for test, texts in seen.items():
        print(f"\n--- {test}")
        for number, (text, places) in enumerate(texts.items()):
            print(f"failed: {', '.join(places)}")
            # Where the test stands is told by the first report; the others differ in what went wrong.
            print(shorten(text if number == 0 else wrong_lines(text)))
    for launch in launches:
        hung = any(text.startswith(RANKS_MARK) for reports in launch.reports.values() for text in reports.values())
        if launch.problems or hung or launch.outcomes.get(launch.name) == "failed":
            show_log(launch, folder)
        for problem in launch.problems:
            print(f"failed: {launch.name} {problem}")
        if launch.ended_early:
            print(f"{launch.name} ended early: tests after the failed one did not run")


def show(launches: list[Launch], folder: Path) -> None:
    """Print failures, the reasons of skips, and a row for each launch."""
    show_failures(launches, folder)
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
