"""What one rank may fail at, all ranks fail at together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpishard.comm.base import Communicator
from mpishard.errors import ConfigError

__all__ = ["together"]

_RECORD = 2048  # bytes of the message that ranks exchange
_Result = TypeVar("_Result")


def together(comm: Communicator, action: Callable[[], _Result], *, only_rank_zero: bool = False) -> _Result | None:
    """Run ``action`` on every rank, or on rank 0 alone, and return its result (None where it did not run).

    Raises:
        ConfigError: on all ranks, with the first failing rank's message, when it raised a ConfigError or an
            OSError on any of them.
    """
    result, message = None, ""
    if comm.rank == 0 or not only_rank_zero:
        try:
            result = action()
        except ConfigError as error:
            message = str(error) or "refused"
        except OSError as error:
            message = f"{error.filename}: {error.strerror}; choose a place that can be read and written"
    records = comm.exchange(message.encode()[:_RECORD].ljust(_RECORD, b"\0"))
    for record in records:
        if text := record.rstrip(b"\0").decode(errors="replace"):
            raise ConfigError(text)
    return result
