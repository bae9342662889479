"""What one rank may fail at, all ranks fail at together."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

from mpishard.comm.base import Communicator
from mpishard.errors import ConfigError

__all__ = ["on_rank_zero", "same_on_all_ranks", "together"]

_RECORD = 2048  # bytes of the message that ranks exchange
_CHECK, _COMPARE = "a check that all ranks make", "a comparison of settings"
_Result = TypeVar("_Result")


def together(comm: Communicator, action: Callable[[], _Result]) -> _Result:
    """Run ``action`` on every rank and return its result. Collective.

    Raises:
        ConfigError: on all ranks, with the first failing rank's message, when it raised a ConfigError or an
            OSError on any of them.
    """
    result, message = _attempt(action)
    _agree(comm, message)
    assert result is not None
    return result[0]


def on_rank_zero(comm: Communicator, action: Callable[[], _Result]) -> _Result | None:
    """Run ``action`` on rank 0 alone; return its result there and None on the others. Collective.

    Raises:
        ConfigError: as in :func:`together`.
    """
    result, message = _attempt(action) if comm.rank == 0 else (None, "")
    _agree(comm, message)
    return result[0] if result is not None else None


def same_on_all_ranks(comm: Communicator, lines: Sequence[str]) -> None:
    """Compare lines such as ``key = value`` between ranks. Collective.

    Raises:
        ConfigError: on all ranks, naming the first rank that differs from rank 0, and the first line.
    """
    text = "\n".join(lines).encode(errors="replace")
    lengths = [int.from_bytes(record, "little") for record in comm.exchange(len(text).to_bytes(8, "little"), _COMPARE)]
    texts = [
        record[:length].decode(errors="replace")
        for record, length in zip(comm.exchange(text.ljust(max(lengths), b"\0"), _COMPARE), lengths, strict=True)
    ]
    first = texts[0].split("\n")
    for rank, other in enumerate(texts):
        for theirs, mine in zip_longest(other.split("\n"), first, fillvalue="nothing more"):
            if theirs != mine:
                raise ConfigError(
                    f"rank {rank} has {theirs}, rank 0 has {mine}; start all ranks with the same settings and data"
                )


def _attempt(action: Callable[[], _Result]) -> tuple[tuple[_Result] | None, str]:
    try:
        return (action(),), ""
    except ConfigError as error:
        return None, str(error) or "refused"
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return None, f"{error.strerror}; raise the limit of this process's memory (ulimit -v), or use less of it"
        where = f"{error.filename}: " if error.filename is not None else ""
        return None, f"{where}{error.strerror or error}; choose a place that can be read and written"


def _agree(comm: Communicator, message: str) -> None:
    for record in comm.exchange(message.encode(errors="replace")[:_RECORD].ljust(_RECORD, b"\0"), _CHECK):
        if text := record.rstrip(b"\0").decode(errors="replace"):
            raise ConfigError(text)
