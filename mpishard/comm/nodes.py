"""Ranks of a node as a group of ranks that follow one another: what hierarchical sums and hybrid sharding build on."""

from __future__ import annotations

from collections import Counter

from mpishard.comm.base import Communicator
from mpishard.errors import ConfigError

__all__ = ["ranks_of_a_node"]


def ranks_of_a_node(comm: Communicator, who: str) -> int:
    """Return how many ranks a node has, where each has as many and ranks are numbered node by node. Collective.

    Args:
        who: the setting that needs it, in words, and what to set instead: the ends of the message.

    Raises:
        ConfigError: on all ranks, when nodes are of different sizes, or their ranks do not follow one another.
    """
    records = comm.exchange(comm.node.index.to_bytes(8, "little"), "the nodes of the ranks")
    nodes = [int.from_bytes(record, "little") for record in records]
    each = Counter(nodes)
    size = each[nodes[0]]
    other = next((node for node in each if each[node] != size), None)
    if other is not None:
        many = f"{size} rank{'s' if size > 1 else ''}"
        raise ConfigError(f"{who} and rank 0's node has {many}, node {other} has {each[other]}; start as many on each")
    for rank, node in enumerate(nodes):
        if node != nodes[rank // size * size]:
            raise ConfigError(
                f"{who} and ranks are not numbered node by node: rank {rank} is not on the node of rank "
                f"{rank // size * size}; place them by blocks (mpiexec -ppn {size}, --map-by ppr:{size}:node, or "
                f"srun --distribution=block)"
            )
    return size
