"""Bus bandwidth over sizes as a picture: one panel for each operation and type, one curve for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mpishard.bench.rows import Row
from mpishard.errors import ConfigError

__all__ = ["draw"]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: the file cannot be written.
    """
    panels = list(dict.fromkeys((row.op, row.dtype) for row in rows))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    # No pyplot: it chooses a window system and keeps every figure.
    figure = import_module("matplotlib.figure").Figure(figsize=(4.5 * columns, 3.6 * lines), layout="constrained")
    for number, (op, dtype) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1)
        chosen = [row for row in rows if (row.op, row.dtype) == (op, dtype)]
        for name in dict.fromkeys(row.name for row in chosen):
            curve = sorted((row.bytes, row.busbw_GBps) for row in chosen if row.name == name)
            axes.plot(*zip(*curve, strict=True), marker=".", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{op} {dtype}, {chosen[0].ranks} ranks", fontsize="medium")
        axes.set_xlabel("bytes of the whole message")
        axes.set_ylabel("busbw, GB/s")
        axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another with --plot") from None
