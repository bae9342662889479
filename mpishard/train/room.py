"""Whether a run fits this machine, found out before it takes any memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.errors import ArenaError, ConfigError
from mpishard.nn.model import Model
from mpishard.shard.forecast import Forecast, forecast
from mpishard.shard.precision import precision
from mpishard.shard.results import Optimizer
from mpishard.shard.schedule import Settings
from mpishard.shard.world import World
from mpishard.train.display import size

__all__ = ["LESS", "check_room", "planned", "room", "thread_warning"]

#: what helps where memory does not suffice
LESS = 'use more ranks or nodes, a smaller train.micro_batch, or shard.recompute = "block"'
#: in the order in which OpenBLAS asks them
_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def planned(
    model: Model,
    comm: Communicator,
    optimizer: Optimizer | None,
    settings: Settings,
    micro_batch: int,
    types: tuple[str, str] = ("float32", ""),
    offload: str = "none",
) -> Forecast:
    """Return what this rank's engine will hold, and what a step of it will use.

    Args:
        types: element types to compute in and to reduce in, as in :class:`~mpishard.shard.engine.Engine`.

    Raises:
        ConfigError: the plan is larger than any address space.
    """
    found = precision(*types)
    for kind in (found.kind, found.wire):
        comm.ops.prepare(kind)
    try:
        return forecast(
            model,
            optimizer.states if optimizer is not None else None,
            settings,
            found,
            _world(comm, settings),
            micro_batch=micro_batch,
            ops_bytes=comm.ops.own_bytes,
            offload=offload,
        )
    except ArenaError as error:
        raise ConfigError(f"{error}; use a smaller model or batch") from None


def _world(comm: Communicator, settings: Settings) -> World:
    """Return this rank's world before there are communicators of its groups."""
    world, rule = World.of(comm, settings, None), comm.scratch_rule
    beside = max(1, comm.node.local_size // world.group)  # of those that hold the same shard
    inside = rule.of(world.group)
    sharers = inside.sharers if comm.shares_gathered else 1
    return replace(world, scratch=inside, across=rule.of(world.groups, beside), sharers=sharers)


def room() -> int:
    """Return the bytes of memory that this machine has, or that its control group may use."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(_CONTROL_GROUP.read_text()))
    except (OSError, ValueError):  # no control groups, or no limit
        return physical


def thread_warning(ranks: int) -> str:
    """Return a warning where ``ranks`` ranks of this machine start more BLAS threads than they have cores, or ""."""
    cores = len(os.sched_getaffinity(0))
    # A launcher that binds ranks gives each its own cores; else they share what there is.
    own = cores if cores < (os.cpu_count() or 1) else max(1, cores // ranks)
    set_to = next((value for name in _THREADS if (value := os.environ.get(name, "")).isdecimal()), "")
    threads = int(set_to or cores)
    if ranks == 1 or threads <= own:
        return ""
    return (
        f"each of {ranks} ranks on this machine starts {threads} BLAS threads and has {own} "
        f"core{'s' if own > 1 else ''}, which makes it many times slower; set OPENBLAS_NUM_THREADS={own}"
    )


def check_room(held: int, ranks: int, ops: Ops, host: int = 0) -> None:
    """Check that ``ranks`` ranks of this machine can hold ``held`` bytes each, or this one's GPU what is asked of it.

    Args:
        host: bytes of the machine's memory that each rank on a GPU takes beside it.

    Raises:
        ConfigError: they cannot.
    """
    if ops.device != "cpu":
        more = held - ops.own_bytes  # which was taken with the GPU
        if more > ops.room:
            raise ConfigError(f"a rank needs {size(more)} and its GPU has {size(ops.room)} left ({ops.device}); {LESS}")
        if host * ranks > room():
            raise ConfigError(
                f"a rank keeps {size(host)} in host memory and {ranks} of them run on this machine, which has "
                f"{size(room())}; use more nodes, or leave shard.offload at none"
            )
        return
    if held * ranks > room():
        raise ConfigError(
            f"a rank needs {size(held)} and {ranks} of them run on this machine, which has {size(room())}; {LESS}"
        )
