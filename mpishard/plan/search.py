"""The smallest number of ranks, and the largest micro-batch, that fit: few evaluations, each one the plan itself.

[Note: from below]
Memory of a rank is ``state / ranks + rest``, but for padding: a flat buffer is padded to whole chunks for every rank,
so both parts go up and down a little from one number of ranks to the next, and a bisection would find *some* border.
What state and rest come to without padding is a lower bound, from which the search goes up one by one to the first
number that fits. Where padding outweighs what a further rank saves, it goes on in larger steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

__all__ = ["least_ranks", "most_samples"]

#: numbers of ranks that are tried one by one
_SINGLE = 24
#: guesses after which the border is found by halves
_SLOW = 12


def least_ranks(
    parts: Callable[[int], tuple[int, int]],
    lowest: Callable[[int], tuple[int, int]],
    memory: int,
    slack: int,
    most: int,
    inside: int = 1,
) -> int | None:
    """Return the smallest number of ranks whose memory fits; None where that of ``most`` ranks or fewer does not.

    Args:
        parts: ranks -> bytes of the state on a rank, and of all else.
        lowest: the same with the batch that takes the least.
        slack: bytes by which padding can make the rest larger.
        most: the largest number of ranks.
        inside: ranks of a node, where what is beside the state shrinks too with more of them; of more ranks it does
            not, nor of any if this is 1.
    """
    if sum(parts(1)) <= memory:
        return 1
    half, _ = lowest(2)
    for ranks in range(max(2, -(-(2 * half - slack) // memory)), min(inside, most) + 1):
        if sum(parts(ranks)) <= memory:
            return ranks
    first = max(2, inside + 1)
    held, rest = lowest(first)
    room = memory - (rest - slack)
    if room <= 0:
        return None
    ranks = max(first, -(-(first * held - slack) // room))
    tried = 0
    while ranks <= most:
        held, rest = parts(ranks)
        if held + rest <= memory:
            return ranks
        tried += 1
        room = memory - rest
        if tried < _SINGLE:
            ranks += 1
        elif room <= 0:
            return None
        else:
            ranks = max(ranks + 1, held * ranks // room)
    return None


def most_samples(peak: Callable[[int], int], memory: int, most: int, known: dict[int, int]) -> int | None:
    """Return the largest micro-batch whose memory fits; None where not even one sample does.

    Memory grows with the samples, and never less steeply than before: it is a sum of straight lines and of the larger
    of some. So a line through two that fit points to the border or beyond, and one through two on its two sides
    points before it; where both lie on one line, the next guess is the last.

    Args:
        peak: samples -> bytes that a rank holds.
        most: the largest micro-batch.
        known: what ``peak`` has answered, to be added to.
    """

    def ask(samples: int) -> bool:
        if samples not in known:
            known[samples] = peak(samples)
        return known[samples] <= memory

    if not ask(1):
        return None
    ask(2)
    for tried in itertools.count():
        fits = max(samples for samples, held in known.items() if held <= memory)
        beyond = [samples for samples, held in known.items() if held > memory]
        fails = min(beyond, default=most + 1)
        if fails - fits <= 1:
            return fits
        if tried >= _SLOW:
            ask((fits + fails) // 2)
            continue
        other = fails if beyond else max(samples for samples in known if samples < fits)
        slope = (known[other] - known[fits]) / (other - fits)
        further = int((memory - known[fits]) / slope) if slope > 0 else most
        ask(min(fails - 1, fits + max(1, further + (not beyond))))
    return None
