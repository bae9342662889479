"""Which ranks make a node, and what is refused where they do not follow one another."""

from __future__ import annotations

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.dry import Pretended
from mpishard.comm.nodes import ranks_of_a_node
from mpishard.comm.threads import run
from mpishard.errors import ConfigError


class Placed(Pretended):
    """Rank 0 of a job whose ranks are on these nodes."""

    transport = "placed"
    _bind_all_gather = _bind_reduce_scatter = _split = None

    def __init__(self, nodes: list[int]) -> None:
        super().__init__(0, nodes, NumpyOps())

    def exchange(self, record: bytes, what: str = "") -> list[bytes]:
        assert record == self._nodes[0].to_bytes(8, "little")
        return [node.to_bytes(8, "little") for node in self._nodes]


@pytest.mark.parametrize(("nodes", "size"), [([0], 1), ([0, 0, 0], 3), ([0, 1, 2], 1), ([0, 0, 1, 1, 2, 2], 2)])
def test_ranks_of_a_node(nodes: list[int], size: int) -> None:
    assert ranks_of_a_node(Placed(nodes), "it needs nodes") == size


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([0, 0, 1], "it needs nodes and rank 0's node has 2 ranks, node 1 has 1; start as many on each"),
        ([0, 1, 1], "it needs nodes and rank 0's node has 1 rank, node 1 has 2; start as many on each"),
        (
            [0, 1, 0, 1],
            "it needs nodes and ranks are not numbered node by node: rank 1 is not on the node of rank 0; place them "
            "by blocks (mpiexec -ppn 2, --map-by ppr:2:node, or srun --distribution=block)",
        ),
        (
            [0, 0, 1, 2, 1, 2],
            "it needs nodes and ranks are not numbered node by node: rank 3 is not on the node of rank 2; place them "
            "by blocks (mpiexec -ppn 2, --map-by ppr:2:node, or srun --distribution=block)",
        ),
    ],
)
def test_what_is_refused(nodes: list[int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ranks_of_a_node(Placed(nodes), "it needs nodes")
    assert str(caught.value) == message


def test_threads_are_one_node() -> None:
    assert run(3, lambda comm: ranks_of_a_node(comm, "it needs nodes")) == [3] * 3
