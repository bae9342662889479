"""The header of a safetensors file: every way in which one can lie is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpishard.checkpoint.header import Entry, header_length, make_header, parse_header
from mpishard.errors import CheckpointError


def file_of(header: object, data: int = 0) -> tuple[bytes, int]:
    """A header, as JSON where it is no text, and the length of a file with ``data`` bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + data


def tensor(start: int, stop: int, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_what_the_public_package_writes_is_read(tmp_path: Path) -> None:
    arrays = {"b": np.ones((2, 3), np.float32), "a": np.zeros(5, np.float16), "none": np.zeros((0, 4), np.float32)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    raw = (tmp_path / "x.safetensors").read_bytes()
    header = parse_header(raw, len(raw), "x")
    for name, array in arrays.items():
        entry = header.entries[name]
        assert entry.shape == array.shape
        assert raw[entry.start : entry.stop] == array.tobytes()


def test_what_is_written_the_public_package_reads(tmp_path: Path) -> None:
    raw, header = make_header([("one", (2, 3)), ("none", (0,)), ("ünï", (1,))], "F32")
    assert header.entries["one"].start % 64 == 0
    values = np.arange(7, dtype=np.float32)
    (tmp_path / "y").write_bytes(raw + values.tobytes())
    assert (tmp_path / "y").stat().st_size == header.size
    found = load_file(tmp_path / "y")
    assert found["one"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["ünï"].tolist() == [6]
    assert header.entries["ünï"].at(1) == header.size


def test_places_count_from_the_beginning_of_the_file() -> None:
    raw, size = file_of({"t": tensor(0, 8), "u": tensor(8, 10, [1], "BF16")}, 10)
    assert parse_header(raw, size, "x").entries["u"] == Entry("u", "BF16", (1,), len(raw) + 8, len(raw) + 10)


BAD = {
    "it holds 3 bytes": (b"abc", 3),
    "its first 8 bytes announce a header of 100000001 bytes, 100000000 are the most": (
        (100_000_001).to_bytes(8, "little"), 2**40,
    ),
    "its header should have 50 bytes, but the file ends after 20": ((50).to_bytes(8, "little") + bytes(12), 20),
    "its header is no JSON": file_of(b"{nonsense"),
    "its header is no JSON ": file_of(b"[" * 100_000),
    "its header is no JSON  ": file_of(b"\xff\xfe{}"),
    "its header is no JSON object": file_of([]),
    "its header has t twice": file_of(b'{"t": {}, "t": {}}'),
    "its header has shape twice": file_of(b'{"t": {"shape": [], "shape": []}}'),
    "its __metadata__ is no table of texts": file_of({"__metadata__": {"a": 1}}),
    "its entry t is no table": file_of({"t": 1}),
    "t is of type F31, which is not known": file_of({"t": tensor(0, 8, dtype="F31")}, 8),
    "t is of type ['F32'], which is not known": file_of({"t": tensor(0, 8, dtype=["F32"])}, 8),
    "the shape of t is [-2]": file_of({"t": tensor(0, 8, [-2])}, 8),
    "the shape of t is [2.0]": file_of({"t": tensor(0, 8, [2.0])}, 8),
    "the shape of t is [True, 2]": file_of({"t": tensor(0, 8, [True, 2])}, 8),
    f"the shape of t is {str([1] * 65)[:77]}...": file_of({"t": tensor(0, 8, [1] * 65)}, 8),
    "the place of t is [0]": file_of({"t": {**tensor(0, 0), "data_offsets": [0]}}, 8),
    "the place of t is [-8, 0]": file_of({"t": tensor(-8, 0)}, 0),
    "t has 8 bytes, its shape [3] of F32 needs 12": file_of({"t": tensor(0, 8, [3])}, 8),
    "t has -8 bytes, its shape [2] of F32 needs 8": file_of({"t": tensor(8, 0)}, 8),
    "u overlaps what lies before it": file_of({"t": tensor(0, 8), "u": tensor(4, 12)}, 12),
    "u leaves a hole before it": file_of({"t": tensor(0, 8), "u": tensor(12, 20)}, 20),
    "t leaves a hole before it": file_of({"t": tensor(4, 12)}, 12),
    "its tensors end at byte 77, the file at byte 78": file_of({"t": tensor(0, 8)}, 9),
    "its tensors end at byte 77, the file at byte 76": file_of({"t": tensor(0, 8)}, 7),
    r"'two\nlines' is of type F31, which is not known": file_of({"two\nlines": tensor(0, 8, dtype="F31")}, 8),
}  # fmt: skip


@pytest.mark.parametrize("problem", BAD)
def test_refused(problem: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_header(*BAD[problem], "some.file")
    expected = f"some.file: is no whole safetensors file ({problem.strip()}); copy it again, or take another"
    assert str(error.value) == expected


def test_a_header_that_ends_early() -> None:
    raw, size = file_of({"t": tensor(0, 8)}, 8)
    with pytest.raises(CheckpointError, match="its header ends after 10 of 69 bytes"):
        parse_header(raw[:10], size, "x")
    assert header_length(raw[:8], size, "x") == len(raw) - 8


def test_too_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpishard.checkpoint.header._LONGEST", 1000)
    with pytest.raises(CheckpointError, match="names and shapes take 1016 bytes, a file has room for 1000; shorten"):
        make_header([("x" * 900, (1,))], "F32")
