"""NumPy's operations, on memory that is known alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.array.dtypes import Array
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.testing.contract import ContractError

__all__ = ["WatchedOps", "inside"]


def inside(array: Array, known: list[Array]) -> bool:
    """Return whether an array may lie in one of the known ones."""
    return any(np.may_share_memory(array, one) for one in known)


class WatchedOps(NumpyOps):
    """NumPy's operations on ``known`` memory alone; without a list, on any."""

    known: list[Array] | None = None

    def guard(self, operation: str, arguments: tuple[Any, ...]) -> None:
        """Refuse an array that lies in no known one."""
        for array in arguments if self.known is not None else ():
            if isinstance(array, np.ndarray) and array.size and not inside(array, self.known or []):
                raise ContractError(
                    f"{operation} was given an array {array.shape} of memory that the layer made itself, so it is in "
                    "no plan; take memory from ctx.keep or ctx.scratch (a reshape of an array that is not contiguous "
                    "makes some too)"
                )


def _guarded(name: str) -> Callable[..., Any]:
    inner = getattr(NumpyOps, name)

    def call(self: WatchedOps, *arguments: Any) -> Any:
        self.guard(name.lstrip("_"), arguments)
        return inner(self, *arguments)

    return call


for _name in Ops.__abstractmethods__ - {"empty"}:
    setattr(WatchedOps, _name, _guarded(_name))
