"""What ranks tell each other in shared words: started, ended, places used again, different collectives."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mpishard.comm.board import _PLACES, BOARD_WORDS, Board
from mpishard.errors import CommError

NAMES = {1: "all-gather number 0", 2: "reduce-scatter number 1"}


def boards(size: int) -> list[Board]:
    words = [np.zeros(BOARD_WORDS, np.int64) for _ in range(size)]
    return [Board(rank, words, NAMES) for rank in range(size)]


def later(call: object, *args: int) -> tuple[threading.Thread, list[float]]:
    """Call in a thread; the list gets the time when it returned."""
    returned: list[float] = []

    def run() -> None:
        call(*args)  # type: ignore[operator]
        returned.append(time.monotonic())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, returned


def test_a_rank_waits_for_a_start_and_for_the_end_of_all() -> None:
    one, other = boards(2)
    assert one.begin(1) == 0
    thread, returned = later(one.started, 1, 0)
    time.sleep(0.05)
    assert not returned
    other.begin(1)
    thread.join(5)
    assert returned
    one.end(0)
    thread, returned = later(one.ended, 0)
    time.sleep(0.05)
    assert not returned
    other.end(0)
    thread.join(5)
    assert returned


def test_ends_come_in_any_order() -> None:
    one, other = boards(2)
    for what in (1, 2, 1):
        one.begin(what)
        other.begin(what)
    for number in (2, 0):
        one.end(number)
        other.end(number)
    for number in (2, 0):
        one.ended(number)
    thread, returned = later(one.ended, 1)
    time.sleep(0.05)
    assert not returned
    one.end(1)
    other.end(1)
    thread.join(5)
    assert returned


def test_a_place_is_used_again_when_all_have_ended_what_was_there() -> None:
    one, other = boards(2)
    for number in range(_PLACES):
        assert one.begin(1) == number
        one.end(number)
    thread, returned = later(one.begin, 1)
    time.sleep(0.05)
    assert not returned
    other.begin(1)
    other.end(0)
    thread.join(5)
    assert returned


def test_another_collective_is_told() -> None:
    one, other = boards(2)
    one.begin(1)
    other.begin(2)
    told = r"rank 1 starts reduce-scatter number 1, rank 0 starts all-gather number 0; every rank must start the same"
    with pytest.raises(CommError, match=told):
        one.started(1, 0)


def test_releases_are_counted() -> None:
    one, other = boards(2)
    assert one.all_released(0, wait=False)
    one.release()
    one.release()
    other.release()
    assert (one.releases, other.releases) == (2, 1)
    assert other.all_released(1, wait=False)
    assert not other.all_released(2, wait=False)
    thread, returned = later(one.all_released, 2)
    time.sleep(0.05)
    assert not returned
    other.release()
    thread.join(5)
    assert returned


def test_more_than_there_are_places_for_are_refused() -> None:
    one, other = boards(2)
    for _ in range(_PLACES):
        one.begin(1)
        other.begin(1)
    with pytest.raises(CommError, match=f"{_PLACES} collectives are in flight"):
        one.begin(1)
    one.end(0)
    other.end(0)
    assert one.begin(1) == _PLACES
