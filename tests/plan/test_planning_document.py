"""What docs/planning.md shows is what the program prints, and it names every key of the JSON."""

from __future__ import annotations

import re
import shlex

import pytest

from mpishard.cli import main
from mpishard.cli.plan import Asked, planned
from tests.cli.processes import ROOT

DOCUMENT = ROOT / "docs" / "planning.md"
PROMPT = "$ mpishard plan"
#: a file of the reader's
NOT_HERE = "job.toml"


def shown() -> list[tuple[str, list[str]]]:
    """(command, lines of output) of the document's indented blocks."""
    found: list[tuple[str, list[str]]] = []
    inside = False
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"    {PROMPT}"):
            found.append((line.strip(), []))
            inside = True
        elif inside and (line.startswith("    ") or not line):
            found[-1][1].append(line[4:])
        else:
            inside = False
    return found


@pytest.mark.parametrize("block", shown(), ids=lambda block: block[0])
def test_what_is_shown_is_printed(block: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    command, output = block
    if NOT_HERE in command:
        assert not any(output)
        return
    with pytest.raises(SystemExit) as caught:
        main(["plan", *shlex.split(command.removeprefix(PROMPT))])
    assert caught.value.code == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    parts = [part.splitlines() for part in "\n".join(output).strip("\n").split("\n\n")]
    for part in parts:
        assert any(lines[at : at + len(part)] == part for at in range(len(lines))), "\n".join(lines)


def test_the_document_shows_something() -> None:
    assert len([block for block in shown() if any(block[1])]) >= 2


def test_every_key_is_named() -> None:
    named = set(re.findall(r"`([\w.\[\]]+)`", DOCUMENT.read_text(encoding="utf-8")))
    found = planned(None, None, ["shard.offload=optimizer"], Asked(params="1e6", device="A100-40GB")).as_json()
    keys = {*found, *found["model_state_bytes"], *found["by_ranks"][0], *found["devices"]["A100-40GB"], "why"}
    keys |= set(found["per_rank"]["full_shard"]) | set(found["by_ranks"][0]["communication"]["full_shard"])
    assert keys <= named, keys - named
