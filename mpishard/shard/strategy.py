"""Strategies: what a rank holds between steps, and the settings that make them different schedules.

| strategy | parameters | gradients, masters and moments | as |
|---|---|---|---|
| ``no_shard`` | whole | whole | data parallelism |
| ``shard_optimizer`` | whole | 1/N; gradients are reduced at a micro-batch's end | ZeRO-1 |
| ``shard_grad_op`` | whole | 1/N; gradients are reduced as soon as they are there | ZeRO-2 |
| ``full_shard`` | 1/N | 1/N | ZeRO-3 |
| ``hybrid_shard`` | 1/G | 1/G, in each of N/G groups of G ranks | ZeRO-3 in a group |

(Rajbhandari et al. 2020, section 5; Zhao et al. 2023, section 3.2.2.)
"""

from __future__ import annotations

from dataclasses import dataclass

from mpishard.errors import ConfigError
from mpishard.shard.dealing import divisors

__all__ = ["ACCUMULATE", "ALIASES", "RECOMPUTE", "STRATEGIES", "Settings", "canonical", "group_of"]

STRATEGIES = ("full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard")
#: other names of strategies
ALIASES = {"zero3": "full_shard", "zero2": "shard_grad_op", "zero1": "shard_optimizer", "ddp": "no_shard"}
RECOMPUTE = ("none", "block")
ACCUMULATE = ("reduce", "no_sync")
_RESIDENT = ("no_shard", "shard_optimizer", "shard_grad_op")


def canonical(strategy: str) -> str:
    """Return the name of a strategy that may be given by an alias; what is neither is returned as it is."""
    return ALIASES.get(strategy, strategy)


@dataclass(frozen=True)
class Settings:
    """What shapes a step.

    Attributes:
        strategy: one of ``STRATEGIES``, or an alias.
        prefetch: units gathered ahead of the one that computes.
        recompute: ``none``, or ``block``: stages between the first and the loss keep only their input
            (Chen et al. 2016).
        micros: micro-batches of this rank in a step.
        recompute_every: of these stages, every how many-th is computed again.
        reshard_after_forward: release a unit after its forward and gather it again for its backward; else it stays
            until its backward in the same micro-batch has run. Of meaning where parameters are sharded.
        accumulate: ``reduce``: each micro-batch's gradient is reduced into the shards; ``no_sync``: whole gradients
            are added up on each rank, in the accumulator's type, and reduced once.
        group: ranks of a group of ``hybrid_shard``; 0 for those of a node.
    """

    strategy: str = "full_shard"
    prefetch: int = 1
    recompute: str = "none"
    micros: int = 1
    recompute_every: int = 1
    reshard_after_forward: bool = True
    accumulate: str = "reduce"
    group: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", canonical(self.strategy))
        for name, value, known in (
            ("shard.strategy", self.strategy, STRATEGIES),
            ("shard.recompute", self.recompute, RECOMPUTE),
            ("shard.accumulate", self.accumulate, ACCUMULATE),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        if self.prefetch < 0:
            raise ConfigError(f"shard.prefetch is {self.prefetch}; it must be 0 or more")
        if self.group < 0:
            raise ConfigError(f"shard.group is {self.group}; it must be 1 or more, or 0 for the ranks of a node")
        if self.recompute_every < 1:
            raise ConfigError(f"shard.recompute_every is {self.recompute_every}; it must be 1 or more")
        if self.micros < 1:
            raise ConfigError(f"a rank has {self.micros} micro-batches; it needs at least one")

    @property
    def resident(self) -> bool:
        """Whether a rank keeps all parameters, in the type that it computes with, from step to step."""
        return self.strategy in _RESIDENT

    @property
    def replicated(self) -> bool:
        """Whether a rank keeps all gradients, masters and moments too."""
        return self.strategy == "no_shard"

    @property
    def hybrid(self) -> bool:
        """Whether ranks shard inside groups, each of which holds the whole state."""
        return self.strategy == "hybrid_shard"


def group_of(settings: Settings, ranks: int, node: int) -> int:
    """Return the ranks that share one copy of the state: those of a group under ``hybrid_shard``, else all.

    Args:
        node: ranks of a node, the group where the settings name none.

    Raises:
        ConfigError: they do not divide the ranks.
    """
    if not settings.hybrid:
        return ranks
    size = settings.group or node
    if ranks % size:
        what = f"shard.group is {size}" if settings.group else f"a node has {size} ranks, which is the group"
        raise ConfigError(f"{what} and does not divide {ranks} ranks; set shard.group to {divisors(ranks)}")
    return size
