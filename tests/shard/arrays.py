"""Which NumPy arrays an object holds, found by walking everything it refers to."""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Iterator

import numpy as np

#: what belongs to the program and not to the object
_STOP = (type, types.ModuleType, types.FrameType, types.CodeType, threading.Thread, str, bytes, int, float)


def _base(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _referents(thing: object) -> list[object]:
    if isinstance(thing, types.FunctionType):  # its globals are the program's
        return [cell.cell_contents for cell in thing.__closure__ or ()]
    return gc.get_referents(thing)


def arrays_of(root: object) -> Iterator[np.ndarray]:
    """Yield every array that can be reached, as it is referred to."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, _STOP):
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            yield thing
        else:
            pending += _referents(thing)


def memory_of(root: object) -> dict[int, np.ndarray]:
    """Return the arrays that own memory, by address."""
    return {array.__array_interface__["data"][0]: array for array in map(_base, arrays_of(root))}
