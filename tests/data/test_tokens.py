import os
import struct
from pathlib import Path

import numpy as np
import pytest

from mpishard.data import tokens as module
from mpishard.data.tokens import TokenFile, write_tokens
from mpishard.errors import DataError


def made(path: Path, count: int = 100, vocabulary: int = 256) -> Path:
    write_tokens(path, [np.arange(count) % vocabulary], vocabulary)
    return path


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (1 << 32, "uint32")],
)
def test_what_was_written_is_read_in_the_smallest_type(tmp_path, vocabulary, dtype):
    path = tmp_path / "new" / "t.tokens"
    arrays = [np.array([0, vocabulary - 1]), np.array([], dtype=np.int64), np.array([vocabulary // 2], dtype=np.uint64)]
    assert write_tokens(path, arrays, vocabulary) == 3
    file = TokenFile(path)
    file.verify()
    assert file.tokens.dtype.name == dtype
    assert file.vocabulary == vocabulary
    assert file.tokens.tolist() == [0, vocabulary - 1, vocabulary // 2]
    assert path.stat().st_size == 64 + 3 * file.tokens.dtype.itemsize
    assert not file.tokens.flags.writeable
    assert file.tokens.ctypes.data % 64 == 0


def test_the_bytes_of_the_format_are_fixed(tmp_path):
    path = tmp_path / "t.tokens"
    write_tokens(path, [np.array([1, 258])], 300)
    raw = path.read_bytes()
    assert raw[:32] == b"mpishtok" + struct.pack("<IIQQ", 1, 2, 300, 2)
    assert raw[32:48].hex() == "903f71ad45975d298cf28ce8dc494f9d"
    assert raw[48:] == bytes(16) + b"\x01\x00\x02\x01"


def test_an_empty_file_has_no_tokens(tmp_path):
    path = tmp_path / "t.tokens"
    assert write_tokens(path, [], 256) == 0
    file = TokenFile(path)
    file.verify()
    assert len(file) == 0


def test_verification_reads_every_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 7)
    path = made(tmp_path / "t.tokens")
    TokenFile(path).verify()
    patch(path, 64 + 99, b"\x00")
    with pytest.raises(DataError, match="damaged"):
        TokenFile(path).verify()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([3, 256]), "token 256 was given, the vocabulary is 0 .. 255"),
        (np.array([-1, 3]), "token -1 was given"),
        (np.zeros((2, 2), dtype=np.int64), "1-D arrays of whole numbers"),
        (np.zeros(2), "type float64"),
    ],
)
def test_what_is_no_token_is_refused_and_leaves_no_file(tmp_path, array, message):
    path = tmp_path / "t.tokens"
    with pytest.raises(DataError, match=message):
        write_tokens(path, [np.arange(5), array], 256)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("vocabulary", [0, -1, (1 << 32) + 1])
def test_a_vocabulary_that_cannot_be_stored_is_refused(tmp_path, vocabulary):
    with pytest.raises(DataError, match=f"vocabulary of {vocabulary} cannot be stored"):
        write_tokens(tmp_path / "t.tokens", [], vocabulary)


def test_a_failure_keeps_the_old_file(tmp_path):
    path = made(tmp_path / "t.tokens")
    before = path.read_bytes()

    def broken():
        yield np.arange(5)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_tokens(path, broken(), 256)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_keeps_the_file_that_it_opened(tmp_path):
    path = made(tmp_path / "t.tokens")
    old = TokenFile(path)
    write_tokens(path, [np.full(100, 7)], 256)
    old.verify()
    assert old.tokens.tolist() == list(range(100))
    assert TokenFile(path).tokens.tolist() == [7] * 100


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"t\.tokens: cannot be written"):
        write_tokens(tmp_path / "file" / "t.tokens", [], 256)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"GARBAGE!", "is no token file"),
        (8, struct.pack("<I", 2), "format version 2, version 1 is read"),
        (12, struct.pack("<I", 3), "3 bytes per token"),
        (24, struct.pack("<Q", 99), "holds 164 bytes, its header says 163"),
        (24, struct.pack("<Q", 2**63), "copy or build it again"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, offset, data, message):
    path = made(tmp_path / "t.tokens")
    patch(path, offset, data)
    with pytest.raises(DataError, match=message) as caught:
        TokenFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 163, 165])
def test_a_file_of_another_length_is_refused(tmp_path, size):
    path = made(tmp_path / "t.tokens")
    path.write_bytes(path.read_bytes().ljust(size, b"\0")[:size])
    with pytest.raises(DataError, match=f"holds {size} bytes"):
        TokenFile(path)


@pytest.mark.parametrize("offset", [16, 32, 47, 64, 163])
def test_a_changed_byte_is_found_by_the_checksum(tmp_path, offset):
    path = made(tmp_path / "t.tokens")
    patch(path, offset, bytes([path.read_bytes()[offset] ^ 1]))
    file = TokenFile(path)
    with pytest.raises(DataError, match="checksum"):
        file.verify()


def test_a_missing_file_is_named_with_its_remedy(tmp_path):
    with pytest.raises(DataError, match=r"none\.tokens: cannot be read .*mpishard data build"):
        TokenFile(tmp_path / "none.tokens")
    with pytest.raises(DataError, match="cannot be read"):
        TokenFile(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is no regular file"):
        TokenFile(tmp_path / "pipe")


def test_paths_may_be_text(tmp_path):
    """As the README's example writes them."""
    write_tokens(f"{tmp_path}/train.tokens", [np.arange(1000)], 50257)
    assert TokenFile(f"{tmp_path}/train.tokens").tokens.tolist() == list(range(1000))
