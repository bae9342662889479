"""A checkpoint that is damaged, cut short or of another model is refused on all ranks in one line."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mpishard.checkpoint import load, load_weights, loading
from mpishard.comm.threads import run
from mpishard.errors import CheckpointError
from mpishard.shard.engine import Engine
from tests.checkpoint.runs import BASE, UNREADABLE, edit_manifest, saved_alone, unreadable
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


def error_of(action: Callable[[Engine], object], job: Job = BASE, ranks: int = 3, **changes: Any) -> str:
    """The one message of all ranks."""

    def body(comm: Any) -> str:
        engine = job.engine(comm, **changes)
        with pytest.raises(CheckpointError) as error:
            action(engine)
        assert (engine.steps, engine.updates) == (0, 0)
        return str(error.value)

    (message,) = set(run(ranks, body))
    assert "\n" not in message
    return message


def refusal(path: Path, job: Job = BASE) -> str:
    """The one message of all ranks, without the folder."""
    return error_of(lambda engine: load(engine, path), job).replace(str(path), "HERE")


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
    size = (copy / "model.safetensors").stat().st_size
    edit_manifest(copy, lambda manifest: manifest["files"].update({"model.safetensors": size}))
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


def test_a_number_changed_in_the_manifest(copy: Path) -> None:
    """Counters are in no other file, so nothing else would show it."""
    table = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**table, "step": 5, "updates": 4}))
    assert refusal(copy).startswith("HERE/manifest.json: is damaged or was changed (its digest is ")


def test_a_checkpoint_under_the_name_of_another(saved: Path, tmp_path: Path) -> None:
    path = shutil.copytree(saved, tmp_path / "step-00000004")
    expected = "HERE: holds the state after 2 steps, not that of its name; name it step-00000002 again"
    assert refusal(path) == expected


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "exp_avg_sq.safetensors"])
def test_what_is_no_regular_file_is_not_opened(copy: Path, kind: str, name: str) -> None:
    unreadable(copy / name, kind)
    assert refusal(copy) == f"HERE/{name}: is no regular file; name one that is, or copy it again"


def test_a_file_that_one_rank_alone_sees_otherwise(saved: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has read the header; the file system of another rank may hold something else there."""
    unreadable(copy / "model.safetensors", "fifo")
    real = loading.open_regular

    def seen(path: Path) -> Any:
        return real(copy / path.name if threading.current_thread().name == "rank 1" else path)

    monkeypatch.setattr(loading, "open_regular", seen)
    assert refusal(saved).endswith("model.safetensors: is no regular file; name one that is, or copy it again")


def test_a_manifest_of_any_length_is_not_read(copy: Path) -> None:
    os.truncate(copy / "manifest.json", 10**12)
    assert refusal(copy) == "HERE/manifest.json: holds 1000000000000 bytes, 100000000 are the most; take another"


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_no_file_has(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    expected = f"{str(path / 'manifest.json')!r} cannot be the name of a file; use another"
    assert {error_of(lambda engine: load(engine, path))} == {expected}
    assert {error_of(lambda engine: load_weights(engine, path))} == {
        f"{str(path)!r} cannot be the name of a file; use another"
    }


def test_a_file_cut_while_it_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.preadv", lambda file, data, offset: 0)
    message = refusal(saved)
    assert message.startswith("HERE/model.safetensors: ends at byte ")
    assert message.endswith("in the middle of a tensor; copy it again")


def summed(manifest: dict[str, Any]) -> None:
    total = sum(int(value, 16) for tensor in manifest["tensors"] for value in tensor["checksums"].values())
    manifest["checksum"] = f"{total % 2**64:016x}"


def removed(manifest: dict[str, Any]) -> None:
    del manifest["tensors"][3]
    summed(manifest)


def added(manifest: dict[str, Any]) -> None:
    manifest["tensors"].append({**manifest["tensors"][0], "name": "more\nlines"})
    summed(manifest)


@pytest.mark.parametrize(
    ("change", "told"),
    [(removed, "missing: transformer.ln_f.bias"), (added, r"unknown: 'more\nlines'")],
)
def test_a_manifest_of_other_tensors(copy: Path, change: Callable[[dict[str, Any]], None], told: str) -> None:
    edit_manifest(copy, change)
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
