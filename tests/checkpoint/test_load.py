"""A checkpoint that is damaged, cut short or of another model is refused on all ranks in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpishard.checkpoint import load
from mpishard.comm.threads import run
from mpishard.errors import CheckpointError
from tests.checkpoint.runs import BASE, saved_alone
from tests.shard.training import SMALL, Job


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "step-2"
    saved_alone(path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refusal(path: Path, job: Job = BASE, ranks: int = 3, **changes: Any) -> str:
    """The one message of all ranks, without the folder."""

    def body(comm: Any) -> str:
        engine = job.engine(comm, **changes)
        with pytest.raises(CheckpointError) as error:
            load(engine, path)
        assert (engine.steps, engine.updates) == (0, 0)
        return str(error.value)

    (message,) = set(run(ranks, body))
    assert "\n" not in message
    return message.replace(str(path), "HERE")


@pytest.mark.parametrize(
    ("name", "place", "strategy"),
    [
        ("model", "first", "full_shard"),
        ("model", "middle", "no_shard"),
        ("exp_avg", "middle", "full_shard"),
        ("exp_avg_sq", "last", "full_shard"),
        ("exp_avg_sq", "last", "no_shard"),
    ],
)
def test_a_flipped_bit(copy: Path, name: str, place: str, strategy: str) -> None:
    file = copy / f"{name}.safetensors"
    raw = bytearray(file.read_bytes())
    data = 8 + int.from_bytes(raw[:8], "little")
    raw[{"first": data, "middle": (data + len(raw)) // 2, "last": len(raw) - 1}[place]] ^= 1 << 6
    file.write_bytes(raw)
    message = refusal(copy, BASE.with_settings(strategy=strategy))
    damaged = {"first": "transformer.wte.weight", "last": "transformer.h.3.mlp.c_proj.bias"}.get(place, "transformer.")
    assert message.startswith(f"HERE/{name}.safetensors: is damaged (another checksum than the manifest's: {damaged}")
    assert message.endswith("copy it again, or take another checkpoint")


def test_two_values_changed_places(copy: Path) -> None:
    file = copy / "model.safetensors"
    found = load_file(file)
    weight = found["transformer.h.1.mlp.c_fc.weight"]
    weight[0, [0, 1]] = weight[0, [1, 0]]
    tensor = weight.tobytes()
    raw = file.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    start = len(raw) - max(e["data_offsets"][1] for k, e in header.items() if k != "__metadata__")
    start += header["transformer.h.1.mlp.c_fc.weight"]["data_offsets"][0]
    file.write_bytes(raw[:start] + tensor + raw[start + len(tensor) :])
    assert "(another checksum than the manifest's: transformer.h.1.mlp.c_fc.weight)" in refusal(copy)


@pytest.mark.parametrize("change", [-1, -1000, 1])
def test_a_file_of_another_length(copy: Path, change: int) -> None:
    file = copy / "exp_avg.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:change] if change < 0 else raw + b"x")
    message = refusal(copy)
    assert message.startswith("HERE/exp_avg.safetensors: is no whole safetensors file (its tensors end at byte ")


def test_a_file_that_the_manifest_does_not_mean(copy: Path) -> None:
    arrays = load_file(copy / "model.safetensors")
    save_file({**arrays, "more": np.zeros(3, np.float32)}, copy / "model.safetensors")
    assert "bytes, the manifest says" in refusal(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = (copy / "model.safetensors").stat().st_size
    (copy / "manifest.json").write_text(json.dumps(manifest))
    expected = "HERE/model.safetensors: its tensors are not those of the manifest; copy the checkpoint again"
    assert refusal(copy) == expected


@pytest.mark.parametrize("name", ["manifest.json", "exp_avg_sq.safetensors"])
def test_a_file_that_is_not_there(copy: Path, name: str) -> None:
    (copy / name).unlink()
    message = refusal(copy)
    if name == "manifest.json":
        assert message == (
            "HERE: is no checkpoint (manifest.json cannot be read: No such file or directory); "
            "name a directory that a run has saved"
        )
    else:
        assert message.startswith(f"HERE/{name}: cannot be read by rank 0 on ")
        assert message.endswith("(No such file or directory); look for its right name")


def test_garbage_for_a_manifest(copy: Path) -> None:
    (copy / "manifest.json").write_bytes(bytes(range(256)) * 30)
    expected = "HERE/manifest.json: is no manifest of a checkpoint (it is no JSON); take another checkpoint"
    assert refusal(copy) == expected


def test_a_file_cut_while_it_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.preadv", lambda file, data, offset: 0)
    message = refusal(saved)
    assert message.startswith("HERE/model.safetensors: ends at byte ")
    assert message.endswith("in the middle of a tensor; copy it again")


def removed(manifest: dict[str, Any]) -> None:
    del manifest["tensors"][3]


def added(manifest: dict[str, Any]) -> None:
    manifest["tensors"].append({**manifest["tensors"][0], "name": "more\nlines"})


@pytest.mark.parametrize(
    ("change", "told"),
    [(removed, "missing: transformer.ln_f.bias"), (added, r"unknown: 'more\nlines'")],
)
def test_a_manifest_of_other_tensors(copy: Path, change: Callable[[dict[str, Any]], None], told: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert refusal(copy) == f"HERE: holds another model ({told}); give the sizes of the model that was saved"


def test_more_layers(saved: Path) -> None:
    message = refusal(saved, replace(BASE, sizes=replace(SMALL, layers=6)))
    names = ", ".join(f"transformer.h.4.{name}" for name in ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight"))
    assert message.startswith(f"HERE: holds another model (missing: {names}, ")
    assert " and 19 more); " in message


def test_fewer_layers(saved: Path) -> None:
    message = refusal(saved, replace(BASE, sizes=replace(SMALL, layers=3)))
    assert message.startswith("HERE: holds another model (unknown: transformer.h.3.ln_1.weight, ")
    assert " and 7 more); " in message


def test_another_width(saved: Path) -> None:
    message = refusal(saved, replace(BASE, sizes=replace(SMALL, width=12)))
    assert message.startswith(
        "HERE: holds another model (of another shape: transformer.wte.weight (29, 15) not (29, 12), "
    )
    assert len(message.encode()) < 2048
