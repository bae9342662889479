"""Bus bandwidth over sizes as a picture: one panel for each operation and type, one curve for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpishard.bench.rows import Row
from mpishard.pictures import figure, save

__all__ = ["draw"]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: the file cannot be written.
    """
    panels = list(dict.fromkeys((row.op, row.dtype) for row in rows))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    drawn = figure(4.5 * columns, 3.6 * lines)
    for number, (op, dtype) in enumerate(panels):
        axes = drawn.add_subplot(lines, columns, number + 1)
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
    save(drawn, path)
