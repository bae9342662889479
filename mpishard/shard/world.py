"""The ranks of a job as a plan sees them: how many, how they are grouped, and what their transport needs."""

from __future__ import annotations

from dataclasses import dataclass

from mpishard.array.dtypes import DType
from mpishard.comm.base import Communicator
from mpishard.comm.scratch import transport_scratch
from mpishard.shard.precision import Scratch
from mpishard.shard.strategy import Settings, group_of

__all__ = ["World"]


def _nothing(count: int, kind: DType, wire: DType) -> int:
    return 0


@dataclass(frozen=True)
class World:
    """One rank of a job.

    Attributes:
        rank, size: this rank among all.
        group: ranks that share one copy of the state; ``size`` but for ``hybrid_shard``.
        scratch: bytes that a reduce-scatter inside a group needs.
        across: bytes that one needs among the ranks that hold the same shard, one of each group.
        own_bytes: memory that the transport holds for itself.
        sharers: ranks of a group that can share one gathered copy; 1 where each has its own.
    """

    rank: int
    size: int
    group: int
    scratch: Scratch = _nothing
    across: Scratch = _nothing
    own_bytes: int = 0
    sharers: int = 1

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return self.size // self.group

    @property
    def part(self) -> int:
        """Which of the group's shards this rank holds."""
        return self.rank % self.group

    @property
    def own(self) -> int:
        """Which 1/size of a unit is this rank's alone, to be counted and saved: it lies in its shard."""
        return self.part * self.groups + self.rank // self.group

    def owner(self, piece: int) -> int:
        """Return the rank whose :attr:`own` is ``piece``."""
        return piece % self.groups * self.group + piece // self.groups

    def partners(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the groups, and the sets of ranks that hold the same shard."""
        every = range(self.size)
        inside = [list(every[start : start + self.group]) for start in every[:: self.group]]
        return inside, [list(every[part :: self.group]) for part in range(self.group)]

    @classmethod
    def of(
        cls,
        comm: Communicator,
        settings: Settings,
        parts: tuple[Communicator, Communicator] | None,
        *,
        shares: bool = True,
    ) -> World:
        """Return the world of a communicator.

        Args:
            parts: its group, and those with the same shard, where there are several groups.
            shares: let ranks share one gathered copy where they can; not where each fills with NaN what it releases.

        Raises:
            ConfigError: the group does not divide the ranks.
        """
        group = group_of(settings, comm.size, comm.node.local_size)
        inner, outer = parts or (comm, comm)
        own = comm.own_bytes + sum(each.own_bytes for each in parts or ())
        sharers = inner.sharers if shares else 1
        return cls(comm.rank, comm.size, group, inner.scratch_bytes, outer.scratch_bytes, own, sharers)

    @classmethod
    def imagined(
        cls,
        rank: int,
        size: int,
        settings: Settings,
        *,
        node: int = 0,
        transport: str = "mpi",
        on_device: bool = False,
        own_bytes: int = 0,
        algorithm: str = "alltoall",
        shares_gathered: bool = True,
    ) -> World:
        """Return a world that is not there.

        Args:
            node: ranks of a node, the group of ``hybrid_shard`` where the settings name none; 0 for all.
            transport: how its ranks talk.
            on_device: whether arrays are on GPUs.
            own_bytes: memory that the transport would hold for itself.
            algorithm: how reduce-scatters over ``mpi`` go on the host.
            shares_gathered: let ranks share one gathered copy where they can.

        Raises:
            ConfigError: the group does not divide the ranks.
        """
        group = group_of(settings, size, node or size)
        near = min(node or size, size)
        inside, across = (
            transport_scratch(transport, ranks, on_device=on_device, algorithm=algorithm, local_size=local)
            for ranks, local in ((group, min(near, group)), (size // group, max(1, near // group)))
        )
        return cls(rank, size, group, inside, across, own_bytes, inside.sharers if shares_gathered else 1)
