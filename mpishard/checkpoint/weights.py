"""Beginning with weights from a public safetensors file, whoever has written it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpishard.checkpoint.agree import agreed, from_rank_zero, system_errors
from mpishard.checkpoint.directory import MANIFEST, manifest_bytes
from mpishard.checkpoint.files import check_name, open_regular
from mpishard.checkpoint.header import Entry
from mpishard.checkpoint.loading import check_sums, shared_header
from mpishard.checkpoint.manifest import Manifest
from mpishard.checkpoint.ranges import parts, read_converted, read_into
from mpishard.checkpoint.strict_json import shown
from mpishard.checkpoint.tensors import check_tensors, checksums, listed, public_name, shapes_of, type_of
from mpishard.errors import CheckpointError
from mpishard.nn.model import Model
from mpishard.shard.engine import Engine

__all__ = ["find_weights", "load_weights"]

_MODEL = "model.safetensors"
#: types that an engine's element type holds without rounding
_EXACT = {"float32": ("F32", "F16", "BF16"), "float64": ("F64", "F32", "F16", "BF16")}
#: bytes of two tied tensors compared at a time
_CHUNK = 1 << 18


@dataclass(frozen=True)
class _Source:
    """The tensors of a file that the model takes, by public name, and the second copies of tied ones."""

    entries: Mapping[str, Entry]
    ties: Mapping[str, tuple[Entry, ...]]


def load_weights(engine: Engine, file: Path) -> None:
    """Give the engine the parameters of a safetensors file, or of ``model.safetensors`` in a directory. Collective.

    Names may have the model's public prefix or not. Numbers are converted without rounding. Optimiser states and
    counters stay.

    Args:
        file: the same on all ranks.

    Raises:
        CheckpointError: on all ranks, when it cannot be read, is of another model, holds a number that is not finite
            or a second copy of a tied tensor that differs from it, or is of a checkpoint of ours and not as saved; the
            tensor is named. Values may have been read.
    """
    comm = engine.comm
    engine.entry.meet("loading weights")
    file = Path(os.fsdecode(from_rank_zero(comm, lambda: os.fsencode(find_weights(file)))))
    source = _match(engine.model, shared_header(engine, file).entries.values(), str(file))
    dtype = type_of(engine)
    if strange := [f"{e.name} {e.dtype}" for e in source.entries.values() if e.dtype not in _EXACT[dtype]]:
        raise CheckpointError(
            f"{file}: {listed(strange)} cannot become {dtype} exactly; convert to {' or '.join(_EXACT[dtype])}"
        )
    agreed(comm, lambda: _read(engine, file, source))
    engine.refresh()
    folder = file.parent
    beside = from_rank_zero(comm, lambda: manifest_bytes(folder) if (folder / MANIFEST).exists() else b"")
    if beside and file.name == _MODEL:  # one of our own checkpoints: it says what its values are
        manifest = Manifest.parse(beside, str(folder / MANIFEST))
        check_tensors(str(folder / MANIFEST), {t.name: t.shape for t in manifest.tensors}, shapes_of(engine.model))
        if manifest.dtype == dtype:
            check_sums(folder, manifest, {"model": checksums(engine)["model"]})


def find_weights(file: Path) -> Path:
    """Return the file itself, or the one in a directory.

    Raises:
        CheckpointError: the name cannot be one, or the directory cannot be read or holds weights in another form.
    """
    check_name(file)
    with system_errors(file, 0, writing=False):
        if not file.is_dir():
            return file
        if not (file / _MODEL).exists():
            if (file / f"{_MODEL}.index.json").exists():
                raise CheckpointError(f"{file}: holds weights in several files; join them in one {_MODEL}")
            if (file / "pytorch_model.bin").exists():
                raise CheckpointError(
                    f"{file}: holds pytorch_model.bin, which could run code when read; save the weights as {_MODEL}"
                )
        return file / _MODEL


def _match(model: Model, entries: Iterable[Entry], where: str) -> _Source:
    """Find each parameter's tensor."""
    prefix = model.public_prefix
    expected = shapes_of(model)
    aliases = {alias: prefix + name for alias, name in model.ties}
    found: dict[str, Entry] = {}
    ties: dict[str, tuple[Entry, ...]] = {}
    for entry in entries:
        name = prefix + entry.name.removeprefix(prefix)
        tied = aliases.get(entry.name.removeprefix(prefix))
        if name not in expected and tied is not None:
            ties[tied] = (*ties.get(tied, ()), entry)
            continue
        if name not in expected and entry.name.endswith(model.ignored):
            continue
        if name in found:
            raise CheckpointError(f"{where}: holds both {found[name].name} and {entry.name}; keep one of them")
        found[name if name in expected else entry.name] = entry
    check_tensors(where, {name: entry.shape for name, entry in found.items()}, expected)
    for name, copies in ties.items():
        for copy in copies:
            if (copy.dtype, copy.shape) != (found[name].dtype, found[name].shape):
                raise CheckpointError(_untied(where, copy, found[name]))
    return _Source(found, ties)


def _untied(where: str, copy: Entry, original: Entry) -> str:
    return (
        f"{where}: {shown(copy.name)} is not bit for bit {shown(original.name)}, to which this model ties it; "
        "take weights of a model with tied embeddings"
    )


def _read(engine: Engine, file: Path, source: _Source) -> None:
    """Read, convert and check what this rank holds."""
    with system_errors(file, engine.comm.rank, writing=False), open_regular(file) as opened:
        number = opened.fileno()
        for part in engine.state.values():
            for piece in part.pieces:
                name = public_name(engine.model, part.unit, piece.slot.name)
                entry = source.entries[name]
                home = part.home("param", engine.ops)
                for out, start in parts(part.arrays["param"][piece.offset : piece.end]):
                    host = home.host_like(out)
                    for values in read_converted(number, entry.dtype, entry.at(piece.start + start), file, host):
                        if not np.isfinite(values).all():
                            raise CheckpointError(f"{file}: {entry.name} holds NaN or infinity; take other weights")
                    home.upload(host, out)
                for copy in source.ties.get(name, ()):
                    places = (entry.at(piece.start), copy.at(piece.start))
                    if not _equal(number, places, (piece.stop - piece.start) * entry.width, file):
                        raise CheckpointError(_untied(str(file), copy, entry))


def _equal(number: int, places: tuple[int, int], size: int, file: Path) -> bool:
    """Compare ``size`` bytes at two places of an open file."""
    for start in range(0, size, _CHUNK):
        one, other = (np.empty(min(_CHUNK, size - start), np.uint8) for _ in places)
        read_into(number, one, places[0] + start, file)
        read_into(number, other, places[1] + start, file)
        if not np.array_equal(one, other):
            return False
    return True
