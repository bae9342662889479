"""Settings of the transports that do not fit together."""

from __future__ import annotations

import re

import pytest

from mpishard.errors import ConfigError
from mpishard.train.config import load

MESSAGES = [
    (
        ["comm.transport=rdma"],
        'comm.transport is "rdma" in --set; it must be auto, node, mpi, hierarchical, staged, nccl or local',
    ),
    (
        ["comm.transport=hierarchical"],
        "comm.transport is hierarchical, which adds up inside each node first, and comm.sums is flat; set comm.sums to "
        "by_node, or use transport mpi",
    ),
    (
        ["debug.trace=10-12", "train.steps=3"],
        "debug.trace is 10-12 and train.steps is 3; name steps below that, counted from 0",
    ),
    (
        ["comm.transport=mpi", "comm.algorithm=tree"],
        "comm.algorithm is tree and comm.transport is mpi; only transport hierarchical has it: leave comm.algorithm at "
        "auto, or set comm.transport to hierarchical",
    ),
]


@pytest.mark.parametrize(("words", "message"), MESSAGES)
def test_a_wrong_setting_is_told_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load(overrides=words)


def test_sums_by_node_and_groups_fit_hierarchical() -> None:
    for more in ("comm.sums=by_node", "shard.strategy=hybrid_shard"):
        assert load(overrides=["comm.transport=hierarchical", more]).comm.transport == "hierarchical"
