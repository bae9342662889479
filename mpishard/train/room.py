"""Whether a run fits this machine, found out before it takes any memory."""

from __future__ import annotations

import os
from pathlib import Path

from mpishard.comm.base import Communicator
from mpishard.errors import ArenaError, ConfigError
from mpishard.nn.model import Model
from mpishard.shard.engine import Engine
from mpishard.shard.results import Optimizer
from mpishard.shard.schedule import Settings
from mpishard.train.display import size

__all__ = ["LESS", "check_room", "planned_memory", "room"]

#: what helps where memory does not suffice
LESS = 'use more ranks or nodes, a smaller train.micro_batch, or shard.recompute = "block"'
_CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def planned_memory(
    model: Model, comm: Communicator, optimizer: Optimizer, settings: Settings, micro_batch: int
) -> dict[str, int]:
    """Return the bytes, by category, that this rank's engine will hold.

    Raises:
        ConfigError: the plan is larger than any address space.
    """
    try:
        return Engine.rehearsed(model, comm, comm.ops, optimizer, settings, micro_batch=micro_batch).memory()
    except ArenaError as error:
        raise ConfigError(f"{error}; use a smaller model or batch") from None


def room() -> int:
    """Return the bytes of memory that this machine has, or that its control group may use."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(_CONTROL_GROUP.read_text()))
    except (OSError, ValueError):  # no control groups, or no limit
        return physical


def check_room(held: int, ranks: int) -> None:
    """Check that ``ranks`` ranks of this machine can hold ``held`` bytes each.

    Raises:
        ConfigError: they cannot.
    """
    if held * ranks > room():
        raise ConfigError(
            f"a rank needs {size(held)} and {ranks} of them run on this machine, which has {size(room())}; {LESS}"
        )
