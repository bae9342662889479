"""An engine's arrays as tensors with public names: which there are, their checksums, and how two lists differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpishard.array.dtypes import name_of
from mpishard.array.ops import Draw
from mpishard.array.random import stream
from mpishard.checkpoint.strict_json import shown
from mpishard.errors import CheckpointError
from mpishard.nn.model import Model, Unit
from mpishard.shard.engine import Engine
from mpishard.shard.state import own_pieces

__all__ = [
    "FORMAT_TYPES",
    "arrays_of",
    "check_tensors",
    "checksums",
    "listed",
    "misfits",
    "public_name",
    "shapes_of",
    "type_of",
]

#: how the safetensors format spells an engine's element types
FORMAT_TYPES = {"float32": "F32", "float64": "F64"}
#: names listed of each kind of misfit
_LISTED = 5


def public_name(model: Model, unit: Unit, name: str) -> str:
    """Return the name that a parameter has in files."""
    return model.public_prefix + unit.prefix + name


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes by public name, in the order in which files hold them."""
    return {public_name(model, unit, spec.name): spec.shape for unit in model.units for spec in unit.specs}


def type_of(engine: Engine) -> str:
    """Return the element type of an engine's parameters.

    Raises:
        CheckpointError: files do not hold it.
    """
    dtype = name_of(next(iter(engine.state.values())).arrays["param"].dtype)
    if dtype not in FORMAT_TYPES:
        raise CheckpointError(f"parameters are {dtype}; only {' and '.join(FORMAT_TYPES)} can be saved and loaded")
    return dtype


def arrays_of(states: Sequence[str]) -> dict[str, str]:
    """Return the arrays of a checkpoint by the names of their files, without ending, and in the engine's state."""
    return {"model": "param", **{name: name for name in states}}


def checksums(engine: Engine) -> dict[str, dict[str, int]]:
    """Return 64-bit sums by array and public name, which add up to the engine's checksum. Collective.

    They are those of :func:`mpishard.shard.state.fingerprint`, kept apart for each tensor, so they do not depend on
    the ranks either. A frozen parameter is left out where it has nothing: in all arrays but ``model``.
    """
    columns = {name: column for column, name in enumerate(shapes_of(engine.model))}
    arrays = arrays_of(engine.states)
    shares = np.zeros((len(arrays), len(columns)), np.uint64)
    for part, piece in own_pieces(engine.state):
        column = columns[public_name(engine.model, part.unit, piece.slot.name)]
        for row, array in enumerate(arrays.values()):
            if array not in part.arrays:
                continue
            values = part.slice_of(array)[piece.offset : piece.end]
            label = stream(f"{array}:{part.unit.prefix}{piece.slot.name}")
            home = part.home(array, engine.ops)
            shares[row, column] += np.uint64(home.fingerprint(values, Draw(0, label, 0, piece.start)))
    total = np.zeros_like(shares)
    for record in engine.comm.exchange(shares.tobytes(), "checksums of tensors"):
        total += np.frombuffer(record, np.uint64).reshape(total.shape)
    frozen = {
        public_name(engine.model, part.unit, spec.name)
        for part in engine.state.values()
        for spec in part.unit.specs
        if not part.trained
    }
    return {
        array: {
            name: value
            for name, value in zip(columns, row.tolist(), strict=True)
            if array == "model" or name not in frozen
        }
        for array, row in zip(arrays, total, strict=True)
    }


def misfits(found: Mapping[str, Sequence[int]], expected: Mapping[str, tuple[int, ...]]) -> str:
    """Say in one line how tensors found in a file differ from those of a model; nothing where they do not."""
    shared = [name for name in expected if name in found and tuple(found[name]) != expected[name]]
    reasons = {
        "missing": [name for name in expected if name not in found],
        "unknown": [shown(name) for name in found if name not in expected],
        "of another shape": [f"{name} {shown(str(tuple(found[name])))} not {expected[name]}" for name in shared],
    }
    return "; ".join(f"{reason}: {listed(names)}" for reason, names in reasons.items() if names)


def check_tensors(where: str, found: Mapping[str, Sequence[int]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names and shapes.

    Raises:
        CheckpointError: they differ; a few of each kind are named.
    """
    if different := misfits(found, expected):
        raise CheckpointError(f"{where}: holds another model ({different}); give the sizes of the model that was saved")


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
