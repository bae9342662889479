"""The searches find the border that trying every number finds, in few evaluations."""

import random
from collections.abc import Callable

import pytest

from mpishard.plan.search import least_ranks, most_samples


def padded(elements: list[int], extra: int, asked: set[int]) -> Callable[[int], tuple[int, int]]:
    """Memory as an engine's: units padded to whole chunks for every rank, one of each gathered."""

    def parts(ranks: int) -> tuple[int, int]:
        asked.add(ranks)
        shards = [-(-count // (ranks * 512)) * 512 for count in elements]
        return 16 * sum(shards), 8 * max(shards) * ranks + extra

    return parts


@pytest.mark.parametrize("seed", range(20))
def test_the_least_ranks_are_those_that_trying_all_finds(seed: int) -> None:
    draw = random.Random(seed)
    elements = [draw.randint(1000, 3_000_000) for _ in range(draw.randint(1, 12))]
    extra = draw.randint(0, 10**6)
    for _ in range(20):
        asked: set[int] = set()
        parts = padded(elements, extra, asked)
        memory = int(sum(parts(draw.randint(1, 30))) * draw.uniform(0.98, 1.02))
        asked.clear()
        found = least_ranks(parts, parts, memory, 8192 * len(elements), 200)
        tried = len(asked)
        brute = next((ranks for ranks in range(1, 201) if sum(parts(ranks)) <= memory), None)
        assert found == brute
        assert tried <= 26


def test_no_number_of_ranks_is_found_where_there_is_none() -> None:
    asked: set[int] = set()
    parts = padded([10**6], 0, asked)
    assert least_ranks(parts, parts, 8 * 10**6 - 20_000, 0, 10**6) is None
    assert len(asked) == 2
    # room for the rest, but padding fills it before the state is small enough
    assert least_ranks(parts, parts, 8 * 10**6 + 5000, 0, 10**6) is None
    assert len(asked) < 40


def lines(draw: random.Random, asked: set[int]) -> Callable[[int], int]:
    base, slope = draw.randint(0, 10**9), draw.randint(1, 10**7)
    flat, other = draw.randint(0, 10**8), draw.randint(0, 10**7)

    def peak(samples: int) -> int:
        asked.add(samples)
        return base + -(-slope * samples // 64) * 64 + max(flat, other * samples)

    return peak


@pytest.mark.parametrize("seed", range(20))
def test_the_most_samples_are_at_the_border(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        asked: set[int] = set()
        peak = lines(draw, asked)
        known: dict[int, int] = {}
        for _ in range(3):  # what one device has asked serves the next
            memory = draw.randint(1, 10**11)
            found = most_samples(peak, memory, 10**5, known)
            if found is None:
                assert peak(1) > memory
            else:
                assert peak(found) <= memory
                assert found == 10**5 or peak(found + 1) > memory
        assert len(asked) <= 20


def test_memory_that_does_not_grow_takes_the_most() -> None:
    assert most_samples(lambda samples: 5, 5, 1000, {}) == 1000
    assert most_samples(lambda samples: 5, 4, 1000, {}) is None
