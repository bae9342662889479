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

__all__ = ["RunDirectory", "checkpoints", "holder", "locked"]

_CONFIG, _METRICS, _REPORT, _STOPPED, _LOCK = "config.toml", "metrics.jsonl", "report.json", "stopped", ".lock"
_MANIFEST = "manifest.json"


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
        lock: from :func:`locked`, where it is held already.

    Raises:
        ConfigError: the directory holds a run already, or another process writes in it.
    """

    def __init__(self, path: Path, config: str, goes_on: int | None = None, lock: TextIO | None = None) -> None:
        self.path = path
        if goes_on is None:
            self.refuse(path)
        path.mkdir(parents=True, exist_ok=True)
        self._lock = lock or locked(path)
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
        if (path / _MANIFEST).exists():
            raise ConfigError(f"{path} is a checkpoint; choose another --run-dir, nothing was changed")
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
            report.replace(_unused(self.path, f"report-{self._reported(report):08d}"))
        (self.path / _STOPPED).unlink(missing_ok=True)

    @staticmethod
    def _reported(report: Path) -> int:
        """Return the steps that a report is of; 0 where it does not say."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(report.read_text(encoding="utf-8"))["steps"])
        return 0

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
        """Yield the records of the steps so far, but for a last one that a crash cut short.

        Raises:
            ConfigError: another line is no record of a step.
        """
        path = self.path / _METRICS
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return
        for number, line in enumerate(lines, 1):
            record = _record(line)
            if record is not None:
                yield record
            elif number < len(lines):
                raise ConfigError(f"{path}: line {number} is no record of a step; mend that line or remove it")

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


def locked(path: Path) -> TextIO:
    """Return a file in a run directory that is locked until it is closed or the process ends.

    Raises:
        ConfigError: another process holds the lock.
    """
    if (path / _LOCK).exists() and not (path / _LOCK).is_file():  # opening a pipe would wait for its other end
        raise ConfigError(f"{path / _LOCK}: is no regular file; remove it")
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


def _record(line: str) -> dict[str, Any] | None:
    """Return a step's record, or None where the line is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or "loss" not in record:
        return None
    numbers = (record["loss"], record.get("heldout_loss"))
    return record if all(value is None or isinstance(value, int | float) for value in numbers) else None


def _unused(folder: Path, stem: str) -> Path:
    """Return a name for a JSON file that is not taken."""
    path, number = folder / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.json"
    return path


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
