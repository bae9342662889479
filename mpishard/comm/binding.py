"""What ranks bind, compared: a mistake of one is everybody's error, and names it."""

from __future__ import annotations

import struct
from collections.abc import Callable

from mpishard.array.dtypes import Array, name_of
from mpishard.errors import CommError, ConfigError

__all__ = ["agree_binding"]

#: kind, element type, elements, number, and what is wrong
_SIGNATURE = struct.Struct("<40s16sqq184s")


def agree_binding(
    exchange: Callable[[bytes, str], list[bytes]], kind: str, array: Array, number: int, problem: str
) -> None:
    """Compare what is being bound on all ranks. Collective.

    Args:
        number: of the binding, on this rank.
        problem: what is wrong on this rank; empty where nothing is.

    Raises:
        CommError: on all ranks, when something is wrong on one, or ranks bind different things.
    """
    try:
        name = name_of(array.dtype)
    except ConfigError:
        name = "unknown"
    mine = _SIGNATURE.pack(kind.encode(), name.encode(), array.size, number, problem.encode()[:192])
    others = [_SIGNATURE.unpack(record) for record in exchange(mine, "a binding")]
    for rank, other in enumerate(others):
        message = other[4].rstrip(b"\0").decode(errors="replace")
        if message:
            raise CommError(f"{kind} number {number} cannot be bound: on rank {rank}, {message}")
    for rank, other in enumerate(others):
        if other[:4] != others[0][:4]:
            raise CommError(
                f"ranks bind different collectives: rank 0 binds {_describe(others[0])}, "
                f"rank {rank} binds {_describe(other)}; every rank must bind the same ones in the same order"
            )


def _describe(signature: tuple[bytes, bytes, int, int, bytes]) -> str:
    kind, name, count, number, _ = signature
    return f"{kind.rstrip(bytes(1)).decode()} number {number} of {count} {name.rstrip(bytes(1)).decode()}"
