"""What a configuration says to the engine, in the engine's own words."""

from __future__ import annotations

from typing import NamedTuple

from mpishard.comm.base import Communicator
from mpishard.comm.nodes import ranks_of_a_node
from mpishard.comm.together import together
from mpishard.errors import ConfigError
from mpishard.shard.loss_scale import LossScale
from mpishard.shard.schedule import Settings
from mpishard.shard.strategy import group_of
from mpishard.train.sections import DTYPES, Config, PrecisionConfig

__all__ = ["Places", "in_words", "loss_scale_of", "places_of", "settings_of", "types_of"]


class Places(NamedTuple):
    """How ranks stand together.

    Attributes:
        group: ranks that share one copy of the state under ``hybrid_shard``; 0 under another strategy.
        bracket: ranks whose gradients are added up first; 1 where all are added one after another.
    """

    group: int
    bracket: int


def places_of(config: Config, comm: Communicator, *, alone: bool = False) -> Places:
    """Return how the ranks of ``comm`` stand together as the settings ask. Collective.

    Args:
        alone: the other ranks are not there (``--as-rank``), and nodes are those that ``comm`` was told of.

    Raises:
        ConfigError: on all ranks, when a group does not divide them, or they are not placed by nodes as it needs.
    """

    def node(who: str) -> int:
        return comm.node.local_size if alone else ranks_of_a_node(comm, who)

    settings, group, bracket = settings_of(config, 1), 0, 1
    if settings.hybrid:
        group = settings.group or node("shard.group is 0, the ranks of a node,")
        together(comm, lambda: group_of(settings, comm.size, group))
    if config.comm.sums == "by_node":
        bracket = node("comm.sums is by_node")
    if config.shard.offload != "none" and comm.ops.device == "cpu":
        raise ConfigError(
            f"shard.offload is {config.shard.offload} and the device is the CPU, where all memory is the host's; "
            "leave shard.offload at none, or compute on a GPU (--device cuda says what is missing for it)"
        )
    return Places(group, bracket)


def settings_of(config: Config, micros: int, group: int | None = None) -> Settings:
    """Return what shapes a step.

    Args:
        micros: micro-batches of a rank.
        group: as in :class:`Places`, in place of the setting.
    """
    shard = config.shard
    return Settings(
        strategy=shard.strategy,
        prefetch=shard.prefetch,
        # attention's is the layer's own matter
        recompute="block" if shard.recompute == "block" else "none",
        micros=micros,
        recompute_every=shard.recompute_every,
        reshard_after_forward=shard.reshard_after_forward,
        accumulate=shard.accumulate,
        group=shard.group if group is None else group,
    )


def types_of(config: PrecisionConfig) -> tuple[str, str]:
    """Return the names of the element types to compute in and to reduce in; the second is empty for the same."""
    return DTYPES[config.compute], "" if config.reduce == "same" else DTYPES[config.reduce]


def loss_scale_of(config: PrecisionConfig) -> LossScale | None:
    """Return the loss scale of a new run; None where no fp16 needs one."""
    if not config.scaled:
        return None
    return LossScale(config.scale, dynamic=config.loss_scale == "dynamic", every=config.scale_every)


def in_words(config: Config, settings: Settings) -> str:
    """Return what shapes a step, for the first line of a run: strategy, what it gathers, keeps and computes in."""
    shard, types = config.shard, config.precision
    several = f" in groups of {settings.group}" if settings.hybrid and settings.group else ""
    every = f" (1 in {shard.recompute_every})" if shard.recompute_every > 1 else ""
    found = {
        f"{settings.strategy}{several}": True,
        f"prefetch {settings.prefetch}": True,
        "kept until backward": not settings.reshard_after_forward,
        f"recompute {shard.recompute}{every}": True,
        settings.accumulate: settings.accumulate != "reduce",
        types.compute: True,
        f"reduced in {types.reduce}": types.reduce not in ("same", types.compute),
        "sums by node": config.comm.sums == "by_node",
        f"{shard.offload} in host memory": shard.offload != "none",
        f"frozen {config.model.frozen}": bool(config.model.frozen),
    }
    return ", ".join(words for words, said in found.items() if said)
