"""The table of operations in docs/writing-a-layer.md holds them all, with the arguments that they take."""

from __future__ import annotations

import inspect
import re

from mpishard.array.ops import Ops
from mpishard.testing.told import OPERATIONS, OTHERS
from tests.cli.processes import ROOT

SECTION = (ROOT / "docs/writing-a-layer.md").read_text().partition("## The operations\n")[2]


def call(name: str) -> str:
    """As the table writes it: ``gelu(x, y, tanh=True)``."""
    parameters = list(inspect.signature(getattr(Ops, name)).parameters.values())[1:]
    plain = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    return f"{name}({', '.join(plain)})"


def test_the_table_holds_every_operation_of_layers() -> None:
    rows = re.findall(r"^\| `([^`|]+)` \| [^|]+ \| [^|]+ \|$", SECTION, re.MULTILINE)
    assert sorted(rows) == sorted(call(name) for name in OPERATIONS)


def test_the_others_are_named() -> None:
    sentence = re.search(r"Its other methods are not for layers:\s(.*?) belong to the engine", SECTION, re.DOTALL)[1]
    assert re.findall(r"`(\w+)`", sentence) == list(OTHERS)


def test_every_public_method_is_in_one_of_the_lists() -> None:
    public = [name for name in dir(Ops) if not name.startswith("_") and callable(getattr(Ops, name))]
    assert sorted(public) == sorted([*OPERATIONS, *OTHERS])


def test_what_is_said_to_be_missing_is_missing() -> None:
    missing = re.compile("rsqrt|sqrt|divide|reciprocal|sigmoid|silu|maximum|relu|rms")
    assert [name for name in OPERATIONS if missing.search(name)] == []
