"""Loading: any number of ranks, in any strategy, read their byte ranges of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mpishard.checkpoint.agree import agreed, from_rank_zero, system_errors
from mpishard.checkpoint.directory import manifest_bytes, manifest_of
from mpishard.checkpoint.files import open_regular
from mpishard.checkpoint.header import LENGTH_BYTES, Header, header_length, parse_header
from mpishard.checkpoint.manifest import Manifest
from mpishard.checkpoint.ranges import parts, read_into
from mpishard.checkpoint.tensors import (
    FORMAT_TYPES,
    arrays_of,
    check_tensors,
    checksums,
    listed,
    public_name,
    shapes_of,
    type_of,
)
from mpishard.errors import CheckpointError
from mpishard.shard.engine import Engine

__all__ = ["check_sums", "load", "shared_header"]


def load(engine: Engine, path: Path) -> Manifest:
    """Give the engine the parameters, optimiser states and counters of a checkpoint; return its manifest. Collective.

    An engine without optimiser takes the parameters and counters. An engine that scales its loss takes the scale where
    the one that saved did so too, else it begins with its own. All that was read is compared with the manifest's
    checksums. After an error in what was read, the engine's values are of no use. Optimiser states of parameters that
    were frozen when it was saved begin at zero; of those that are frozen in the engine, none are read.

    Args:
        path: the checkpoint's directory, the same on all ranks.

    Raises:
        CheckpointError: on all ranks, when it cannot be read, is damaged, or is of another model, optimiser or
            element type; what differs is named.
    """
    comm = engine.comm
    engine.entry.meet("loading a checkpoint")
    manifest = manifest_of(path, from_rank_zero(comm, lambda: manifest_bytes(path)))
    arrays = arrays_of(engine.states)
    _check_fit(engine, manifest, path, tuple(arrays))
    headers = {name: shared_header(engine, path / f"{name}.safetensors") for name in arrays}
    for name, header in headers.items():
        _check_header(path / f"{name}.safetensors", header, manifest)
    agreed(comm, lambda: _read(engine, path, headers, arrays))
    engine.refresh()
    check_sums(path, manifest, checksums(engine))
    engine.steps, engine.updates = manifest.step, manifest.updates
    if engine.loss_scale is not None and manifest.loss_scale is not None:
        engine.loss_scale.restore(manifest.loss_scale)
    return manifest


def shared_header(engine: Engine, file: Path) -> Header:
    """Return the header of a safetensors file, which rank 0 reads and every rank judges. Collective.

    Raises:
        CheckpointError: on all ranks, when it cannot be read or is none.
    """

    def read() -> bytes:
        with system_errors(file, 0, writing=False), open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            first = opened.read(LENGTH_BYTES)
            return size.to_bytes(8, "little") + first + opened.read(header_length(first, size, str(file)))

    found = from_rank_zero(engine.comm, read)
    return parse_header(found[8:], int.from_bytes(found[:8], "little"), str(file))


def _check_fit(engine: Engine, manifest: Manifest, path: Path, arrays: tuple[str, ...]) -> None:
    """Compare the manifest with the engine."""
    check_tensors(str(path), {tensor.name: tensor.shape for tensor in manifest.tensors}, shapes_of(engine.model))
    dtype = type_of(engine)
    if manifest.dtype != dtype:
        raise CheckpointError(f"{path}: holds {manifest.dtype}, the engine {dtype}; load it into one of its own type")
    if lacking := [name for name in arrays if name not in manifest.arrays]:
        raise CheckpointError(
            f"{path}: holds {', '.join(manifest.arrays)}, the optimiser also needs {', '.join(lacking)}; "
            "take a checkpoint of training, or begin anew with its weights"
        )


def _check_header(file: Path, header: Header, manifest: Manifest) -> None:
    """Compare a file with the manifest."""
    if (expected := manifest.files[file.name]) != header.size:
        raise CheckpointError(
            f"{file}: holds {header.size} bytes, the manifest says {expected}; "
            "it was cut short or changed: copy it again"
        )
    kind = FORMAT_TYPES[manifest.dtype]
    array = file.name.removesuffix(".safetensors")
    expected_entries = {tensor.name: (tensor.shape, kind) for tensor in manifest.tensors if array in tensor.checksums}
    if {name: (entry.shape, entry.dtype) for name, entry in header.entries.items()} != expected_entries:
        raise CheckpointError(f"{file}: its tensors are not those of the manifest; copy the checkpoint again")


def _read(engine: Engine, path: Path, headers: Mapping[str, Header], arrays: Mapping[str, str]) -> None:
    """Read what this rank holds, straight into its arrays where they are host memory."""
    for name, array in arrays.items():
        file = path / f"{name}.safetensors"
        with system_errors(file, engine.comm.rank, writing=False), open_regular(file) as opened:
            for part in engine.state.values():
                for piece in part.pieces if array in part.arrays else ():
                    entry = headers[name].entries.get(public_name(engine.model, part.unit, piece.slot.name))
                    whole = part.arrays[array][piece.offset : piece.end]
                    home = part.home(array, engine.ops)
                    if entry is None:  # it was frozen
                        home.fill(whole, 0.0)
                        continue
                    for out, start in parts(whole):
                        host = home.host_like(out)
                        read_into(opened.fileno(), host, entry.at(piece.start + start), file)
                        home.upload(host, out)


def check_sums(path: Path, manifest: Manifest, found: Mapping[str, Mapping[str, int]]) -> None:
    """Compare the values that the ranks now hold with the manifest; ``found`` as :func:`checksums` returns it.

    Raises:
        CheckpointError: they are others; a few of the tensors are named.
    """
    for array, sums in found.items():
        told = {t.name: int(t.checksums[array], 16) for t in manifest.tensors if array in t.checksums}
        wrong = [name for name, value in told.items() if name in sums and value != sums[name]]
        if wrong:
            raise CheckpointError(
                f"{path / array}.safetensors: is damaged (another checksum than the manifest's: {listed(wrong)}); "
                "copy it again, or take another checkpoint"
            )
