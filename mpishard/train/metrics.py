"""The run directory: its resolved configuration, one JSON object a step, and the final report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from mpishard.errors import ConfigError

__all__ = ["RunDirectory"]

_CONFIG, _METRICS, _REPORT = "config.toml", "metrics.jsonl", "report.json"


class RunDirectory:
    """Writes a run's files; used by rank 0 alone.

    Raises:
        ConfigError: the directory holds a run already.
    """

    def __init__(self, path: Path, config: str) -> None:
        self.path = path
        self.refuse(path)
        path.mkdir(parents=True, exist_ok=True)
        # "x": of two runs that begin at once in one directory, one is refused.
        try:
            file = (path / _CONFIG).open("x", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"{path} is being used by another run; choose another --run-dir") from None
        try:
            with file:
                file.write(config)
        except OSError:
            (path / _CONFIG).unlink()  # else the directory would seem to hold a run
            raise
        self._file = (path / _METRICS).open("x", encoding="utf-8", buffering=1)

    @staticmethod
    def refuse(path: Path) -> None:
        """Raise a ConfigError where ``path`` holds a run already; change nothing."""
        for name in (_CONFIG, _METRICS, _REPORT):
            if (path / name).exists():
                raise ConfigError(f"{path} already holds a run ({name}); choose another --run-dir, nothing was changed")

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append one step's record as a line."""
        self._file.write(json.dumps(_plain(record)) + "\n")

    def report(self, record: dict[str, Any]) -> None:
        """Write the final report."""
        (self.path / _REPORT).write_text(json.dumps(_plain(record), indent=2) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
