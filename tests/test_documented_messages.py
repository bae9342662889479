"""Messages that the documents quote are messages of the program, word by word; values may be others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: a line of this many fixed characters says enough to be recognised
LEAST = 20
#: stands for what is not fixed
VALUE = "\0"


def patterns() -> list[re.Pattern[str]]:
    """Return what lines the texts in the package's code can become."""
    found = set()
    for path in sorted((ROOT / "mpishard").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts: list[ast.expr] = []
            if isinstance(node, ast.JoinedStr):
                parts = node.values
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in parts)
            found |= {line for line in text.split("\n") if len(line.replace(VALUE, "")) >= LEAST}
    return [re.compile(re.escape(line).replace(VALUE, ".*")) for line in sorted(found)]


def quoted(path: Path) -> Iterator[str]:
    """Yield the messages in indented blocks: a line of four spaces, and what stands deeper below it."""
    for block in re.findall(r"^    (?=\S)(?:.*\n)(?:        \S.*\n)*", path.read_text(encoding="utf-8"), re.MULTILINE):
        yield " ".join(block.split())


def recognised(message: str, known: list[re.Pattern[str]]) -> bool:
    """Return whether the whole of a message is a text of the program's, but for a prefix that names its origin."""
    told = re.sub(r"^(mpishard: (warning: |rank \d+ on \w+: )?|CommError: )", "", message)
    return any(pattern.fullmatch(text) for pattern in known for text in (message, told))


def test_quoted_messages_are_the_programs() -> None:
    known = patterns()
    messages = [message for message in quoted(ROOT / "docs" / "troubleshooting.md") if not message.startswith("step ")]
    assert len(messages) >= 20
    assert [message for message in messages if not recognised(message, known)] == []


def test_a_changed_message_is_found() -> None:
    known = patterns()
    assert recognised("runs/a is being used by another run; wait for its end, or choose another --run-dir", known)
    assert not recognised("runs/a is being used by another run; choose another --run-dir", known)
