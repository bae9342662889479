"""What a case of an operation is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """``make(rng, dtype)`` gives the arguments; ``reference(**arguments in float64)`` what the named arrays become.

    ``loose`` widens the tolerance of sums as long as this many elements.
    """

    op: str
    label: str
    make: Callable[[np.random.Generator, np.dtype], Arguments]
    reference: Callable[..., dict[str, np.ndarray]]
    loose: float = 1.0

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def array(rng: np.random.Generator, kind: np.dtype, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(kind)
