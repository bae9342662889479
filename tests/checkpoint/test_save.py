"""What a save leaves behind: files that the public package opens, or, where it fails, what was there before."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import mpishard
from mpishard.checkpoint import load, newest, read_manifest, save
from mpishard.comm.threads import run
from mpishard.errors import CheckpointError
from tests.checkpoint.runs import BASE, alone, resume, saved_alone, second_half, train_and_save
from tests.models.engine_access import named


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusals(ranks: int, path: Path, steps: int = 0, **options: Any) -> set[str]:
    """The errors of all ranks that save an engine which has its initial values after so many steps."""

    def body(comm: Any) -> str:
        engine = BASE.engine(comm)
        engine.steps = steps
        with pytest.raises(CheckpointError) as error:
            save(engine, path, **{"configuration": {}, **options})
        return str(error.value)

    return set(run(ranks, body))


def on_rank(rank: int) -> bool:
    return threading.current_thread().name == f"rank {rank}"


def test_the_public_package_opens_the_files(tmp_path: Path) -> None:
    engine = saved_alone(tmp_path / "step-2")
    for name, array in (("model", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        file = tmp_path / "step-2" / f"{name}.safetensors"
        found = load_file(file)
        want = {f"transformer.{key}": value for key, value in named(engine, array).items()}
        assert list(want)[4] == "transformer.h.0.ln_1.weight"
        assert found.keys() == want.keys()
        for key, value in want.items():
            assert found[key].dtype == np.float32
            assert found[key].tobytes() == value.tobytes(), key
            assert found[key].shape == value.shape
        with safe_open(file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_the_manifest_tells_all(tmp_path: Path) -> None:
    engine = alone()
    save(engine, tmp_path / "x", configuration={"a": {"b": 4}}, beside={"config.json": "{}", "note.txt": "é\n"})
    manifest = read_manifest(tmp_path / "x")
    assert manifest.mpishard == mpishard.__version__
    assert (manifest.step, manifest.updates, manifest.samples, manifest.dtype) == (0, 0, 0, "float32")
    assert manifest.configuration == {"a": {"b": 4}}
    assert manifest.checksum == engine.checksum()
    assert manifest.files == {
        path.name: path.stat().st_size for path in (tmp_path / "x").iterdir() if path.name != "manifest.json"
    }
    assert (tmp_path / "x" / "note.txt").read_bytes() == "é\n".encode()
    assert manifest.digests == {
        name: hashlib.blake2b(content, digest_size=16).hexdigest()
        for name, content in {"config.json": b"{}", "note.txt": "é\n".encode()}.items()
    }
    whole = sum(int(value, 16) for tensor in manifest.tensors for value in tensor.checksums.values())
    assert f"{whole % 2**64:016x}" == manifest.checksum
    assert json.loads((tmp_path / "x" / "manifest.json").read_text())["format"] == "mpishard-checkpoint"


def full_disk(after: int) -> Callable[..., int]:
    """``os.pwrite`` as it is when rank 1 finds the disk full after some writes."""
    real, count = os.pwrite, 0

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        nonlocal count
        count += on_rank(1)
        if on_rank(1) and count > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, offset)

    return pwrite


@pytest.mark.parametrize("before", [True, False], ids=["over a checkpoint", "anew"])
def test_a_full_disk_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    path = tmp_path / "runs" / "step-3"
    if before:
        run(2, lambda comm: train_and_save(comm, path))
    was = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_disk(5))
        (message,) = refusals(3, path, steps=3)
    assert message.startswith(f"{tmp_path}/runs/.step-3.new-")
    assert "safetensors: cannot be written by rank 1 on " in message
    assert message.endswith("(No space left on device); make room, or choose another folder")
    assert contents(tmp_path) == was
    assert newest(path.parent) == (path if before else None)
    if before:
        assert run(3, lambda comm: resume(comm, path)) == [second_half()] * 3
    else:
        assert list(path.parent.iterdir()) == []


def test_a_rank_that_does_not_see_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def blind(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if on_rank(2) and flags == os.O_WRONLY:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", blind)
    (message,) = refusals(3, tmp_path / "x")
    assert "cannot be written by rank 2 on " in message
    assert message.endswith("(No such file or directory); it must lie on a file system that all nodes share")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_no_file_has(tmp_path: Path, name: str) -> None:
    expected = f"{str(tmp_path / name)!r} cannot be the name of a file; use another"
    assert refusals(3, tmp_path / name) == {expected}
    assert refusals(3, tmp_path / name / "x") == {
        f"{str(tmp_path / name / 'x')!r} cannot be the name of a file; use another"
    }
    assert refusals(3, tmp_path / "x", beside={name: ""}) == {f"{name!r} cannot be the name of a file; use another"}
    assert list(tmp_path.iterdir()) == []


def test_texts_that_no_file_holds(tmp_path: Path) -> None:
    (message,) = refusals(3, tmp_path / "x", beside={"note": "\ud800"})
    assert message == "a text beside the tensors cannot be written (surrogates not allowed); use another"
    assert list(tmp_path.iterdir()) == []


def test_a_name_on_one_rank_alone(tmp_path: Path) -> None:
    def body(comm: Any) -> str:
        with pytest.raises(CheckpointError) as error:
            save(BASE.engine(comm), tmp_path / ("x\0" if comm.rank == 1 else "x"), configuration={})
        return str(error.value)

    assert set(run(3, body)) == {f"{str(tmp_path / 'x') + chr(0)!r} cannot be the name of a file; use another"}


def test_the_name_of_another_step(tmp_path: Path) -> None:
    assert refusals(2, tmp_path / "step-00000004") == {
        f"{tmp_path}/step-00000004: is the name of another step, the engine has done 0; "
        "save as step-00000000, or under a name without a number"
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", [1, 2], ids=["before the rename", "after the rename"])
def test_a_failure_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    saved_alone(tmp_path / "x")
    was, calls = contents(tmp_path), []

    def sync(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("mpishard.checkpoint.saving._sync", sync)
    (message,) = refusals(2, tmp_path / "x")
    assert message.startswith(f"{tmp_path / 'x'}: cannot be written by rank 0 on ")
    assert message.endswith("(Input/output error); choose a folder that can be")
    assert contents(tmp_path) == was


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (message,) = refusals(2, tmp_path / "file" / "x")
    assert message.startswith(f"{tmp_path}/file/x: cannot be written by rank 0 on ")


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    for name in (".step-2.new-0123", ".step-2.old-4567", ".step-20.new-0123"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    saved_alone(tmp_path / "step-2")
    saved_alone(tmp_path / "step-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-20.new-0123", "step-2"]
    assert read_manifest(tmp_path / "step-2").step == 2


def test_what_a_killed_save_had_set_aside_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_alone(tmp_path / "x")
    was = contents(tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / ".x.old-0123")
    monkeypatch.setattr(os, "pwrite", full_disk(0))
    refusals(2, tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert contents(tmp_path / "x") == was


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
        (path / "mine").write_text("mine")
    else:
        saved_alone(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    was = contents(tmp_path)
    assert refusals(2, path) == {f"{path}: is there and is no checkpoint; remove it, or choose another name"}
    assert contents(tmp_path) == was


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "manifest.json", "model.safetensors", "x.safetensors"])
def test_names_that_files_beside_cannot_have(tmp_path: Path, name: str) -> None:
    expected = f"{name!r} cannot be the name of a file beside the tensors; choose another"
    assert refusals(2, tmp_path / "x", beside={name: ""}) == {expected}
    assert list(tmp_path.iterdir()) == []


def test_other_mistakes(tmp_path: Path) -> None:
    (message,) = refusals(2, Path("/"))
    assert message == "/: has no name of its own to give a checkpoint; add one, such as step-00000100"
    (message,) = refusals(2, tmp_path / "x", configuration={"lr": float("inf")})
    assert message.startswith("the configuration cannot be written as JSON (Out of range float values")
    assert list(tmp_path.iterdir()) == []


def test_short_writes_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may move fewer bytes than it was given."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:1001], offset))
    monkeypatch.setattr(os, "preadv", lambda file, data, offset: preadv(file, [data[0][:997]], offset))
    run(2, lambda comm: train_and_save(comm, tmp_path / "x"))
    assert run(3, lambda comm: resume(comm, tmp_path / "x")) == [second_half()] * 3


def test_all_is_put_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every rank that has written: what one machine holds back, another cannot sync."""
    real, synced = os.fsync, []

    def fsync(file: int) -> None:
        synced.append((threading.current_thread().name, os.fstat(file).st_ino))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    run(2, lambda comm: save(BASE.engine(comm), tmp_path / "x", configuration={}))
    places = {path.name: path.stat().st_ino for path in (tmp_path, tmp_path / "x", *(tmp_path / "x").iterdir())}
    assert len(places) == 6
    for name, place in places.items():
        assert ("rank 0", place) in synced, name
        assert (("rank 1", place) in synced) == name.endswith(".safetensors"), name


def test_a_bug_on_one_rank_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saved_alone(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = saved_alone(Path("x"))
    other = alone(seed=99)
    load(other, Path("x"))
    assert other.checksum() == engine.checksum()
