"""Going on with a run from one of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpishard.checkpoint import Manifest, newest, read_manifest
from mpishard.data.loader import Batches
from mpishard.errors import CheckpointError, ConfigError
from mpishard.train.config import sections, toml_value
from mpishard.train.directory import checkpoints, holder
from mpishard.train.sections import Config

__all__ = ["Resumed"]

#: settings of a run that cannot be others when it goes on, and why; shapes are compared with the checkpoint's tensors
_FIXED = {
    "train": {"seed": "which orders the data", "global_batch": "which orders the data"},
    "model": {
        "heads": "without which its weights are another model",
        "gelu": "without which its weights are another model",
    },
}


class Resumed:
    """A checkpoint from which a run goes on.

    Attributes:
        path: its directory.
        run: the run directory that holds it; None where it lies elsewhere.
        manifest: what it says.
        settings: of the run that saved it, as :func:`~mpishard.train.config.load` takes them.

    Raises:
        CheckpointError: it was not saved by a run of the program.
    """

    @classmethod
    def find(cls, path: Path) -> Resumed:
        """Return a checkpoint, or the newest one of a run directory.

        Raises:
            CheckpointError: there is none.
        """
        if not checkpoints(path).is_dir():
            if path.is_symlink() or path.name in ("", ".."):
                path = path.resolve()  # under its own name, by which checkpoints are ordered
            return cls(path, holder(path), read_manifest(path))
        found = newest(checkpoints(path))
        if found is None:
            raise CheckpointError(f"{path}: holds no complete checkpoint; begin a new run in another directory")
        return cls(found, path, read_manifest(found))

    def __init__(self, path: Path, run: Path | None, manifest: Manifest) -> None:
        self.path, self.run, self.manifest = path, run, manifest
        found = manifest.configuration.get("settings")
        sections = found if isinstance(found, Mapping) else {}
        for section, keys in _FIXED.items():
            if not isinstance(table := sections.get(section), Mapping) or not set(keys) <= table.keys():
                raise CheckpointError(
                    f"{path}: holds no settings of a run (it was saved by a program of its own); use --init-from {path}"
                )
        self.settings: Mapping[str, Any] = sections

    def changes(self, config: Config) -> list[str]:
        """Return the settings that are not those of the run that saved, as ``key = value (was value)``."""
        return [
            f"{section}.{key} = {toml_value(value)} (was {toml_value(self._was(section, key))})"
            for section, entries in config.model_dump().items()
            for key, value in entries.items()
            if self.changed(config, section, key)
        ]

    def changed(self, config: Config, section: str, key: str) -> bool:
        """Return whether a setting is not that of the run that saved."""
        return bool(self._was(section, key) != getattr(getattr(config, section), key))

    def _was(self, section: str, key: str) -> Any:
        """Return a setting of the run that saved; its default, where a version saved that did not know it."""
        default = sections()[section].model_fields[key].default
        return self.settings.get(section, {}).get(key, default)

    def check(self, config: Config, training: Batches) -> None:
        """Check that it is the same model, and that it sees the data that it has not seen yet, in the same order.

        Raises:
            ConfigError: another seed, global batch, training file, number of heads or form of GELU was given.
        """
        for section, keys in _FIXED.items():
            for key, reason in keys.items():
                was, now = self.settings[section][key], getattr(getattr(config, section), key)
                if was != now:
                    raise ConfigError(
                        f"{section}.{key} is {now} and the checkpoint {self.path} was made with {was}, {reason}; "
                        f"leave it out, or begin a new run with --init-from {self.path}"
                    )
        was, now = self.manifest.configuration.get("training_file"), training.file.identity.hex()
        if was != now:
            raise ConfigError(
                f"{training.file.path}: is not the training file of the checkpoint {self.path}; name that file in "
                f"data.train, or begin a new run with --init-from {self.path}"
            )
        if self.manifest.step >= config.train.steps:
            raise ConfigError(
                f"{self.path}: has done {self.manifest.step} steps and train.steps is {config.train.steps}, so nothing "
                "is left to do; set train.steps higher"
            )
