"""``mpishard plan``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from mpishard.cli.options import ConfiguredCommand, settings_options
from mpishard.errors import ConfigError

if TYPE_CHECKING:
    from mpishard.plan.report import Plan
    from mpishard.train.sections import Config

__all__ = ["Asked", "plan", "planned"]

#: numbers of ranks of a picture where one alone was asked for
_CURVE = tuple(2**n for n in range(11))
#: settings that follow from a number of parameters
_FOLLOW = ("model.layers", "model.width", "model.heads")


class Asked(NamedTuple):
    """What was asked for beside the settings; all as it was written."""

    params: str | None = None
    ranks: str = "8"
    strategy: str = ""
    device: str = ""
    device_memory: str = ""
    ranks_per_node: int = 8


@click.command(cls=ConfiguredCommand)
@settings_options
@click.option("--params", metavar="NUMBER", help="A number of parameters, as 175e9 or 7B, in place of a model.")
@click.option("--ranks", default="8", show_default=True, metavar="N[,N...]", help="Numbers of ranks.")
@click.option("--strategy", default="", metavar="S[,S...]", help="Strategies to compare; all by default.")
@click.option("--device", default="", metavar="NAME[,NAME...]", help="Kinds of device, as A100-40GB; all by default.")
@click.option("--device-memory", default="", metavar="SIZE", help="Any other kind of device by its memory, as 24GB.")
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="N",
    help="Ranks of a node, which hybrid_shard's groups are, or fewer that divide all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else; docs/planning.md describes it.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it too: .png, .svg or .pdf.")
def plan(
    config_file: Path | None,
    preset: str | None,
    overrides: Sequence[str],
    params: str | None,
    ranks: str,
    strategy: str,
    device: str,
    device_memory: str,
    ranks_per_node: int,
    as_json: bool,
    plot: Path | None,
) -> int:
    """Say what a job will take before it is queued: memory of a rank, devices, communication.

    Settings are those of mpishard train, or a number of parameters alone. Nothing is run, and no memory is taken for
    it.
    """
    from mpishard.launched import environment_rank, environment_size

    if plot is not None:
        from mpishard.pictures import check_picture

        check_picture(plot)
    asked = Asked(params, ranks, strategy, device, device_memory, ranks_per_node)
    found = planned(config_file, preset, overrides, asked, curves=plot is not None)
    if environment_rank() not in (None, 0):
        return 0
    if plot is not None:
        from mpishard.plan.picture import draw

        draw(found, plot)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return 0
    from mpishard.plan.tables import tables
    from mpishard.train.display import console

    screen = console(environment_size() is not None)
    for part in tables(found):
        screen.print(part, markup=False, soft_wrap=isinstance(part, str))
    if plot is not None:
        screen.print(f"plot: {plot}", markup=False, soft_wrap=True)
    return 0


def planned(
    config_file: Path | None, preset: str | None, overrides: Sequence[str], asked: Asked, *, curves: bool = False
) -> Plan:
    """Return the plan that ``mpishard plan`` prints.

    Args:
        curves: with the points of a picture's curves.

    Raises:
        ConfigError: something that was asked for cannot be.
    """
    from mpishard.optim.adamw import AdamW
    from mpishard.plan.devices import chosen
    from mpishard.plan.planner import Job, planned
    from mpishard.plan.quantities import memory, parameter_count, rank_counts
    from mpishard.plan.report import plan_job
    from mpishard.shard.precision import precision
    from mpishard.train.config import load
    from mpishard.train.model import build_model
    from mpishard.train.settings import settings_of, types_of

    counts = rank_counts(asked.ranks)
    strategies = planned(tuple(asked.strategy.split(",")) if asked.strategy else ())
    devices = chosen(asked.device.split(",") if asked.device else ())
    if asked.device_memory:
        name, size = memory(asked.device_memory)
        devices = {name: size} | devices
    parameters = 0
    assumed: dict[str, Any] = {}
    if asked.params is not None:
        if preset is not None or config_file is not None:
            other = "--preset" if preset is not None else "--config"
            raise ConfigError(f"--params and {other} were given, which both say how large the model is; leave one out")
        parameters = parameter_count(asked.params)
    alone = bool(parameters) and not any(each.partition("=")[0].strip() == "train.global_batch" for each in overrides)
    if parameters:
        overrides, assumed = _assume(parameters, overrides)
    config = load(config_file, preset, overrides)
    if config.comm.transport == "local" and max(counts) > 1:
        raise ConfigError(
            f"comm.transport is local, which is one rank alone, and --ranks is {asked.ranks}; leave it at auto, or "
            "plan --ranks 1"
        )
    if config.comm.transport == "node" and max(counts) > asked.ranks_per_node:
        raise ConfigError(
            f"comm.transport is node, which is one host, and --ranks is {asked.ranks} on nodes of "
            f"{asked.ranks_per_node}; leave it at auto, or say --ranks-per-node"
        )
    # Without a batch of its own a number of parameters is planned with one micro-batch a rank.
    batch = 0 if alone else config.train.global_batch
    job = Job(
        build_model(config.model, recompute_attention=config.shard.recompute == "attention"),
        settings_of(config, 1),
        precision(*types_of(config.precision)),
        micro_batch=config.train.micro_batch,
        global_batch=batch,
        node=asked.ranks_per_node,
        transport=config.comm.transport,
        algorithm=config.comm.algorithm,
        shares_gathered=config.comm.share_gathered and not config.debug.poison,
        on_device=config.device.kind == "cuda",
        states=AdamW.states,
        offload=config.shard.offload,
    )
    if assumed:
        assumed["parameters"] = job.model.parameters
    return plan_job(
        job,
        counts,
        strategies,
        devices,
        parameters=parameters,
        assumed=assumed,
        described=_described(config) | ({"global_batch": batch} if batch else {}),
        curve=() if not curves else counts if len(counts) > 1 else _CURVE,
    )


def _assume(parameters: int, overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return settings of a model of about so many parameters, under those given, and the sizes assumed."""
    from mpishard.plan.assume import SOURCE, assumed_sizes
    from mpishard.plan.planner import MOST_SAMPLES
    from mpishard.train.config import load

    given = {key.strip(): value for key, _, value in (override.partition("=") for override in overrides)}
    if follow := next((key for key in _FOLLOW if key in given), None):
        raise ConfigError(f"--params and {follow} were given, which both say how large the model is; leave one out")
    usual = assumed_sizes(parameters)
    micro_batch = given.get("train.micro_batch", "1").strip()
    if not (micro_batch.isascii() and micro_batch.isdecimal() and 1 <= int(micro_batch[:9]) <= MOST_SAMPLES):
        micro_batch = "1"  # what cannot be is refused with the others
    first = [f"model.sequence={usual.sequence}", f"model.vocabulary={usual.vocabulary}"]
    first += [f"train.micro_batch={micro_batch}", f"train.global_batch={micro_batch}"]
    model = load(None, None, [*first, *overrides]).model
    sizes = assumed_sizes(parameters, vocabulary=model.vocabulary, sequence=model.positions or model.sequence)
    first += [f"model.layers={sizes.layers}", f"model.width={sizes.width}", f"model.heads={sizes.heads}"]
    return [*first, *overrides], {
        "source": SOURCE,
        "layers": sizes.layers,
        "width": sizes.width,
        "heads": sizes.heads,
        "sequence": model.sequence,
        "vocabulary": model.vocabulary,
    }


def _described(config: Config) -> dict[str, Any]:
    shard, batch = config.shard, config.train
    found: dict[str, Any] = {"precision": config.precision.compute}
    if config.precision.reduce not in ("same", config.precision.compute):
        found["reduce"] = config.precision.reduce
    found |= {"recompute": shard.recompute, "prefetch": shard.prefetch, "accumulate": shard.accumulate}
    if shard.offload != "none":
        found["offload"] = shard.offload
    return found | {
        "micro_batch": batch.micro_batch,
        "sequence": config.model.sequence,
        "transport": config.comm.transport,
    }
