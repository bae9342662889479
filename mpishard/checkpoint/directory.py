"""Directories of checkpoints: which there are, and the small files of each, compared with its manifest."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mpishard.checkpoint.files import read_small
from mpishard.checkpoint.manifest import Manifest, digest_of
from mpishard.checkpoint.strict_json import shown
from mpishard.errors import CheckpointError

__all__ = ["MANIFEST", "complete", "manifest_bytes", "manifest_of", "newest", "read_beside", "read_manifest", "step_of"]

MANIFEST = "manifest.json"


def step_of(path: Path) -> int | None:
    """Return the number in a name ``step-<digits>``; None where the name is another."""
    match = re.fullmatch(r"step-([0-9]{1,18})", path.name)
    return int(match[1]) if match else None


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints ``step-<digits>`` in a folder by their numbers; none where there is no folder.

    Links and directories without a manifest are no checkpoints.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        named = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
        return [path for _, path in sorted(named) if not path.is_symlink() and (path / MANIFEST).is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}); choose a folder that can be") from None


def newest(folder: Path) -> Path | None:
    """Return the last of the :func:`complete` checkpoints in a folder; None where there is none.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    found = complete(folder)
    return found[-1] if found else None


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in the directory ``path``.

    Raises:
        CheckpointError: there is none, it is damaged, or the directory is named after another step.
    """
    return manifest_of(path, manifest_bytes(path))


def manifest_of(path: Path, content: bytes) -> Manifest:
    """Return the manifest of the directory ``path`` from what its file holds.

    Raises:
        CheckpointError: as in :func:`read_manifest`.
    """
    manifest = Manifest.parse(content, str(path / MANIFEST))
    if step_of(path) not in (None, manifest.step):
        raise CheckpointError(
            f"{path}: holds the state after {manifest.step} steps, not that of its name; "
            f"name it step-{manifest.step:08d} again"
        )
    return manifest


def manifest_bytes(path: Path) -> bytes:
    """Return what the manifest's file holds.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return read_small(path / MANIFEST)
    except OSError as error:
        raise CheckpointError(
            f"{path}: is no checkpoint ({MANIFEST} cannot be read: {error.strerror}); "
            "name a directory that a run has saved"
        ) from None


def read_beside(path: Path) -> bytes:
    """Return what a small file holds, such as a ``config.json``, compared with the manifest beside it.

    Where no manifest lies beside it, there is nothing to compare with: other tools' directories have none.

    Raises:
        CheckpointError: it cannot be read, is no regular file, or is not what was saved with the checkpoint.
    """
    try:
        content = read_small(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); look for its right name") from None
    if not os.path.lexists(path.parent / MANIFEST):
        return content
    digest = read_manifest(path.parent).digests.get(path.name)
    if digest is None:
        raise CheckpointError(
            f"{path}: was not saved with the checkpoint, and {MANIFEST} does not list it; save it with the tensors, "
            "or copy both into a directory without manifest"
        )
    if digest != (found := digest_of(content)):
        raise CheckpointError(
            f"{path}: is damaged or was changed (its digest is {found}, {MANIFEST} says {shown(digest)}); "
            "copy it again, or take another checkpoint"
        )
    return content
