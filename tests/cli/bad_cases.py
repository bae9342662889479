"""Cases of what users get wrong, and what the program must do in each: shared by the files that hold them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.cli.processes import program
from tests.cli.small_runs import snapshot

#: prepares files in a folder and returns the program's arguments
Case = Callable[[Path], list[str]]
#: words of a program's inside, which a user need not know
INSIDE = re.compile(r"Traceback|<class|NoneType|\bint\b|\bstr\b|\bfloat\b|\bbool\b|\bdict\b|__|Error:|\.py\b")


class Cases(dict[str, tuple[Case, tuple[str, ...]]]):
    """Cases by name, each with the words that the line must hold."""

    def add(self, *words: str) -> Callable[[Case], Case]:
        """Decorate what prepares a case."""

        def add(prepare: Case) -> Case:
            self[prepare.__name__.replace("_", " ")] = prepare, words
            return prepare

        return add

    def check(self, name: str, folder: Path, ranks: int) -> None:
        """One line, exit code 2 on every rank, and all files as they were."""
        prepare, words = self[name]
        arguments = prepare(folder)
        before = snapshot(folder)
        done = program(ranks, arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpishard: ")]
        for word in words:
            assert word in line
        assert not INSIDE.search(line.replace("my.toml", "")), line
        assert snapshot(folder) == before
        run = folder / "run"
        assert run.exists() == any(str(run) in path for path in before) or "without" in name
