from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mpishard.checkpoint import Manifest, Tensor, newest, read_manifest
from mpishard.errors import CheckpointError

SUM = "0123456789abcdef"
GOOD = Manifest(
    mpishard="0.1.0",
    step=3,
    updates=2,
    samples=36,
    dtype="float32",
    configuration={"optim": {"lr": 0.1}, "name": "é"},
    tensors=(Tensor("w", (2, 3), {"model": SUM, "exp_avg": SUM}), Tensor("b", (), {"model": SUM, "exp_avg": SUM})),
    files={"exp_avg.safetensors": 120, "model.safetensors": 120, "config.json": 2},
    checksum=SUM,
)


def refusal(text: str | bytes) -> str:
    with pytest.raises(CheckpointError) as error:
        Manifest.parse(text, "m")
    return str(error.value)


def test_what_is_written_is_read() -> None:
    assert Manifest.parse(GOOD.text(), "m") == GOOD
    assert GOOD.arrays == ("model", "exp_avg")
    table = json.loads(GOOD.text())
    assert (table["format"], table["version"], table["step"]) == ("mpishard-checkpoint", 1, 3)
    assert table["tensors"][0] == {"name": "w", "shape": [2, 3], "checksums": {"model": SUM, "exp_avg": SUM}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is no JSON"),
        (b"\x00\xff\xfe", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", 'it does not say "format": "mpishard-checkpoint"'),
        ("{}", 'it does not say "format": "mpishard-checkpoint"'),
    ],
)
def test_what_is_none(text: str | bytes, problem: str) -> None:
    assert refusal(text) == f"m: is no manifest of a checkpoint ({problem}); take another checkpoint"


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("step", -1, "its step cannot be -1"),
        ("step", True, "its step cannot be true"),
        ("updates", 1.0, "its updates cannot be 1.0"),
        ("samples", "36", 'its samples cannot be "36"'),
        ("mpishard", None, "its mpishard cannot be null"),
        ("dtype", 32, "its dtype cannot be 32"),
        ("configuration", [], "its configuration cannot be []"),
        ("files", {"model.safetensors": -1}, 'its files cannot be {"model.safetensors": -1}'),
        ("tensors", [{"name": "w"}], 'its tensors cannot be [{"name": "w"}]'),
        ("checksum", SUM.upper(), 'its checksum cannot be "0123456789ABCDEF"'),
        ("other", 1, "it has other, which is not known"),
        ("files", {"model.safetensors": 1}, "w has no checksum for each of model"),
    ],
)
def test_what_does_not_fit(field: str, value: object, problem: str) -> None:
    text = json.dumps({**json.loads(GOOD.text()), field: value})
    assert refusal(text) == f"m: is no manifest of a checkpoint ({problem}); take another checkpoint"


def test_what_lacks_a_field() -> None:
    table = json.loads(GOOD.text())
    del table["samples"]
    assert "(it has no samples)" in refusal(json.dumps(table))


def test_another_version() -> None:
    text = json.dumps({**json.loads(GOOD.text()), "version": 2})
    assert refusal(text) == "m: is of version 2, version 1 is read here; use the mpishard that wrote it"


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}])
def test_a_configuration_that_is_no_json(value: object) -> None:
    with pytest.raises(CheckpointError, match="the configuration cannot be written as JSON"):
        replace(GOOD, configuration={"x": value}).text()


def test_a_directory_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        read_manifest(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: is no checkpoint (manifest.json cannot be read: No such file or directory); "
        "name a directory that a run has saved"
    )


def test_newest(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    assert newest(tmp_path) is None
    for name in ("step-9", "step-00000010", ".step-11.new-abcd", ".step-11.old-abcd", "step-12x", "step-", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(GOOD.text())
    (tmp_path / "step-13").mkdir()  # incomplete
    (tmp_path / "step-14").write_text("a file")
    assert newest(tmp_path) == tmp_path / "step-00000010"
    assert read_manifest(tmp_path / "step-9") == GOOD
