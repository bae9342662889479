"""What a case of an operation is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arguments = dict[str, Any]
WIDE = ("float32", "float64")
ALL = (*WIDE, "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """``make(rng, dtype)`` gives the arguments; ``reference(**arguments in float64)`` what the named arrays become.

    ``loose`` widens the tolerance of sums as long as this many elements. ``kinds`` are the types it is made for.
    ``either`` names the arrays that may have the accumulator's type where the others have 16 bits. ``read`` turns
    arrays that are no numbers into some. A reference may also return ``rounded``: what is rounded on the way.
    """

    op: str
    label: str
    make: Callable[[np.random.Generator, np.dtype], Arguments]
    reference: Callable[..., dict[str, np.ndarray]]
    loose: float = 1.0
    kinds: tuple[str, ...] = ALL
    either: tuple[str, ...] = ()
    read: Callable[[np.ndarray], np.ndarray] | None = None

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def array(rng: np.random.Generator, kind: np.dtype, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(kind)
