"""``mpishard schedule``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpishard.cli.options import ConfiguredCommand, settings_options

if TYPE_CHECKING:
    from mpishard.nn.model import Model
    from mpishard.shard.instructions import Instruction
    from mpishard.shard.precision import Precision
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
        ConfigError: the ranks do not divide the micro-batches.
    """
    from mpishard.shard.engine import outline_of
    from mpishard.shard.instructions import Evaluate, Predict
    from mpishard.shard.precision import precision
    from mpishard.shard.schedule import Settings, build_forward, build_step
    from mpishard.shard.text import legend, lines
    from mpishard.train.config import check_ranks
    from mpishard.train.model import build_model
    from mpishard.train.sections import DTYPES

    check_ranks(config, ranks)
    shard, batch = config.shard, config.train
    micros = 1 if kind == "predict" else batch.global_batch // batch.micro_batch // ranks
    settings = Settings(shard.strategy, shard.prefetch, shard.recompute, micros)
    model = build_model(config.model)
    outline = outline_of(model)
    if kind == "step":
        listed = build_step(outline, settings)
    else:
        listed = build_forward(outline, settings, Evaluate if kind == "evaluate" else Predict)
    share = f"{_many(micros, 'micro-batch', 'es')} of {_many(batch.micro_batch, 'sequence')} a rank"
    types = precision(DTYPES[config.precision.compute])
    text = [
        f"{kind}: {shard.strategy}, prefetch {shard.prefetch}, recompute {shard.recompute}, "
        f"{config.precision.compute}, {_many(ranks, 'rank')}, "
        f"{share if kind != 'predict' else 'the same sequence on every rank'}",
        *_units(model, ranks, types),
        "",
        *lines(listed, every=every),
        "",
        *(f"{name:10} {meaning}" for name, meaning in legend(listed)),
        "",
        *_sums(listed, model, ranks, types),
    ]
    text.append("before the list, one record from every rank: that it begins this one too")
    if kind == "evaluate":
        text.append("after the list, one record from every rank: its loss")
    return text


def _units(model: Model, ranks: int, types: Precision) -> list[str]:
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
            f"{size(types.kind.itemsize * flat.total)} whole, {size(types.wide.itemsize * flat.shard)} a shard"
        )
        del units[:alike]
    return text


def _sums(listed: Sequence[Instruction], model: Model, ranks: int, types: Precision) -> list[str]:
    """Say what the list sends, and what it gathers at most."""
    from mpishard.comm.frames import FRAME_BYTES
    from mpishard.shard.instructions import Agree, Gather, Reduce, Replicate
    from mpishard.shard.layout import layout
    from mpishard.shard.text import most_gathered, sent
    from mpishard.train.display import size

    elements = {unit.name: layout(unit.specs, ranks).total for unit in model.units}
    sizes = {unit: types.kind.itemsize * count for unit, count in elements.items()}
    wide = {unit: types.wide.itemsize * count for unit, count in elements.items()}
    names = {Gather: "all-gather", Reduce: "reduce-scatter", Replicate: "all-gather of gradients", Agree: "record"}
    # What has been reduced is gathered in the type in which it is kept.
    found = sent(listed, sizes, ranks, FRAME_BYTES)
    found |= {kind: each for kind, each in sent(listed, wide, ranks, FRAME_BYTES).items() if kind is Replicate}
    text = [
        f"a rank sends {size(each.bytes)} ({each.bytes:,} bytes) in {_many(each.calls, names[kind])}"
        for kind, each in found.items()
    ]
    units, most = most_gathered(listed, sizes)
    shown = ", ".join(units) if len(units) <= 6 else f"{', '.join(units[:5])}, ... {units[-1]}"
    text.append(
        f"gathered at most at once: {shown}, {size(most)}" if units else "nothing is gathered: a rank holds every unit"
    )
    return text


def _many(count: int, name: str, plural: str = "s") -> str:
    first, space, rest = name.partition(" ")
    return f"{count:,} {first}{plural if count != 1 else ''}{space}{rest}"
