"""Exactly how many collectives and how many bytes a step takes, against formulas of their own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from mpishard.comm.frames import FRAME_BYTES
from mpishard.comm.threads import run
from tests.shard.tallies import buffers, measured
from tests.shard.training import SMALL, Job

CASES = [
    (ranks, blocks, prefetch, local)
    for ranks, blocks, prefetch, local in [
        *itertools.product([2], [1, 2, 4], [0, 1, 2], [1, 3]),
        (1, 4, 1, 2),
        (3, 3, 1, 2),
        (4, 5, 3, 1),
        (2, 0, 1, 2),
    ]
]


def job_of(ranks: int, blocks: int, prefetch: int, local: int, strategy: str) -> Job:
    job = Job(replace(SMALL, layers=blocks, dropout=0.0), micro_batch=1, micros=ranks * local)
    return job.with_settings(strategy=strategy, prefetch=prefetch)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(("ranks", "blocks", "prefetch", "local"), CASES)
def test_counts_and_bytes(ranks: int, blocks: int, prefetch: int, local: int, strategy: str) -> None:
    job = job_of(ranks, blocks, prefetch, local, strategy)
    root, block = buffers(ranks)
    if blocks > prefetch + 1:
        forward, step = local * blocks, blocks + (2 * local - 1) * (blocks - 1 - prefetch)
    else:
        forward = step = blocks
    one = blocks
    if strategy == "no_shard":
        forward = one = 0
        step = blocks

    def share(calls_root: int, calls_block: int) -> tuple[int, int]:
        return calls_root + calls_block, (calls_root * root + calls_block * block) // ranks * (ranks - 1)

    in_passes = int(strategy == "full_shard")
    for result in run(ranks, lambda comm: measured(comm, job)):
        record = FRAME_BYTES * (ranks - 1)
        for name in ("step", "step again"):
            assert result[name]["all_gather"] == share(1, step)
            assert result[name]["reduce_scatter"] == share(local, local * blocks)
            assert result[name]["exchange"] == (2, 2 * record)  # it begins, and it agrees
        assert result["evaluate"]["all_gather"] == share(in_passes, forward)
        assert result["evaluate"]["reduce_scatter"] == (0, 0)
        assert result["evaluate"]["exchange"] == (2, 2 * record)
        assert result["predict"]["all_gather"] == share(in_passes, one)
        assert result["predict"]["exchange"] == (1, record)
        assert result["checksum"]["exchange"] == (1, record)
        assert all(counts["broadcast"] == (0, 0) for counts in result.values())


def test_each_turn_saves_gathers() -> None:
    """Where parameters turn round, a window of p + 1 units stays: p + 1 gathers fewer at each of 2m - 1 turns."""
    results = {}
    for prefetch in (0, 1, 2, 3):
        job = job_of(2, 4, prefetch, 3, "full_shard")
        results[prefetch] = run(2, lambda comm, job=job: measured(comm, job))[0]["step"]["all_gather"][0]
    assert results == {0: 1 + 4 + 5 * 3, 1: 1 + 4 + 5 * 2, 2: 1 + 4 + 5 * 1, 3: 1 + 4}
