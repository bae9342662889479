"""The header of a safetensors file: written, and read without trusting it.

A file is 8 bytes with the header's length (little-endian), the header (JSON: name -> dtype, shape, data_offsets),
and the arrays one after another without holes, each in C order and little-endian (the safetensors format,
https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mpishard.checkpoint.strict_json import parse_json, shown
from mpishard.errors import CheckpointError

__all__ = ["LENGTH_BYTES", "Entry", "Header", "header_length", "make_header", "parse_header"]

LENGTH_BYTES = 8
#: The public readers refuse longer headers too.
_LONGEST = 100_000_000
_MOST_AXES = 64
#: The data begin at a multiple of this many bytes.
_ALIGN = 64
#: bytes an element of the types that public files hold
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One array of a file.

    Attributes:
        dtype: its type as the format spells it: ``F32``, ``BF16``, ...
        start, stop: its bytes, counted from the beginning of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return _SIZES[self.dtype]

    def at(self, element: int) -> int:
        """Return where in the file an element lies."""
        return self.start + element * self.width


@dataclass(frozen=True)
class Header:
    """The arrays of one file, by name, in the order in which they lie; ``size`` is the file's length in bytes."""

    entries: Mapping[str, Entry]
    size: int


def make_header(tensors: Iterable[tuple[str, tuple[int, ...]]], dtype: str) -> tuple[bytes, Header]:
    """Return the first bytes of a file of arrays (name, shape) of one type, and the places of the arrays.

    Raises:
        CheckpointError: the header is longer than readers of the format accept.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        begin, end = end, end + math.prod(shape) * _SIZES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % _ALIGN)
    if len(text) > _LONGEST:
        raise CheckpointError(f"names and shapes take {len(text)} bytes, a file has room for {_LONGEST}; shorten names")
    raw = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return raw, parse_header(raw, len(raw) + end, "the new file")


def header_length(first: bytes, size: int, where: str) -> int:
    """Return the length of the header, from the first 8 bytes of a file of ``size`` bytes.

    Raises:
        CheckpointError: the file is too short, or the length is none that it can have.
    """
    if len(first) < LENGTH_BYTES:
        _refuse(where, f"it holds {size} bytes")
    length = int.from_bytes(first, "little")
    if length > _LONGEST:
        _refuse(where, f"its first 8 bytes announce a header of {length} bytes, {_LONGEST} are the most")
    if LENGTH_BYTES + length > size:
        _refuse(where, f"its header should have {length} bytes, but the file ends after {size}")
    return length


def parse_header(raw: bytes, size: int, where: str) -> Header:
    """Read a header and check all that it says.

    Args:
        raw: the file's first bytes, up to the end of the header.
        size: the file's length in bytes.
        where: names the file in errors.

    Raises:
        CheckpointError: it is no header, or what it says does not fit itself or the file.
    """
    data = LENGTH_BYTES + header_length(raw[:LENGTH_BYTES], size, where)
    if len(raw) < data:
        _refuse(where, f"its header ends after {len(raw)} of {data} bytes")

    table = parse_json(raw[LENGTH_BYTES:data], "its header", lambda problem: _refuse(where, problem))
    if not isinstance(table, dict):
        _refuse(where, "its header is no JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(where, "its __metadata__ is no table of texts")
    entries = sorted((_entry(name, found, data, where) for name, found in table.items()), key=_place)
    end = data
    for entry in entries:
        if entry.start != end:
            problem = "overlaps what lies before it" if entry.start < end else "leaves a hole before it"
            _refuse(where, f"{shown(entry.name)} {problem}")
        end = entry.stop
    if end != size:
        _refuse(where, f"its tensors end at byte {end}, the file at byte {size}")
    return Header({entry.name: entry for entry in entries}, size)


def _entry(name: str, found: Any, data: int, where: str) -> Entry:
    if not isinstance(found, dict):
        _refuse(where, f"its entry {shown(name)} is no table")
    dtype, shape, offsets = (found.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _SIZES:
        _refuse(where, f"{shown(name)} is of type {shown(str(dtype))}, which is not known")
    if not isinstance(shape, list) or len(shape) > _MOST_AXES or not all(_is_count(extent) for extent in shape):
        _refuse(where, f"the shape of {shown(name)} is {shown(str(shape))}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        _refuse(where, f"the place of {shown(name)} is {shown(str(offsets))}")
    expected = math.prod(shape) * _SIZES[dtype]
    if offsets[1] - offsets[0] != expected:
        held = offsets[1] - offsets[0]
        _refuse(where, f"{shown(name)} has {held} bytes, its shape {shown(str(shape))} of {dtype} needs {expected}")
    return Entry(name, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _place(entry: Entry) -> tuple[int, int]:
    return entry.start, entry.stop


def _refuse(where: str, problem: str) -> NoReturn:
    message = f"{where}: is no whole safetensors file ({problem}); copy it again, or take another"
    raise CheckpointError(message) from None
