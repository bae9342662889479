from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mpishard.checkpoint import Manifest, Tensor, complete, newest, read_manifest
from mpishard.errors import CheckpointError
from tests.checkpoint.runs import sealed

SUM = "c123456789abcdef"
TOTAL = f"{4 * int(SUM, 16) % 2**64:016x}"
DIGEST = "0123456789abcdef" * 2
GOOD = Manifest(
    mpishard="0.1.0",
    step=3,
    updates=2,
    samples=36,
    dtype="float32",
    configuration={"optim": {"lr": 0.1}, "name": "é"},
    tensors=(Tensor("w", (2, 3), {"model": SUM, "exp_avg": SUM}), Tensor("b", (), {"model": SUM, "exp_avg": SUM})),
    files={"exp_avg.safetensors": 120, "model.safetensors": 120, "config.json": 2},
    digests={"config.json": DIGEST},
    checksum=TOTAL,
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


def test_the_loss_scale_is_told_where_there_is_one() -> None:
    assert "loss_scale" not in json.loads(GOOD.text())
    assert Manifest.parse(GOOD.text(), "m").loss_scale is None
    scaled = replace(GOOD, loss_scale={"scale": 2.0**-24, "good": 3})
    assert json.loads(scaled.text())["loss_scale"] == {"scale": 2.0**-24, "good": 3}
    assert Manifest.parse(scaled.text(), "m") == scaled


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
        ("checksum", SUM.upper(), 'its checksum cannot be "C123456789ABCDEF"'),
        ("checksum", "0" * 16, f"its checksum is {'0' * 16}, those of its tensors add up to {TOTAL}"),
        ("updates", 4, "its updates are 4, its steps 3"),
        ("step", 2**63, f"its step cannot be {2**63}"),
        ("tensors", 2 * [{"name": "w", "shape": [], "checksums": {}}], "it has the tensor w twice"),
        ("digests", {"config.json": DIGEST.upper()}, f'its digests cannot be {{"config.json": "{DIGEST.upper()}"}}'),
        ("digests", {}, "config.json has no size and digest"),
        ("digests", {"config.json": DIGEST, "more": DIGEST}, "more has no size and digest"),
        ("other", 1, "it has other, which is not known"),
        ("loss_scale", None, "its loss_scale cannot be null"),
        ("loss_scale", {"scale": 3.0, "good": 0}, 'its loss_scale cannot be {"scale": 3.0, "good": 0}'),
        ("loss_scale", {"scale": 2.0, "good": -1}, 'its loss_scale cannot be {"scale": 2.0, "good": -1}'),
        ("loss_scale", {"scale": 2.0}, 'its loss_scale cannot be {"scale": 2.0}'),
        ("files", {"model.safetensors": 1}, "w has a checksum for exp_avg, of which there is no file"),
        ("tensors", [{"name": "w", "shape": [], "checksums": {"exp_avg": SUM}}], "w has no checksum for model"),
    ],
)
def test_what_does_not_fit(field: str, value: object, problem: str) -> None:
    text = sealed({**json.loads(GOOD.text()), field: value})
    assert refusal(text) == f"m: is no manifest of a checkpoint ({problem}); take another checkpoint"


@pytest.mark.parametrize("field", ["samples", "digest"])
def test_what_lacks_a_field(field: str) -> None:
    table = json.loads(GOOD.text())
    del table[field]
    assert f"(it has no {field})" in refusal(json.dumps(table))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mpishard", "0.1.1"),
        ("step", 4),
        ("updates", 3),
        ("samples", 37),
        ("dtype", "float64"),
        ("configuration", {"optim": {"lr": 0.2}, "name": "é"}),
        ("files", {**GOOD.files, "model.safetensors": 121}),
        ("digests", {"config.json": DIGEST[::-1]}),
        ("digest", DIGEST),
        ("digest", "two\nlines" * 100),
    ],
)
def test_any_change_shows(field: str, value: object) -> None:
    text = json.dumps({**json.loads(GOOD.text()), field: value})
    message = refusal(text)
    assert message.startswith("m: is damaged or was changed (its digest is ")
    assert message.endswith("); copy it again, or take another checkpoint")
    assert "\n" not in message
    if field != "digest":
        assert getattr(Manifest.parse(sealed(json.loads(text)), "m"), field) == value


def test_the_form_of_the_text_does_not_matter() -> None:
    table = json.loads(GOOD.text())
    assert Manifest.parse(json.dumps(dict(reversed(table.items())), indent=7), "m") == GOOD
    assert sealed(table) == json.dumps(table)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [('"step": 3', '"step": 3, "step": 3', "step"), ('"lr": 0.1', '"lr": 0.1, "lr": 0.1', "lr")],
)
def test_a_key_that_stands_twice(old: str, new: str, key: str) -> None:
    text = GOOD.text()
    assert old in text
    expected = f"m: is no manifest of a checkpoint (it has {key} twice); take another checkpoint"
    assert refusal(text.replace(old, new)) == expected


@pytest.mark.parametrize(("version", "told"), [(2, "2"), (True, "true"), (1.0, "1.0"), ("1", '"1"'), (None, "null")])
def test_another_version(version: object, told: str) -> None:
    text = sealed({**json.loads(GOOD.text()), "version": version})
    assert refusal(text) == f"m: is of version {told}, version 1 is read here; use the mpishard that wrote it"


def test_a_configuration_comes_back_as_json_holds_it() -> None:
    text = replace(GOOD, configuration={10: (1, 2), 9: {}, True: None}).text()
    assert Manifest.parse(text, "m").configuration == {"10": [1, 2], "9": {}, "true": None}


@pytest.mark.parametrize("value", [float("nan"), object(), {1, 2}, {1: 0, "1": 0}])
def test_a_configuration_that_is_no_json(value: object) -> None:
    with pytest.raises(CheckpointError, match="the configuration cannot be written as JSON"):
        replace(GOOD, configuration={"x": value}).text()


def test_a_configuration_of_any_depth_is_written_or_refused() -> None:
    for depth in range(50, 1100, 50):
        nested: list[object] = []
        for _ in range(depth):
            nested = [nested]
        try:
            text = replace(GOOD, configuration={"x": nested}).text()
        except CheckpointError as error:
            assert "the configuration cannot be written as JSON" in str(error)
        else:
            assert Manifest.parse(text, "m").step == 3


def test_a_configuration_of_any_depth_is_refused_in_one_line() -> None:
    """Every depth: there is one that can just be read and can no longer be compared."""
    before, after = GOOD.text().split('"lr": 0.1')
    for depth in range(1, 1100):
        assert refusal(f'{before}"lr": {"[" * depth}{"]" * depth}{after}').startswith("m: is ")
    assert refusal("[" * 900 + "]" * 900).startswith("m: is no manifest of a checkpoint (")


def test_a_directory_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        read_manifest(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: is no checkpoint (manifest.json cannot be read: No such file or directory); "
        "name a directory that a run has saved"
    )


def test_complete_checkpoints(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    assert newest(tmp_path) is None
    assert complete(tmp_path / "nowhere") == complete(tmp_path) == []
    names = ("step-9", "step-00000010", "step-09", ".step-11.new-abcd", ".step-11.old-abcd", "step-12x", "step-", "x")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(GOOD.text())
    (tmp_path / "step-13").mkdir()  # incomplete
    (tmp_path / "step-14").write_text("a file")
    (tmp_path / "step-15").symlink_to(tmp_path / "step-9")
    (tmp_path / "step-16" / "manifest.json").mkdir(parents=True)
    (tmp_path / "step-17").symlink_to("nowhere")
    assert complete(tmp_path) == [tmp_path / name for name in ("step-09", "step-9", "step-00000010")]
    assert newest(tmp_path) == tmp_path / "step-00000010"
    assert complete(tmp_path / "step-14") == []


def test_a_directory_named_after_another_step(tmp_path: Path) -> None:
    for name in ("step-4", "step-3", "step-00000003", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(GOOD.text())
        if name != "step-4":
            assert read_manifest(tmp_path / name) == GOOD
    with pytest.raises(CheckpointError) as error:
        read_manifest(tmp_path / "step-4")
    assert str(error.value) == (
        f"{tmp_path}/step-4: holds the state after 3 steps, not that of its name; name it step-00000003 again"
    )
