"""Which checkpoints a run saves, and which it keeps."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpishard.checkpoint import complete, save
from mpishard.comm.together import on_rank_zero
from mpishard.models.gpt2 import Gpt2, public_config
from mpishard.shard.engine import Engine
from mpishard.train.sections import CheckpointConfig

__all__ = ["Keeper"]


class Keeper:
    """Saves the engine's state under names that order by step.

    Args:
        folder: where the checkpoints lie.
        config: when to save, and how many to keep.
        configuration: what the manifest says of the run.
        sizes: the model's, for the ``config.json`` by which other tools open the directory.
    """

    def __init__(
        self, engine: Engine, folder: Path, config: CheckpointConfig, configuration: Mapping[str, Any], sizes: Gpt2
    ) -> None:
        self.engine, self.folder, self.config = engine, folder, config
        self.configuration, self.sizes = configuration, sizes
        #: the last checkpoint, and the seconds that it took
        self.last: Path | None = None
        self.seconds = 0.0
        #: told that a checkpoint is being saved
        self.note: Callable[[bytes], None] | None = None

    def due(self, steps: int, *, stopped: bool, ended: bool) -> bool:
        """Return whether to save after ``steps`` steps."""
        every = self.config.every
        return stopped or (ended and self.config.final) or (every > 0 and steps % every == 0)

    def save(self) -> Path:
        """Save, then remove what is not to be kept. Collective.

        Raises:
            CheckpointError: on all ranks, when it cannot be written; earlier checkpoints are whole.
        """
        begin = time.perf_counter()
        if self.note is not None:
            self.note(b"Save")
        path = self.folder / f"step-{self.engine.steps:08d}"
        beside = {"config.json": json.dumps(public_config(self.sizes), indent=2) + "\n"}
        save(self.engine, path, configuration=self.configuration, beside=beside)
        on_rank_zero(self.engine.comm, self._remove_old)
        self.last, self.seconds = path, time.perf_counter() - begin
        return path

    def _remove_old(self) -> None:
        """Rename before removing, so that nobody finds a part of a checkpoint; the newest ones stay.

        What has another name than those given here, a copy of somebody's or a link, is left alone.
        """
        for path in self.folder.glob(".step-*.removed-*"):  # a run was killed while it removed
            shutil.rmtree(path)
        found = complete(self.folder)
        for path in found[: -self.config.keep] if self.config.keep else []:
            aside = path.with_name(f".{path.name}.removed-{secrets.token_hex(4)}")
            path.replace(aside)
            shutil.rmtree(aside)
