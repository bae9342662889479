"""What ``mpishard train --memory-report`` says: a step's memory as predicted, as measured, and by the 16P formula."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table

from mpishard.array.arena import CATEGORIES
from mpishard.comm.alone import AloneCommunicator
from mpishard.errors import ConfigError
from mpishard.plan.picture import COLOURS
from mpishard.plan.quantities import readable
from mpishard.plan.state import model_state
from mpishard.shard.engine import Engine
from mpishard.shard.forecast import Forecast
from mpishard.shard.memory import Moment

__all__ = ["PHASES", "RankReport", "check_drawing", "draw_step", "phases", "report_tables", "reports", "write_report"]

PHASES = ("forward", "loss", "backward", "update")
#: the instructions with which a phase begins; others belong to the phase in which they run
_BEGIN = {
    "Forward": "forward",
    "Loss": "loss",
    "Recompute": "backward",
    "Backward": "backward",
    "Agree": "update",
    "Update": "update",
}
#: what a rank has at most at once: in the whole step, and in each phase
_ROWS = ("held", "peak", *PHASES)
_RECORD = struct.Struct(f"<{2 * len(_ROWS) * len(CATEGORIES)}q")
_SHOWN = 4


@dataclass(frozen=True)
class RankReport:
    """One rank's bytes by category: ``held`` all the time, at the ``peak`` of use, and at the peak of each phase."""

    rank: int
    predicted: Mapping[str, Mapping[str, int]]
    measured: Mapping[str, Mapping[str, int]]

    @property
    def exact(self) -> bool:
        """Whether both are the same, to the byte."""
        return self.predicted == self.measured


def phases(moments: Iterable[Moment]) -> dict[str, Moment]:
    """Return the fullest moment of each phase of a step, the first of several."""
    found: dict[str, Moment] = {}
    phase = PHASES[0]
    for moment in moments:
        phase = _BEGIN.get(moment.name.partition("(")[0], phase)
        if phase not in found or moment.total > found[phase].total:
            found[phase] = moment
    return found


def check_drawing() -> None:
    """Check that a report can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--memory-report needs matplotlib, which is not installed; pip install 'mpishard[plot]'")


def reports(engine: Engine, plan: Forecast) -> list[RankReport]:
    """Return every rank's, on every rank; of a rank that plays one of a large job alone, its own. Collective.

    Args:
        engine: with a ledger, and a training step behind it.
        plan: of this rank.
    """
    moments = engine.ledger.moments if engine.ledger is not None else ()
    mine = _rows(plan.held, plan.moments), _rows(engine.memory(), moments)
    record = _RECORD.pack(*(nbytes for rows in mine for row in rows for nbytes in row))
    found = []
    for rank, answer in enumerate(engine.comm.exchange(record, "the memory report")):
        if engine.comm.transport == AloneCommunicator.transport and rank != engine.comm.rank:
            continue
        numbers = iter(_RECORD.unpack(answer))
        both = ({row: {name: next(numbers) for name in CATEGORIES} for row in _ROWS} for _ in range(2))
        found.append(RankReport(rank, *both))
    return found


def _rows(held: Mapping[str, int], moments: Sequence[Moment]) -> list[list[int]]:
    parts = phases(moments)
    peak = max(moments, key=lambda moment: moment.total, default=Moment("", {}))
    rows = [held, peak.bytes, *(parts[name].bytes if name in parts else {} for name in PHASES)]
    return [[row.get(name, 0) for name in CATEGORIES] for row in rows]


def report_tables(found: Sequence[RankReport], engine: Engine) -> Iterator[Table | str]:
    """Yield the tables and lines that people read."""
    yield from (_categories(found, engine), _phases(found))
    wrong = [each.rank for each in found if not each.exact]
    many = f"{len(found)} ranks" if len(found) > 1 else f"rank {found[0].rank}"
    if wrong:
        yield f"predicted and measured differ on rank {', '.join(map(str, wrong[:8]))}: see memory.json"
    else:
        yield f"predicted = measured, to the byte, in every category and phase, on {many}"


def _categories(found: Sequence[RankReport], engine: Engine) -> Table:
    settings, types = engine.settings, engine.types
    whole = model_state(engine.model.parameters, mixed=types.mixed)
    del whole["total"]
    share = dict.fromkeys(whole, 1 if settings.replicated else engine.world.group)
    if settings.resident:
        share["parameters"] = 1
    first = found[0]
    columns: dict[str, Mapping[str, int]] = {
        "16P": whole,
        "16P as sharded": {name: -(-nbytes // share[name]) for name, nbytes in whole.items()},
        "planned": first.predicted["held"],
        "held": first.measured["held"],
        "peak, predicted": first.predicted["peak"],
    }
    columns |= {f"measured, rank {each.rank}": each.measured["peak"] for each in found[:_SHOWN]}
    if len(found) > _SHOWN:
        peaks = [each.measured["peak"] for each in found]
        columns[f"most of {len(found)}"] = max(peaks, key=lambda row: sum(row.values()))
    table = Table(title=f"Memory of a rank ({settings.strategy})", title_justify="left")
    table.add_column("category")
    for name in columns:
        table.add_column(name, justify="right")
    for name in CATEGORIES:
        cells = [column.get(name, 0) for column in columns.values()]
        if any(cells):
            table.add_row(name, *(readable(nbytes) if nbytes else "-" for nbytes in cells))
    table.add_section()
    table.add_row("total", *(readable(sum(column.values())) for column in columns.values()))
    return table


def _phases(found: Sequence[RankReport]) -> Table:
    table = Table(title="In use at the fullest moment of each phase", title_justify="left")
    table.add_column("phase")
    table.add_column("predicted", justify="right")
    for each in found[:_SHOWN]:
        table.add_column(f"measured, rank {each.rank}", justify="right")
    table.add_column(f"of it, on rank {found[0].rank}")
    for phase in PHASES:
        row = found[0].measured[phase]
        parts = sorted(((nbytes, name) for name, nbytes in row.items() if nbytes), reverse=True)[:4]
        table.add_row(
            phase,
            readable(sum(found[0].predicted[phase].values())),
            *(readable(sum(each.measured[phase].values())) for each in found[:_SHOWN]),
            ", ".join(f"{name} {readable(nbytes)}" for nbytes, name in parts),
        )
    return table


def write_report(folder: Path | None, engine: Engine, plan: Forecast) -> list[Table | str]:
    """Write ``memory.json`` and ``memory.png`` into the folder, and return what is to be printed. Collective.

    Args:
        folder: rank 0's; None on the others, which return nothing.

    Raises:
        OSError: they cannot be written.
    """
    found = reports(engine, plan)
    if folder is None:
        return []
    moments = engine.ledger.moments if engine.ledger is not None else ()
    state = model_state(engine.model.parameters, mixed=engine.types.mixed)
    record = {
        "model_state_bytes": state,
        "ranks": [asdict(each) for each in found],
        "moments": [{"instruction": moment.name, **moment.bytes} for moment in moments],
    }
    (folder / "memory.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    draw_step(moments, folder / "memory.png", f"rank {found[0].rank} of {engine.comm.size}, {engine.settings.strategy}")
    return [*report_tables(found, engine), f"written: {folder / 'memory.json'}, {folder / 'memory.png'}"]


def draw_step(moments: Sequence[Moment], path: Path, title: str) -> None:
    """Draw the memory in use over the instructions of a step, category upon category, and mark the peak."""
    # No pyplot: it chooses a window system and keeps every figure.
    figure = import_module("matplotlib.figure").Figure(figsize=(11.0, 5.0), layout="constrained")
    axes = figure.subplots()
    names = [name for name in COLOURS if any(moment.bytes[name] for moment in moments)]
    heights = [[moment.bytes[name] / 1e9 for moment in moments] for name in names]
    axes.stackplot(
        range(len(moments)), heights, labels=names, colors=[COLOURS[name] for name in names], step="mid", linewidth=0
    )
    totals = [moment.total for moment in moments]
    if totals:
        at = totals.index(max(totals))
        axes.plot([at], [totals[at] / 1e9], marker="v", color="black")
        axes.annotate(
            f"peak {readable(totals[at])}\n{moments[at].name}",
            (at, totals[at] / 1e9),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            size=8,
        )
        axes.set_ylim(0, max(totals) / 1e9 * 1.15)
        axes.set_xlim(0, max(1, len(moments) - 1))
    begins: dict[str, int] = {}
    for i, moment in enumerate(moments):
        phase = _BEGIN.get(moment.name.partition("(")[0])
        if phase is not None:
            begins.setdefault(phase, i)
    ends = [*list(begins.values())[1:], len(moments)]
    # A phase of a few instructions has no room for its name.
    named = {at: f"{phase} →" for (phase, at), end in zip(begins.items(), ends) if end - at > len(moments) / 12}
    axes.set_xticks(list(named), list(named.values()), ha="left")
    axes.set_ylabel("GB in use")
    axes.set_title(title)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.savefig(path, dpi=120)
