"""Every block of Python in the documents runs as it is printed: in one process, and on two ranks of mpiexec.

A block is a program of its own, unless the line before it is ``<!-- program: NAME.py -->``: blocks of one name in one
document are one program, in their order. Both runs must print the same, unless the marker says
``<!-- program: NAME.py, prints what depends on the ranks -->``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, fresh, mpiexec

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MARKER = re.compile(r"<!-- program: (\w+\.py)(, prints what depends on the ranks)? -->")
FENCE = "```"


@dataclass
class Program:
    """``name`` is the file's in which it runs; ``alike``: one process and two ranks print the same."""

    document: str
    name: str
    source: str = ""
    alike: bool = True

    def __str__(self) -> str:
        return f"{self.document}:{self.name}"


def programs(document: str, text: str) -> list[Program]:
    """The programs of a document; blank lines keep the lines of the document, so that a traceback names them."""
    found: dict[str, Program] = {}
    lines = text.split("\n")
    inside: Program | None = None
    other = False  # inside a block of another language
    for number, line in enumerate(lines):
        if other:
            other = line.strip() != FENCE
        elif inside is None and line.startswith(f"{FENCE}python"):
            assert line == f"{FENCE}python", f"{document}:{number + 1}: {line}"
            marker = MARKER.fullmatch(lines[number - 1])
            assert marker or not lines[number - 1].startswith("<!--"), f"{document}:{number}: {lines[number - 1]}"
            name = marker[1] if marker else f"line_{number + 1}.py"
            inside = found.setdefault(name, Program(document, name))
            inside.alike = not (marker and marker[2])
            inside.source += "\n" * (number + 1 - inside.source.count("\n"))
        elif inside is None:
            other = line.lstrip().startswith(FENCE)
        elif line == FENCE:
            inside = None
        else:
            inside.source += line + "\n"
    assert inside is None and not other, f"{document}: the last block does not end"
    return list(found.values())


PROGRAMS = [
    program for path in DOCUMENTS for program in programs(path.relative_to(ROOT).as_posix(), path.read_text())
]


def test_the_documents_have_programs() -> None:
    assert {"docs/library.md", "docs/writing-a-layer.md"} <= {program.document for program in PROGRAMS}


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@pytest.mark.jobs
def test_program(program: Program, tmp_path: Path) -> None:
    printed = []
    for way in (fresh, mpiexec):
        folder = tmp_path / way.__name__  # what a program writes, the next run does not find
        folder.mkdir()
        (folder / program.name).write_text(program.source)
        done = way("-W", "error", program.name, cwd=folder)
        assert done.returncode == 0, f"{way.__name__}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    if program.alike:
        assert printed[0] == printed[1]


EXAMPLE = """
```python
import a
```
<!-- program: b.py, prints what depends on the ranks -->
```python
import b
```
````text
```
<!-- program: b.py -->
```python
print(b)
```
"""


def test_blocks_are_found_where_they_stand() -> None:
    text = EXAMPLE.replace("````text\n```\n", "```text\nimport c\n```\n")
    first, second = programs("x.md", text)
    assert (first.name, first.source, first.alike) == ("line_2.py", "\n\nimport a\n", True)
    assert second.name == "b.py"
    lines = second.source.split("\n")
    assert (lines[6], lines[13]) == ("import b", "print(b)")
    assert "import c" not in second.source
