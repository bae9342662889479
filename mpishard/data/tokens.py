"""Token files: a 64-byte header, then the tokens as little-endian unsigned integers of one size.

The header, little-endian::

    offset  bytes  field
    0       8      magic, ``mpishtok``
    8       4      version of the format, 1
    12      4      bytes per token: 1, 2 or 4
    16      8      vocabulary: every token is below it
    24      8      count of tokens
    32      16     checksum: BLAKE2b-128 of the tokens followed by the 32 header bytes above
    48      16     zero

The tokens begin at a multiple of 64 bytes, so a mapped file is read where it lies.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mpishard.array.dtypes import Array, DType
from mpishard.errors import DataError

__all__ = ["MAGIC", "VERSION", "TokenFile", "write_tokens"]

MAGIC = b"mpishtok"
VERSION = 1
_HEAD = struct.Struct("<8sIIQQ")
_HEADER_BYTES = 64
_DIGEST_BYTES = 16
_DTYPES: dict[int, DType] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
#: bytes hashed at a time: small enough that verifying maps little of a large file at once
_CHUNK = 1 << 22


def write_tokens(path: Path | str, arrays: Iterable[Array], vocabulary: int) -> int:
    """Write ``arrays`` (1-D, of whole numbers), one after another, as one token file; return the count.

    The file gets its name only when it is complete and on the disk, so a reader sees all of it or none.

    Raises:
        DataError: a token is not in ``0 .. vocabulary - 1``, an array is not 1-D and of whole numbers,
            or the file cannot be written.
    """
    width = next((w for w in _DTYPES if vocabulary <= 1 << 8 * w), None)
    if width is None or vocabulary < 1:
        raise DataError(f"{path}: a vocabulary of {vocabulary} cannot be stored; it must lie in 1 .. {1 << 32}")
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                count = _write(file, path, arrays, vocabulary, width)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); choose a directory that can be") from None
    return count


def _write(file: BinaryIO, path: Path, arrays: Iterable[Array], vocabulary: int, width: int) -> int:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    count = 0
    file.write(bytes(_HEADER_BYTES))
    for array in arrays:
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"{path}: an array of shape {array.shape} and type {array.dtype} was given; "
                "tokens are 1-D arrays of whole numbers"
            )
        if array.size == 0:
            continue
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= vocabulary:
            bad = low if low < 0 else high
            raise DataError(f"{path}: token {bad} was given, the vocabulary is 0 .. {vocabulary - 1}; raise it")
        data = np.ascontiguousarray(array, dtype=_DTYPES[width]).data.cast("B")
        digest.update(data)
        file.write(data)
        count += array.size
    head = _HEAD.pack(MAGIC, VERSION, width, vocabulary, count)
    digest.update(head)
    file.seek(0)
    file.write(head + digest.digest())
    return count


def _sync_directory(directory: Path) -> None:
    """Put the new name on the disk as well."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TokenFile:
    """A token file, mapped into memory for reading.

    Attributes:
        path: where it lies.
        vocabulary: every token is below it, says the header.
        tokens: read-only 1-D array, uint8, uint16 or uint32, over the mapping; nothing is read before it is used.
        checksum: the 16 bytes that the header holds.

    Raises:
        DataError: the file is missing, no token file, of another format version, or not as long as it says.
            The tokens themselves are not read; :meth:`verify` does that.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        header, size = self._read_header()
        magic, version, width, vocabulary, count = _HEAD.unpack_from(header)
        if magic != MAGIC:
            raise DataError(f"{path}: is no token file (it begins with {magic!r}, not {MAGIC!r}); {_BUILD}")
        if version != VERSION:
            raise DataError(f"{path}: is of format version {version}, version {VERSION} is read here; {_BUILD}")
        if width not in _DTYPES:
            raise DataError(f"{path}: its header says {width} bytes per token, 1, 2 or 4 are known; {_BUILD}")
        if size != _HEADER_BYTES + count * width:
            raise DataError(
                f"{path}: holds {size} bytes, its header says {_HEADER_BYTES + count * width} "
                f"({count} tokens of {width} bytes); it was cut short or added to: copy or build it again"
            )
        self.vocabulary: int = vocabulary
        self.checksum = header[_HEAD.size : _HEAD.size + _DIGEST_BYTES]
        self._head = header[: _HEAD.size]
        #: names the file's format and contents, but not its place
        self.identity = header[: _HEAD.size + _DIGEST_BYTES]
        mapped = np.memmap(self.path, dtype=np.uint8, mode="r")
        self.tokens: Array = np.asarray(mapped)[_HEADER_BYTES:].view(_DTYPES[width])

    def __len__(self) -> int:
        """Return the count of tokens."""
        return int(self.tokens.size)

    def verify(self) -> None:
        """Read every token and compare with the checksum.

        Raises:
            DataError: the tokens or the header are not what was written.
        """
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for piece in self._pieces():
            digest.update(piece.data.cast("B"))
        digest.update(self._head)
        if digest.digest() != self.checksum:
            raise DataError(
                f"{self.path}: its checksum is {digest.hexdigest()}, the header says {self.checksum.hex()}; "
                "the file is damaged: copy or build it again"
            )

    def _pieces(self) -> Iterator[Array]:
        for start in range(0, len(self), _CHUNK):
            yield self.tokens[start : start + _CHUNK]

    def _read_header(self) -> tuple[bytes, int]:
        if self.path.is_fifo():  # opening it would wait for a writer
            raise DataError(f"{self.path}: is no regular file; {_BUILD}")
        try:
            with self.path.open("rb") as file:
                header = file.read(_HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}); {_BUILD}") from None
        if len(header) < _HEADER_BYTES:
            raise DataError(f"{self.path}: holds {size} bytes, a token file has at least {_HEADER_BYTES}; {_BUILD}")
        return header, size


_BUILD = "make one with 'mpishard data build'"
