"""The manifest of a checkpoint: what it is, what it holds, and the sums by which damage is found."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from mpishard.checkpoint.header import shown
from mpishard.errors import CheckpointError

__all__ = ["MANIFEST", "Manifest", "Tensor", "manifest_bytes", "newest", "read_manifest"]

MANIFEST = "manifest.json"
_FORMAT = "mpishard-checkpoint"
_VERSION = 1
_SUM = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class Tensor:
    """One parameter: ``checksums`` holds 16 hex digits by array (``model``, ``exp_avg``, ...)."""

    name: str
    shape: tuple[int, ...]
    checksums: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        mpishard: the version that wrote it.
        step: steps of training behind it; updates: those that changed parameters.
        samples: training samples behind it, over all ranks.
        dtype: element type of its arrays.
        configuration: what the caller of ``save`` told of the run.
        tensors: the parameters in the order of the files.
        files: bytes of every file but this one, by name.
        checksum: of all parameters and moments, as ``Engine.checksum`` gives it.
    """

    mpishard: str
    step: int
    updates: int
    samples: int
    dtype: str
    configuration: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    files: Mapping[str, int]
    checksum: str

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays held for each parameter: ``model``, then the optimiser's."""
        names = [name.removesuffix(".safetensors") for name in self.files if name.endswith(".safetensors")]
        return tuple(sorted(names, key=lambda name: name != "model"))

    def text(self) -> str:
        """Return the manifest as JSON.

        Raises:
            CheckpointError: the configuration is no JSON.
        """
        head = {"format": _FORMAT, "version": _VERSION}
        try:
            return json.dumps({**head, **asdict(self)}, indent=2, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the configuration cannot be written as JSON ({error}); give texts, finite numbers, lists and tables"
            ) from None

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Manifest:
        """Read a manifest; ``where`` names it in errors.

        Raises:
            CheckpointError: it is none, of another version, or not complete.
        """
        try:
            table = json.loads(text)
        except (ValueError, RecursionError):
            _refuse(where, "it is no JSON")
        if not isinstance(table, dict) or table.pop("format", None) != _FORMAT:
            _refuse(where, f'it does not say "format": "{_FORMAT}"')
        version = table.pop("version", None)
        if version != _VERSION:
            raise CheckpointError(
                f"{where}: is of version {shown(str(version))}, version {_VERSION} is read here; "
                "use the mpishard that wrote it"
            )
        _check_fields(table, where)
        tensors = tuple(Tensor(t["name"], tuple(t["shape"]), t["checksums"]) for t in table.pop("tensors"))
        manifest = cls(**table, tensors=tensors)
        for tensor in tensors:
            if set(tensor.checksums) != set(manifest.arrays):
                arrays = ", ".join(manifest.arrays)
                _refuse(where, f"{shown(tensor.name)} has no checksum for each of {arrays}")
        return manifest


def _check_fields(table: dict[str, Any], where: str) -> None:
    fields = {name: field.type for name, field in Manifest.__dataclass_fields__.items()}
    if missing := sorted(fields.keys() - table.keys()):
        _refuse(where, f"it has no {missing[0]}")
    if unknown := sorted(table.keys() - fields.keys()):
        _refuse(where, f"it has {shown(unknown[0])}, which is not known")
    counts = ("step", "updates", "samples")
    valid = {
        **{name: _is_count(table[name]) for name in counts},
        **{name: isinstance(table[name], str) for name in ("mpishard", "dtype")},
        "configuration": isinstance(table["configuration"], dict),
        "files": isinstance(table["files"], dict) and all(map(_is_count, table["files"].values())),
        "tensors": isinstance(table["tensors"], list) and all(map(_is_tensor, table["tensors"])),
        "checksum": _is_sum(table["checksum"]),
    }
    for name, fits in valid.items():
        if not fits:
            _refuse(where, f"its {name} cannot be {shown(json.dumps(table[name]))}")


def _is_tensor(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "shape", "checksums"}
        and isinstance(value["name"], str)
        and isinstance(value["shape"], list)
        and all(map(_is_count, value["shape"]))
        and isinstance(value["checksums"], dict)
        and all(map(_is_sum, value["checksums"].values()))
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_sum(value: object) -> bool:
    return isinstance(value, str) and _SUM.fullmatch(value) is not None


def _refuse(where: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{where}: is no manifest of a checkpoint ({problem}); take another checkpoint")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in the directory ``path``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return Manifest.parse(manifest_bytes(path), str(path / MANIFEST))


def manifest_bytes(path: Path) -> bytes:
    """Return what the manifest's file holds.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: is no checkpoint ({MANIFEST} cannot be read: {error.strerror}); "
            "name a directory that a run has saved"
        ) from None


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of the highest step in ``folder``, a directory ``step-<number>``; None where there is none.

    A directory without a manifest is no checkpoint.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        found = [(int(match[1]), name) for name in names if (match := re.fullmatch(r"step-([0-9]{1,18})", name))]
        complete = [(step, name) for step, name in found if (folder / name / MANIFEST).is_file()]
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}); choose a folder that can be") from None
    return folder / max(complete)[1] if complete else None
