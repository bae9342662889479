"""The manifest of a checkpoint: what it is, what it holds, and the sums by which damage is found.

Its ``digest`` covers all else that it says: the numbers of a run are in no other file. It is the BLAKE2b-128, in hex,
of the other entries as JSON in ASCII with sorted keys and no spaces. It finds damage and edits; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from mpishard.checkpoint.strict_json import parse_json, shown
from mpishard.errors import CheckpointError
from mpishard.shard.loss_scale import scale_problem

__all__ = ["Manifest", "Tensor", "digest_of"]

_FORMAT = "mpishard-checkpoint"
_VERSION = 1
_DIGEST_BYTES = 16
_SUM = re.compile("[0-9a-f]{16}")
_DIGEST = re.compile("[0-9a-f]{32}")
_TENSORS = ".safetensors"


@dataclass(frozen=True)
class Tensor:
    """One parameter: ``checksums`` holds 16 hex digits by array (``model``, ``exp_avg``, ...).

    A parameter that was frozen is in ``model`` alone: it has no optimiser states.
    """

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
        digests: of those files that hold no tensors, as :func:`digest_of` gives them, by name.
        checksum: of all parameters and moments, as ``Engine.checksum`` gives it.
        loss_scale: where the run scales its loss, what its ``LossScale`` goes on from; else None, and not in the file.
    """

    mpishard: str
    step: int
    updates: int
    samples: int
    dtype: str
    configuration: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    files: Mapping[str, int]
    digests: Mapping[str, str]
    checksum: str
    loss_scale: Mapping[str, float | int] | None = None

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays held for each parameter that is trained: ``model``, then the optimiser's."""
        names = [name.removesuffix(_TENSORS) for name in self.files if name.endswith(_TENSORS)]
        return tuple(sorted(names, key=lambda name: name != "model"))

    def text(self) -> str:
        """Return the manifest as JSON.

        Raises:
            CheckpointError: the configuration is no JSON.
        """

        def refuse(problem: object) -> NoReturn:
            raise CheckpointError(
                f"the configuration cannot be written as JSON ({problem}); give texts, finite numbers, lists and tables"
            ) from None

        try:
            told = {name: value for name, value in asdict(self).items() if name != "loss_scale" or value is not None}
            text = json.dumps({"format": _FORMAT, "version": _VERSION, **told}, allow_nan=False)
            table = parse_json(text, "it", refuse)  # as a reader will have it: keys of JSON are texts
            return json.dumps({**table, "digest": _digest_of_table(table)}, indent=2) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            refuse(error)

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Manifest:
        """Read a manifest; ``where`` names it in errors.

        Raises:
            CheckpointError: it is none, of another version, not complete, contradicts itself, or is not what was
                written.
        """

        def refuse(problem: str) -> NoReturn:
            _refuse(where, problem)

        try:
            return cls._from_table(parse_json(text, "it", refuse), where, refuse)
        except RecursionError:
            refuse("it is nested too deep")

    @classmethod
    def _from_table(cls, table: Any, where: str, refuse: Callable[[str], NoReturn]) -> Manifest:
        if not isinstance(table, dict) or table.get("format") != _FORMAT:
            refuse(f'it does not say "format": "{_FORMAT}"')
        version = table.get("version")
        if type(version) is not int or version != _VERSION:
            raise CheckpointError(
                f"{where}: is of version {shown(json.dumps(version))}, version {_VERSION} is read here; "
                "use the mpishard that wrote it"
            )
        told = table.pop("digest", None)
        fields = {name: value for name, value in table.items() if name not in ("format", "version")}
        _check_fields(fields, where)
        tensors = tuple(Tensor(t["name"], tuple(t["shape"]), t["checksums"]) for t in fields.pop("tensors"))
        manifest = cls(**fields, tensors=tensors)
        if problem := _contradiction(manifest):
            refuse(problem)
        if not isinstance(told, str):
            refuse("it has no digest")
        if told != (found := _digest_of_table(table)):
            raise CheckpointError(
                f"{where}: is damaged or was changed (its digest is {found}, it says {shown(told)}); "
                "copy it again, or take another checkpoint"
            )
        return manifest


def digest_of(content: bytes) -> str:
    """Return the BLAKE2b-128 of what a file holds, in hex."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def _digest_of_table(table: Mapping[str, Any]) -> str:
    return digest_of(json.dumps(table, sort_keys=True, separators=(",", ":")).encode())


def _contradiction(manifest: Manifest) -> str:
    """Say what in a manifest cannot be true beside the rest; nothing where all can."""
    names = Counter(tensor.name for tensor in manifest.tensors)
    if twice := [name for name, count in names.items() if count > 1]:
        return f"it has the tensor {shown(twice[0])} twice"
    for tensor in manifest.tensors:
        if "model" not in tensor.checksums:
            return f"{shown(tensor.name)} has no checksum for model"
        if unknown := sorted(tensor.checksums.keys() - set(manifest.arrays)):
            return f"{shown(tensor.name)} has a checksum for {shown(unknown[0])}, of which there is no file"
    if manifest.updates > manifest.step:
        return f"its updates are {manifest.updates}, its steps {manifest.step}"
    total = sum(int(value, 16) for tensor in manifest.tensors for value in tensor.checksums.values()) % 2**64
    if f"{total:016x}" != manifest.checksum:
        return f"its checksum is {manifest.checksum}, those of its tensors add up to {total:016x}"
    small = {name for name in manifest.files if not name.endswith(_TENSORS)}
    if wrong := sorted(small ^ manifest.digests.keys()):
        return f"{shown(wrong[0])} has no size and digest"
    return ""


def _check_fields(table: dict[str, Any], where: str) -> None:
    fields = {name: field.type for name, field in Manifest.__dataclass_fields__.items()}
    if missing := sorted(fields.keys() - table.keys() - {"loss_scale"}):
        _refuse(where, f"it has no {missing[0]}")
    if unknown := sorted(table.keys() - fields.keys()):
        _refuse(where, f"it has {shown(unknown[0])}, which is not known")
    counts = ("step", "updates", "samples")
    valid = {
        **{name: _is_count(table[name]) for name in counts},
        **{name: isinstance(table[name], str) for name in ("mpishard", "dtype")},
        "configuration": isinstance(table["configuration"], dict),
        "files": isinstance(table["files"], dict) and all(map(_is_count, table["files"].values())),
        "digests": isinstance(table["digests"], dict) and all(map(_is_digest, table["digests"].values())),
        "tensors": isinstance(table["tensors"], list) and all(map(_is_tensor, table["tensors"])),
        "checksum": _is_sum(table["checksum"]),
        "loss_scale": "loss_scale" not in table or _is_scale(table["loss_scale"]),
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


def _is_scale(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"scale", "good"}
        and not scale_problem("scale", value["scale"])
        and _is_count(value["good"])
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_sum(value: object) -> bool:
    return isinstance(value, str) and _SUM.fullmatch(value) is not None


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _refuse(where: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{where}: is no manifest of a checkpoint ({problem}); take another checkpoint") from None
