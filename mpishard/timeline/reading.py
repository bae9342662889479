"""The times that the ranks of a run have left (``mpishard train --trace``), read and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from mpishard.errors import ConfigError
from mpishard.shard.traced import FORMAT, traces

__all__ = ["RankTrace", "Step", "read_run"]

_KINDS = ("compute", "start", "wait")
_AGAIN = "run the training again with --trace"


@dataclass(frozen=True)
class Step:
    """One rank's times of one step, in seconds of rank 0's clock.

    Attributes:
        came: when it came to the step; the first of ``times`` is when all had.
        times: begin of the first instruction, and the end of each.
        arrivals: index of an instruction that waits -> when what it waits for was there.
    """

    number: int
    came: float
    times: tuple[float, ...]
    arrivals: dict[int, float]


@dataclass(frozen=True)
class RankTrace:
    """What one rank has left.

    Attributes:
        error: by which its clock may differ from rank 0's, in seconds.
        instructions, kinds: the schedule, ``Gather(h.0)`` and ``start`` say; the same on all ranks.
    """

    rank: int
    ranks: int
    host: str
    transport: str
    progress: str
    error: float
    instructions: tuple[str, ...]
    kinds: tuple[str, ...]
    steps: tuple[Step, ...]


def read_run(run: Path) -> list[RankTrace]:
    """Return what all ranks have left, in rank order.

    Raises:
        ConfigError: there is no such run, or no trace in it, or one is missing, damaged or of another run.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such run directory; give one that 'mpishard train --trace STEPS' wrote")
    paths = sorted(traces(run).glob("rank-*.json"))
    if not paths:
        raise ConfigError(f"{run}: holds no times of steps; {_AGAIN}, as in --trace 10-12")
    found = [_read(path) for path in paths]
    first = found[0]
    if [each.rank for each in found] != list(range(first.ranks)):
        raise ConfigError(f"{traces(run)}: holds {len(found)} of {first.ranks} ranks' times; {_AGAIN}")
    for path, each in zip(paths, found, strict=True):
        ours = (first.ranks, first.instructions, first.kinds, [step.number for step in first.steps])
        if (each.ranks, each.instructions, each.kinds, [step.number for step in each.steps]) != ours:
            raise ConfigError(f"{path}: has other steps or another schedule than rank 0's; {_AGAIN}")
    if not first.steps:
        raise ConfigError(f"{run}: no step was timed to its end; {_AGAIN}")
    return found


def _read(path: Path) -> RankTrace:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: is damaged or was not written to its end; {_AGAIN}") from None
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ConfigError(f"{path}: says that it is {found!r}, and {FORMAT!r} is needed; {_AGAIN}")
    try:
        return _checked(data)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{path}: is damaged: what it holds does not fit together; {_AGAIN}") from None


def _checked(data: dict[str, Any]) -> RankTrace:
    instructions, kinds = tuple(map(str, data["instructions"])), tuple(data["kinds"])
    if len(kinds) != len(instructions) or not set(kinds) <= set(_KINDS):
        raise ValueError
    ahead, error = map(float, data["clock"])
    steps = []
    for each in data["steps"]:
        times = tuple(float(time) - ahead for time in each["times"])
        arrivals = {int(index): float(time) - ahead for index, time in each["arrivals"]}
        if len(times) != len(instructions) + 1 or any(before > after for before, after in pairwise(times)):
            raise ValueError
        came = float(each["came"]) - ahead
        if any(not 0 <= index < len(instructions) for index in arrivals):
            raise ValueError
        if not isfinite(came + sum(times) + sum(arrivals.values())) or came > times[0]:
            raise ValueError
        steps.append(Step(int(each["step"]), came, times, arrivals))
    return RankTrace(
        int(data["rank"]),
        int(data["ranks"]),
        str(data["host"]),
        str(data["transport"]),
        str(data["progress"]),
        error,
        instructions,
        kinds,
        tuple(steps),
    )

