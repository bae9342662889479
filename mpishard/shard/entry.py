"""How ranks begin something together: at the same thing, given the same, and no rank with a wrong argument.

[Note: a rank's problem]
A rank that raised alone would leave the others waiting in a collective. So what a rank finds wrong with its own
arguments is a line of text, empty where nothing is wrong, and travels in the exchange by which the ranks meet anyway;
it is then raised on all of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from mpishard.comm.base import Communicator
from mpishard.comm.frames import INLINE
from mpishard.comm.together import together
from mpishard.errors import ConfigError, EngineError
from mpishard.nn.model import Model
from mpishard.shard.feed import DIGEST_BYTES, Batch, sample_problem

__all__ = [
    "WAITS",
    "Entry",
    "feed_problem",
    "memory_together",
    "name_problem",
    "number",
    "prediction_problem",
    "rate_problem",
]

#: operations, of those that an engine notes, in which a rank may wait for others
WAITS = ("Meet", "Await", "Absorb", "Release", "AllReduce", "Agree", "Replicate")

_Taken = TypeVar("_Taken")
_KIND = 16
_PROBLEM = INLINE - _KIND - DIGEST_BYTES
#: what kind of feed, the digest of its values, and what is wrong; it fits in the exchange's frame
_RECORD = struct.Struct(f"<{_KIND}s{DIGEST_BYTES}s{_PROBLEM}s")


def memory_together(comm: Communicator, take: Callable[[], _Taken]) -> _Taken:
    """Return what ``take`` takes. Collective.

    Raises:
        ConfigError: on all ranks, when one of them has no room for it.
    """

    def attempt() -> _Taken:
        try:
            return take()
        except MemoryError as error:
            problem = f"rank {comm.rank} cannot get its memory ({error})"
            raise ConfigError(f"{problem}; use more ranks or a smaller batch") from None

    return together(comm, attempt)


class Entry:
    """The way into everything that the ranks do with an engine; shut when it was closed or something failed in it."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.closed = False
        #: what has begun and not ended: it runs, or it failed and left collectives in flight
        self.unended = ""
        #: told of each meeting before it begins
        self.note: Callable[[bytes], None] | None = None

    def check(self, what: str) -> None:
        """Say why the engine cannot do ``what`` any more.

        Raises:
            EngineError: it was closed, or something failed in it.
        """
        if self.closed:
            raise EngineError(f"the engine was closed before {what}; close it last, or make another one")
        if self.unended:
            raise EngineError(
                f"{self.unended} failed, so the engine's state is undefined and {what} is refused; "
                "make another engine and load the last checkpoint into it"
            )

    @contextmanager
    def until_done(self, what: str) -> Iterator[None]:
        """Hold the way shut while ``what`` runs, and for good where it raises."""
        self.unended = what
        yield
        self.unended = ""

    def meet(self, what: str, problem: str = "", feed: object = None) -> None:
        """Return when every rank has come to the same ``what``, with nothing wrong and the same feed. Collective.

        Args:
            problem: what this rank finds wrong with its arguments, one line; empty where nothing is.
            feed: what this rank's data come from: batches are compared, since each rank gives the whole one.

        Raises:
            EngineError: as :meth:`check`, on this rank.
            CommError: on all ranks, when they are at different things.
            ConfigError: on all ranks: the first problem of any of them, or that their feeds differ.
        """
        self.check(what)
        if self.note is not None:
            self.note(f"Meet({what})".encode())
        compared = not problem and self.comm.size > 1
        digest = feed.digest() if compared and isinstance(feed, Batch) else b""
        line = " ".join(problem.split()).encode(errors="replace")[:_PROBLEM]
        mine = _RECORD.pack(_kind(feed).encode(), digest, line)
        records = [_RECORD.unpack(record) for record in self.comm.exchange(mine, what)]
        for *_, found in records:
            if message := _text(found):
                raise ConfigError(message)
        for rank, (kind, digest, _) in enumerate(records):
            if kind != records[0][0]:
                raise ConfigError(
                    f"rank {rank} gives {_text(kind)}, rank 0 {_text(records[0][0])}; "
                    "give a batch on every rank, or a function on every rank"
                )
            if digest != records[0][1]:
                raise ConfigError(
                    f"rank {rank} gives another batch than rank 0; give the whole global batch, the same on every "
                    "rank (is the shuffle seeded alike?)"
                )


def feed_problem(feed: object, model: Model, samples: int) -> str:
    """Say what keeps a feed from being one of ``samples`` samples; a function is known only when it runs."""
    if isinstance(feed, Batch):
        return feed.problem(model, samples)
    if feed is None or callable(feed):
        return ""
    return (
        f"the feed is a {type(feed).__name__}; give mpishard.batch(inputs, targets), or a function of "
        "(micro, inputs, targets) that fills the arrays"
    )


def number(value: object) -> float:
    """Return a real number of any type as a float, infinite where it is too large; NaN for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def rate_problem(lr: object) -> str:
    """Say what keeps ``lr`` from being a learning rate."""
    return "" if 0.0 <= number(lr) < math.inf else f"lr is {lr!r}; it must be a finite number, 0 or more"


def prediction_problem(sample: object, position: object, model: Model) -> str:
    """Say what keeps a prediction from being made at a position of a sample."""
    if not isinstance(sample, np.ndarray):
        return f"the sample is a {type(sample).__name__}; give an array of shape {model.sample_shape}"
    if found := sample_problem(sample, model):
        return found
    most = math.prod(model.target_shape) - 1
    if isinstance(position, int | np.integer) and not isinstance(position, bool) and 0 <= position <= most:
        return ""
    return f"position is {position!r}; it must be a whole number, 0 to {most}"


def name_problem(name: object) -> str:
    """Say what keeps ``name`` from being a parameter's, whatever the model."""
    return "" if isinstance(name, str) else f"the parameter's name is {name!r}; give a text, such as 'head.weight'"


def _kind(feed: object) -> str:
    return "a batch" if isinstance(feed, Batch) else "no data" if feed is None else "a function"


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="ignore")
