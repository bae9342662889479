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
WAYS = {
    **{name: {"strategy": name} for name in ("full_shard", "no_shard", "shard_grad_op", "shard_optimizer")},
    "kept": {"strategy": "full_shard", "reshard_after_forward": False},
    "no_sync": {"strategy": "full_shard", "accumulate": "no_sync"},
    "no_shard once": {"strategy": "no_shard", "accumulate": "no_sync"},
}


def job_of(ranks: int, blocks: int, prefetch: int, local: int, **changes: object) -> Job:
    job = Job(replace(SMALL, layers=blocks, dropout=0.0), micro_batch=1, micros=ranks * local)
    return job.with_settings(prefetch=prefetch, **changes)


def streamed(blocks: int, prefetch: int, turns: int) -> int:
    """Gathers of blocks: all of them once, and at each turn those outside the window again."""
    return blocks + turns * max(0, blocks - 1 - prefetch)


@pytest.mark.parametrize(
    ("way", "ranks", "blocks", "prefetch", "local"),
    [(way, *case) for way in WAYS for case in (CASES if way in ("full_shard", "no_shard", "kept") else CASES[-6:])],
)
def test_counts_and_bytes(way: str, ranks: int, blocks: int, prefetch: int, local: int) -> None:
    changes = WAYS[way]
    job = job_of(ranks, blocks, prefetch, local, **changes)
    root, block = buffers(ranks)
    sharded = changes["strategy"] == "full_shard"
    forward = (local * blocks if blocks > prefetch + 1 else blocks) if sharded else 0
    turns = local - 1 if way == "kept" else 2 * local - 1
    step = streamed(blocks, prefetch, turns) if sharded else blocks
    rounds = 1 if "accumulate" in changes else local

    def share(calls_root: int, calls_block: int) -> tuple[int, int]:
        return calls_root + calls_block, (calls_root * root + calls_block * block) // ranks * (ranks - 1)

    for result in run(ranks, lambda comm: measured(comm, job)):
        record = FRAME_BYTES * (ranks - 1)
        for name in ("step", "step again"):
            assert result[name]["all_gather"] == share(1, step)
            assert result[name]["reduce_scatter"] == share(rounds, rounds * blocks)
            assert result[name]["exchange"] == (2, 2 * record)  # it begins, and it agrees
        assert result["evaluate"]["all_gather"] == share(int(sharded), forward)
        assert result["evaluate"]["reduce_scatter"] == (0, 0)
        assert result["evaluate"]["exchange"] == (2, 2 * record)
        assert result["predict"]["all_gather"] == share(int(sharded), blocks * sharded)
        assert result["predict"]["exchange"] == (1, record)
        assert result["checksum"]["exchange"] == (1, record)
        assert all(counts["broadcast"] == (0, 0) for counts in result.values())


@pytest.mark.parametrize(("ranks", "group"), [(4, 2), (6, 2), (6, 3), (4, 1), (3, 1)])
@pytest.mark.parametrize(("prefetch", "local", "kept"), [(0, 1, False), (1, 2, False), (1, 2, True)])
def test_groups(ranks: int, group: int, prefetch: int, local: int, kept: bool) -> None:
    """Inside a group all that full_shard does on its ranks; across groups each unit's shard once, there and back."""
    blocks = 3
    job = job_of(ranks, blocks, prefetch, local, strategy="hybrid_shard", group=group, reshard_after_forward=not kept)
    root, block = buffers(ranks)
    groups = ranks // group

    def inside(calls_root: int, calls_block: int) -> tuple[int, int]:
        return calls_root + calls_block, (calls_root * root + calls_block * block) // group * (group - 1)

    for result in run(ranks, lambda comm: measured(comm, job)):
        for name in ("step", "step again"):
            found = result[name]
            turns = local - 1 if kept else 2 * local - 1
            assert found["inside all_gather"] == inside(1, streamed(blocks, prefetch, turns))
            assert found["inside reduce_scatter"] == inside(local, local * blocks)
            across = (root + blocks * block) // group // groups * (groups - 1)
            assert found["across reduce_scatter"] == found["across all_gather"] == (1 + blocks, across)
            assert found["exchange"] == (2, 2 * FRAME_BYTES * (ranks - 1))  # all ranks agree
            assert found["all_gather"] == found["reduce_scatter"] == (0, 0)
            assert found["inside exchange"] == found["across exchange"] == (0, 0)
        assert result["evaluate"]["across all_gather"] == result["predict"]["across all_gather"] == (0, 0)
        assert result["evaluate"]["inside all_gather"][0] == 1 + local * blocks


def test_one_group_is_full_shard() -> None:
    """A group of all ranks, or of the node where all are, has nothing to do across."""
    full, one, node = (
        run(3, lambda comm, changes=changes: measured(comm, job_of(3, 3, 1, 2, **changes)))
        for changes in (
            {"strategy": "full_shard"},
            {"strategy": "hybrid_shard", "group": 3},
            {"strategy": "hybrid_shard"},
        )
    )
    assert full == one == node


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "shard_grad_op", "hybrid_shard"])
@pytest.mark.parametrize(("kind", "wire"), [("bfloat16", ""), ("float16", ""), ("float32", "bfloat16")])
def test_bytes_of_narrow_types(strategy: str, kind: str, wire: str) -> None:
    """Parameters travel in the type that is computed with, gradients in the type for the wire; the sums in float32."""
    ranks, blocks, local = 4, 2, 2
    group = 2 if strategy == "hybrid_shard" else 0
    plain, narrow = (
        run(
            ranks,
            lambda comm, types=types: measured(
                comm, job_of(ranks, blocks, 1, local, strategy=strategy, group=group), **types
            ),
        )[1]
        for types in ({}, {"dtype_name": kind, "reduce_dtype": wire})
    )
    halved = {"reduce_scatter"}
    if kind != "float32" and strategy != "no_shard":  # which gathers gradients, and they are float32
        halved.add("all_gather")
    for name, counts in plain.items():
        for what, (calls, size) in counts.items():
            less = what.removeprefix("inside ") in halved
            assert narrow[name][what] == (calls, size // 2 if less else size), (name, what)
    assert any(size for name in plain for what, (_, size) in plain[name].items() if "reduce_scatter" in what)


def test_each_turn_saves_gathers() -> None:
    """Where parameters turn round, a window of p + 1 units stays: p + 1 gathers fewer at each of 2m - 1 turns."""
    results = {}
    for prefetch in (0, 1, 2, 3):
        job = job_of(2, 4, prefetch, 3)
        results[prefetch] = run(2, lambda comm, job=job: measured(comm, job))[0]["step"]["all_gather"][0]
    assert results == {0: 1 + 4 + 5 * 3, 1: 1 + 4 + 5 * 2, 2: 1 + 4 + 5 * 1, 3: 1 + 4}
