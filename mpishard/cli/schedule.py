"""``mpishard schedule``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpishard.cli.options import ConfiguredCommand, settings_options
from mpishard.errors import ConfigError

if TYPE_CHECKING:
    from mpishard.nn.model import Model
    from mpishard.shard.instructions import Instruction
    from mpishard.shard.precision import Precision
    from mpishard.shard.schedule import Settings
    from mpishard.train.sections import Config

__all__ = ["KINDS", "described", "schedule"]

#: what an engine runs: a training step, a held-out loss of one global batch, the predictions for one sequence
KINDS = ("step", "evaluate", "predict")


@click.command(cls=ConfiguredCommand)
@settings_options
@click.option(
    "--ranks", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Ranks of the run to be."
)
@click.option("--kind", type=click.Choice(KINDS), default="step", show_default=True, help="Which list to print.")
@click.option("--all", "every", is_flag=True, help="Print also micro-batches that repeat the one before.")
def schedule(
    config_file: Path | None, preset: str | None, overrides: Sequence[str], ranks: int, kind: str, every: bool
) -> int:
    """Print the list of instructions that each rank runs in a step.

    Settings are those of mpishard train. Nothing is run, and no memory is taken for it. Every rank runs the same list.
    """
    from mpishard.launched import environment_rank
    from mpishard.train.config import load

    config = load(config_file, preset, overrides)
    text = described(config, ranks, kind, every=every)
    if environment_rank() in (None, 0):
        click.echo("\n".join(text))
    return 0


def described(config: Config, ranks: int, kind: str = "step", *, every: bool = False) -> list[str]:
    """Return what ``mpishard schedule`` prints, line by line.

    Args:
        ranks: ranks of the run, which divide the micro-batches of a step.
        kind: one of ``KINDS``.
        every: also micro-batches that repeat the one before.

    Raises:
        ConfigError: the ranks do not divide the micro-batches, or the group the ranks.
    """
    from mpishard.shard.instructions import Evaluate, Predict
    from mpishard.shard.outline import outline_of, separated
    from mpishard.shard.precision import precision
    from mpishard.shard.schedule import build_forward, build_step
    from mpishard.shard.strategy import group_of
    from mpishard.shard.text import legend, lines
    from mpishard.train.config import check_ranks
    from mpishard.train.model import build_model
    from mpishard.train.settings import in_words, settings_of, types_of

    micros = check_ranks(config, ranks)
    micros = 1 if kind == "predict" else micros
    settings = settings_of(config, micros)
    if settings.hybrid and not settings.group:
        raise ConfigError("shard.group is 0, the ranks of a node, and no nodes are known here; set shard.group")
    group = group_of(settings, ranks, ranks)
    model = separated(build_model(config.model, recompute_attention=config.shard.recompute == "attention"))
    outline = outline_of(model)
    if kind == "step":
        listed = build_step(outline, settings)
    else:
        listed = build_forward(outline, settings, Evaluate if kind == "evaluate" else Predict)
    share = f"{_many(micros, 'micro-batch', 'es')} of {_many(config.train.micro_batch, 'sequence')} a rank"
    types = precision(*types_of(config.precision))
    text = [
        f"{kind}: {in_words(config, settings)}, {_many(ranks, 'rank')}, "
        f"{share if kind != 'predict' else 'the same sequence on every rank'}",
        *_units(model, ranks, group, types),
        "",
        *lines(listed, every=every),
        "",
        *(f"{name:10} {meaning}" for name, meaning in legend(listed)),
        "",
        *_sums(listed, model, settings, ranks, group, types),
    ]
    text.append("before the list, one record from every rank: that it begins this one too")
    if kind == "evaluate":
        text.append("after the list, one record from every rank: its loss")
    return text


def _units(model: Model, ranks: int, group: int, types: Precision) -> list[str]:
    """Say how large the units are when they are gathered, and a rank's shard; neighbours of one size share a line."""
    from mpishard.shard.layout import layout
    from mpishard.train.display import size

    text: list[str] = []
    units = list(model.units)
    while units:
        flat = layout(units[0].specs, ranks)
        alike = next((i for i, unit in enumerate(units) if unit.specs != units[0].specs), len(units))
        names = units[0].name if alike == 1 else f"{units[0].name} to {units[alike - 1].name}"
        count = sum(slot.size for slot in flat.slots)
        each = " each" if alike > 1 else ""
        text.append(
            f"{'unit' if alike == 1 else 'units'} {names}: {count:,} parameters{each}, "
            f"{size(types.kind.itemsize * flat.total)} whole, {size(types.wide.itemsize * flat.total // group)} a shard"
        )
        del units[:alike]
    return text


def _sums(
    listed: Sequence[Instruction], model: Model, settings: Settings, ranks: int, group: int, types: Precision
) -> list[str]:
    """Say what the list sends, and what it gathers at most."""
    from mpishard.comm.frames import FRAME_BYTES
    from mpishard.shard.instructions import Agree, AllReduce, Gather, Reduce, Replicate
    from mpishard.shard.layout import layout
    from mpishard.shard.text import most_gathered, sent
    from mpishard.train.display import size

    elements = {unit.name: layout(unit.specs, ranks).total for unit in model.units}
    # What travels, as what, and among how many; what has been reduced is gathered in the type in which it is kept.
    inside = f" inside its group of {group}" if group < ranks else ""
    kinds = {
        Gather: (f"all-gather{inside}", types.kind, group),
        Reduce: (f"reduce-scatter{inside}", types.wire, group),
        Replicate: ("all-gather of gradients", types.wide, ranks),
        Agree: ("record", types.wide, ranks),
    }
    text = []
    for kind in dict.fromkeys(type(step) for step in listed):
        if kind is AllReduce:
            # a reduce-scatter and an all-gather of the shard, each of 1/groups of it to each other group
            across = [elements[step.unit] // ranks for step in listed if isinstance(step, AllReduce)]
            calls, nbytes = len(across), sum(2 * types.wide.itemsize * each * (ranks // group - 1) for each in across)
            name = f"sum of shards across {_many(ranks // group, 'group')}"
        elif kind in kinds:
            name, dtype, among = kinds[kind]
            found = sent(listed, {unit: dtype.itemsize * count for unit, count in elements.items()}, among, FRAME_BYTES)
            calls, nbytes = found[kind].calls, found[kind].bytes
        else:
            continue
        text.append(f"a rank sends {size(nbytes)} ({nbytes:,} bytes) in {_many(calls, name)}")
    units, most = most_gathered(listed, {unit: types.kind.itemsize * count for unit, count in elements.items()})
    shown = ", ".join(units) if len(units) <= 6 else f"{', '.join(units[:5])}, ... {units[-1]}"
    text.append(
        f"nothing is gathered{' into a buffer' if units else ''}: a rank holds every unit"
        if settings.resident
        else f"gathered at most at once: {shown}, {size(most)}"
    )
    return text


def _many(count: int, name: str, plural: str = "s") -> str:
    first, space, rest = name.partition(" ")
    return f"{count:,} {first}{plural if count != 1 else ''}{space}{rest}"
