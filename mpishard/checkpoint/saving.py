"""Saving: every rank writes its byte ranges of the same files, and a rename makes them a checkpoint.

[Note: three parts of a save]
*Capture* notes what this rank has to write, and where. *Write* puts it there; it speaks to no other rank. *Commit*
makes the directory a checkpoint. A capture refers to the engine's arrays, which hold until the next step begins; a
copy of them would let training go on while another thread writes.

[Note: when there is a checkpoint]
All is written in a hidden directory beside the final one, on the disk before it gets its name. A checkpoint that has
that name is set aside first and removed last; a save that was killed between two renames leaves it aside, and the
next save of that name puts it back before it begins.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpishard
from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.checkpoint.agree import agreed, by_rank_zero, from_rank_zero, system_errors
from mpishard.checkpoint.directory import MANIFEST, step_of
from mpishard.checkpoint.files import check_name
from mpishard.checkpoint.header import Header, make_header
from mpishard.checkpoint.manifest import Manifest, Tensor, digest_of
from mpishard.checkpoint.ranges import parts, write_from
from mpishard.checkpoint.tensors import FORMAT_TYPES, arrays_of, checksums, public_name, shapes_of, type_of
from mpishard.errors import CheckpointError
from mpishard.shard.engine import Engine
from mpishard.shard.state import own_pieces

__all__ = ["save"]


@dataclass(frozen=True)
class _Capture:
    """What this rank writes: the first bytes of each file, and (file, place in it in bytes, values, operations)."""

    heads: Mapping[str, tuple[bytes, Header]]
    ranges: tuple[tuple[str, int, Array, Ops], ...]
    manifest: Manifest


def save(engine: Engine, path: Path, *, configuration: Mapping[str, Any], beside: Mapping[str, str] = {}) -> None:
    """Write the engine's parameters, optimiser states, counters and loss scale as the directory ``path``. Collective.

    ``model.safetensors`` opens in other people's tools; so does the file of each optimiser state. Arrays are of the
    engine's type; frozen parameters have no optimiser states. A checkpoint of the same name is replaced.

    Args:
        path: the same on all ranks, on a file system that all ranks see. A name ``step-<digits>`` is that of the
            engine's steps.
        configuration: what the manifest says of the run: a table that JSON can hold.
        beside: texts of further files, by name.

    Raises:
        CheckpointError: on all ranks, when any of them cannot write; what was there before is whole.
    """
    comm = engine.comm
    engine.entry.meet("saving a checkpoint")
    agreed(comm, lambda: _check_path(path, engine.steps))
    contents = agreed(comm, lambda: _encoded(beside))
    capture = _capture(engine, configuration, contents)
    token = from_rank_zero(comm, lambda: secrets.token_hex(4).encode()).decode()
    folder = path.with_name(f"{_hidden(path, 'new')}{token}")
    try:
        small = by_rank_zero(comm, lambda: _prepare(path, folder, capture, contents)) or {}
        agreed(comm, lambda: _write(folder, capture, comm.rank))
        by_rank_zero(comm, lambda: _commit(path, folder, small))
    except CheckpointError:  # on all ranks; none goes on while the directory is there
        by_rank_zero(comm, lambda: _remove(folder))
        raise
    except BaseException:
        if comm.rank == 0:
            _remove(folder)
        raise


def _check_path(path: Path, step: int) -> None:
    """Refuse a path that can be no checkpoint's, or is that of another step."""
    check_name(path)
    if path.name in ("", ".."):
        raise CheckpointError(f"{path}: has no name of its own to give a checkpoint; add one, such as step-00000100")
    if step_of(path) not in (None, step):
        raise CheckpointError(
            f"{path}: is the name of another step, the engine has done {step}; save as step-{step:08d}, or under a "
            "name without a number"
        )


def _encoded(beside: Mapping[str, str]) -> dict[str, bytes]:
    """Return what the small files will hold, by name."""
    for name in beside:
        if name in {"", MANIFEST} or name.startswith(".") or Path(name).name != name or name.endswith(".safetensors"):
            raise CheckpointError(f"{name!r} cannot be the name of a file beside the tensors; choose another")
        check_name(name)
    try:
        return {name: text.encode() for name, text in beside.items()}
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a text beside the tensors cannot be written ({error.reason}); use another") from None


def _capture(engine: Engine, configuration: Mapping[str, Any], beside: Mapping[str, bytes]) -> _Capture:
    shapes = shapes_of(engine.model)
    arrays = arrays_of(engine.states)
    dtype = type_of(engine)
    sums = checksums(engine)
    files = {
        f"{array}.safetensors": make_header([(name, shapes[name]) for name in sums[array]], FORMAT_TYPES[dtype])
        for array in arrays
    }
    ranges = []
    for part, piece in own_pieces(engine.state):
        public = public_name(engine.model, part.unit, piece.slot.name)
        for array, name in arrays.items():
            if public in sums[array]:
                entry = files[f"{array}.safetensors"][1].entries[public]
                values = part.slice_of(name)[piece.offset : piece.end]
                ranges.append((f"{array}.safetensors", entry.at(piece.start), values, part.home(name, engine.ops)))
    manifest = Manifest(
        mpishard=mpishard.__version__,
        step=engine.steps,
        updates=engine.updates,
        samples=engine.steps * engine.global_batch,
        dtype=dtype,
        configuration=dict(configuration),
        tensors=tuple(
            Tensor(name, shape, {array: f"{found[name]:016x}" for array, found in sums.items() if name in found})
            for name, shape in shapes.items()
        ),
        files={
            **{name: header.size for name, (_, header) in files.items()},
            **{name: len(content) for name, content in beside.items()},
        },
        digests={name: digest_of(content) for name, content in beside.items()},
        checksum=f"{sum(value for row in sums.values() for value in row.values()) % 2**64:016x}",
        loss_scale=engine.loss_scale.state() if engine.loss_scale is not None else None,
    )
    return _Capture(files, tuple(ranges), manifest)


def _prepare(path: Path, folder: Path, capture: _Capture, beside: Mapping[str, bytes]) -> dict[str, bytes]:
    """Make the hidden directory with the large files in their full length, and return the small ones; rank 0."""
    small = {**beside, MANIFEST: capture.manifest.text().encode()}
    with system_errors(path, 0, writing=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        if path.is_symlink() or (path.exists() and not (path / MANIFEST).is_file()):
            raise CheckpointError(f"{path}: is there and is no checkpoint; remove it, or choose another name")
        folder.mkdir()
        for name, (raw, header) in capture.heads.items():
            with (folder / name).open("xb") as file:
                file.write(raw)
                file.truncate(header.size)
    return small


def _remove_leftovers(path: Path) -> None:
    """Remove what a killed save of this name has left; first put back what it had set aside."""
    aside, new = (_hidden(path, kind) for kind in ("old", "new"))
    for found in sorted(path.parent.iterdir()):
        if found.name.startswith(aside) and not path.exists() and (found / MANIFEST).is_file():
            found.rename(path)
        elif found.name.startswith((aside, new)):
            _remove(found)


def _hidden(path: Path, kind: str) -> str:
    return f".{path.name}.{kind}-"


def _write(folder: Path, capture: _Capture, rank: int) -> None:
    """Write this rank's ranges and put them on the disk."""
    for name in capture.heads:
        path = folder / name
        with system_errors(path, rank, writing=True), _opened(path, os.O_WRONLY) as file:
            for target, offset, values, ops in capture.ranges:
                if target == name:
                    for part, start in parts(values):
                        write_from(file, ops.fetch(part), offset + start * values.itemsize)
            os.fsync(file)


def _commit(path: Path, folder: Path, small: Mapping[str, bytes]) -> None:
    """Add the small files and give the directory its name; rank 0."""
    with system_errors(path, 0, writing=True):
        for name, content in small.items():
            with (folder / name).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _sync(folder)
        aside = path.with_name(_hidden(path, "old") + folder.name.removeprefix(_hidden(path, "new")))
        named = False
        try:
            if path.exists():
                path.rename(aside)
            folder.rename(path)
            named = True
            _sync(path.parent)
        except OSError:
            if named:
                path.rename(folder)
            if aside.exists():
                aside.rename(path)
            raise
        _remove(aside)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Put the names in a directory on the disk."""
    with _opened(folder, os.O_RDONLY) as file:
        os.fsync(file)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)
