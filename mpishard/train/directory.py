"""The run directory: its resolved configuration, one JSON object a step, checkpoints and the final report.

::

    config.toml                every setting as resolved
    metrics.jsonl              one JSON object a step
    report.json                written when the run has ended, and only then
    stopped                    a signal has ended the run before its end; says how to go on
    checkpoints/step-00000100  the state after 100 steps
    ranks/                     each rank's signs of life (docs/cluster.md)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mpishard.errors import ConfigError

__all__ = ["RunDirectory", "checkpoints", "holder"]

_CONFIG, _METRICS, _REPORT, _STOPPED, _LOCK = "config.toml", "metrics.jsonl", "report.json", "stopped", ".lock"


def checkpoints(run: Path) -> Path:
    """Return where the checkpoints of a run lie."""
    return run / "checkpoints"


def holder(checkpoint: Path) -> Path | None:
    """Return the run directory that holds a checkpoint; None where it lies in no run directory."""
    run = checkpoint.resolve().parent.parent
    inside = checkpoint.resolve().parent == checkpoints(run) and (run / _CONFIG).exists()
    return run if inside else None


class RunDirectory:
    """Writes a run's files; used by rank 0 alone.

    Args:
        config: the settings, as TOML.
        goes_on: steps done by the run in this directory that goes on; None for a new run.

    Raises:
        ConfigError: the directory holds a run already, or another process writes in it.
    """

    def __init__(self, path: Path, config: str, goes_on: int | None = None) -> None:
        self.path = path
        if goes_on is None:
            self.refuse(path)
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(path)
        try:
            if goes_on is None:
                self.refuse(path)  # another run may have begun since
            else:
                self._go_back_to(goes_on)
            _replace(path / _CONFIG, config)
            self._file = self._open()
        except BaseException:
            self._lock.close()
            raise

    @staticmethod
    def refuse(path: Path) -> None:
        """Raise a ConfigError where ``path`` holds a run already; change nothing."""
        for name in (_CONFIG, _METRICS, _REPORT):
            if (path / name).exists():
                raise ConfigError(
                    f"{path} already holds a run ({name}); choose another --run-dir, or go on with it by "
                    f"--resume {path}; nothing was changed"
                )

    def _go_back_to(self, steps: int) -> None:
        """Leave what the first ``steps`` steps wrote; a report of a run that now goes on is kept under its steps."""
        kept = [json.dumps(record) + "\n" for record in self.history() if record["step"] < steps]
        _replace(self.path / _METRICS, "".join(kept))
        report = self.path / _REPORT
        if report.exists():
            report.replace(self.path / f"report-{steps:08d}.json")
        (self.path / _STOPPED).unlink(missing_ok=True)

    def _open(self) -> TextIO:
        return (self.path / _METRICS).open("a", encoding="utf-8", buffering=1)

    def amend(self, key: str, value: float) -> None:
        """Add a measurement to the record of the last step."""
        records = list(self.history())
        records[-1][key] = value
        self._file.close()
        _replace(self.path / _METRICS, "".join(json.dumps(_plain(record)) + "\n" for record in records))
        self._file = self._open()

    def history(self) -> Iterator[dict[str, Any]]:
        """Yield the records of the steps so far; one that a crash cut short ends them."""
        try:
            lines = (self.path / _METRICS).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return
        with contextlib.suppress(ValueError):
            for line in lines:
                yield json.loads(line)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._lock.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append one step's record as a line."""
        self._file.write(json.dumps(_plain(record)) + "\n")

    def report(self, record: dict[str, Any]) -> None:
        """Write the final report."""
        _replace(self.path / _REPORT, json.dumps(_plain(record), indent=2) + "\n")

    def stopped(self, text: str) -> None:
        """Note that the run has ended before its end, and how to go on; batch scripts look for this file."""
        _replace(self.path / _STOPPED, text + "\n")


def _locked(path: Path) -> TextIO:
    """Return a file that is locked until it is closed or the process ends."""
    file = (path / _LOCK).open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{path} is being used by another run; wait for its end, or choose another --run-dir"
        ) from None
    except OSError as error:
        print(
            f"mpishard: warning: {path}: has no file locks ({error.strerror}); a second run in it would go unnoticed",
            file=sys.stderr,
            flush=True,
        )
    return file


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    new = path.with_name(f".{path.name}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
