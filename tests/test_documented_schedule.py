"""What the documents print is what the program prints: schedules line by line, memory figure by figure."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.cli.schedule import described
from mpishard.optim.adamw import AdamW
from mpishard.shard.forecast import forecast
from mpishard.shard.precision import precision
from mpishard.shard.world import World
from mpishard.train.config import load
from mpishard.train.display import size
from mpishard.train.model import build_model
from mpishard.train.settings import settings_of, types_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
PROMPT = "$ mpishard schedule"
MEMORY = DOCS / "strategies-and-memory.md"


def shown(path: Path) -> list[tuple[str, list[str]]]:
    """Return the (command, output) pairs of the indented blocks of a document."""
    found: list[tuple[str, list[str]]] = []
    inside = False
    for line in path.read_text(encoding="utf-8").replace("\\\n", "").splitlines():
        if line.startswith(f"    {PROMPT}"):
            found.append((line.strip(), []))
            inside = True
        elif inside and (line.startswith("    ") or not line.strip()):
            found[-1][1].append(line[4:])
        else:
            inside = False
    for _, output in found:
        while output and not output[-1]:
            output.pop()
    return found


def printed(command: str) -> list[str]:
    words = shlex.split(command.removeprefix(PROMPT))
    options = {"preset": None, "ranks": "1", "kind": "step"}
    overrides = []
    for name, value in zip(words[::2], words[1::2], strict=True):
        if name == "--set":
            overrides.append(value)
        else:
            assert name.removeprefix("--") in options
            options[name.removeprefix("--")] = value
    return described(load(None, options["preset"], overrides), int(options["ranks"]), str(options["kind"]))


def stands_in(part: list[str], whole: list[str]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_printed_schedules_are_the_programs(path: Path) -> None:
    for command, output in shown(path):
        assert output, command
        assert stands_in(output, printed(command)), f"{path.name}: {command} prints\n" + "\n".join(printed(command))


def test_the_step_is_shown_whole_and_so_are_the_other_lists() -> None:
    blocks = shown(DOCS / "how-a-step-runs.md")
    command, output = blocks[0]
    assert output == printed(command)
    assert "model.layers=3" in command
    text = " ".join(command for command, _ in blocks)
    for other in ("shard.prefetch=0", "shard.recompute=block", "shard.strategy=no_shard"):
        assert other in text


def test_the_architecture_shows_the_same_step() -> None:
    step = printed(f"{PROMPT} --preset tiny --set model.layers=3 --set train.global_batch=2 --ranks 2")
    block = step[step.index("") + 1 :]
    block = block[: block.index("")]
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert "\n".join(f"    {line}" for line in block) in text


# --- memory

SETTING = re.compile(r"`(\w+\.\w+) = ([^`]+)`")


def planned(preset: str, ranks: int, overrides: list[str]) -> dict[str, int]:
    config = load(None, preset, overrides)
    micros = config.train.global_batch // config.train.micro_batch // ranks
    settings = settings_of(config, max(1, micros))
    types, ops = precision(*types_of(config.precision)), NumpyOps()
    ops.prepare(types.kind)
    ops.prepare(types.wire)
    model = build_model(config.model, recompute_attention=config.shard.recompute == "attention")
    name, own = ("mpi", NumpyOps.own_bytes) if ranks > 1 else ("local", 0)  # the thread that calls MPI has some too
    if config.comm.transport == "node":
        name, own = "node", 0
    share = config.comm.share_gathered
    world = World.imagined(0, ranks, settings, transport=name, own_bytes=own, shares_gathered=share)
    batch = config.train.micro_batch
    return forecast(model, AdamW().states, settings, types, world, micro_batch=batch, ops_bytes=ops.own_bytes).held


def tables(path: Path) -> list[tuple[str, list[list[str]]]]:
    """Return (preset, rows of cells with the head first) of the tables that a comment ``memory of PRESET`` marks."""
    found: list[tuple[str, list[list[str]]]] = []
    preset = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if mark := re.fullmatch(r"<!-- memory of (\S+) -->", line):
            preset = mark[1]
            found.append((preset, []))
        elif preset and line.startswith("|"):
            found[-1][1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif line.strip() and found and found[-1][1]:
            preset = ""
    return found


def test_memory_figures_are_those_of_engines() -> None:
    checked = 0
    for preset, (head, _, *rows) in tables(MEMORY):
        assert head[:2] == ["settings", "ranks"]
        for settings, ranks, *cells in rows:
            overrides = [f"{key}={value}" for key, value in SETTING.findall(settings)]
            assert len(overrides) == settings.count("=")
            held = planned(preset, int(ranks), overrides)
            state = held["parameters"] + held["masters"] + held["gradients"] + held["optimizer"]
            other = held["workspace"] + held["staging"]
            known = {**held, "state": state, "other": other, "total": sum(held.values())}
            assert dict(zip(head[2:], cells, strict=True)) == {name: size(known[name]) for name in head[2:]}, settings
            checked += 1
    assert checked >= 15
