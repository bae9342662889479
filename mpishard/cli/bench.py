"""``mpishard bench``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpishard.cli.options import ConfiguredCommand, device_option, settings_options
from mpishard.errors import ConfigError

if TYPE_CHECKING:
    from mpishard.bench.collectives import Ask
    from mpishard.bench.variants import Variant
    from mpishard.comm.base import Communicator
    from mpishard.comm.library_calls import LibraryCalls
    from mpishard.train.sections import Config

__all__ = ["bench", "collectives", "opened", "several", "step"]

_json_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write it there as JSON too."
)
_share_option = click.option("--share-device", is_flag=True, help="Let ranks share a GPU, for a test.")


@click.group()
def bench() -> None:
    """Measure collectives, or whole steps, over several transports in one job; docs/benchmarks.md."""


@bench.command()
@click.option(
    "--transports",
    metavar="T[:A][,T...]",
    help="Transports, each with an algorithm or not: mpi,node,node:shared on a CPU, staged,nccl on GPUs by default.",
)
@click.option(
    "--ops", default="all_gather,reduce_scatter,all_reduce", show_default=True, metavar="OP[,OP...]", help="Operations."
)
@click.option("--algorithms", metavar="A[,A...]", help="Algorithms of mpi: auto,native by default.")
@click.option("--dtypes", default="fp32,bf16", show_default=True, metavar="D[,D...]", help="Element types.")
@click.option("--min", "least", default="4KiB", show_default=True, metavar="SIZE", help="The smallest message.")
@click.option("--max", "most", default="64MiB", show_default=True, metavar="SIZE", help="The largest message.")
@click.option("--factor", type=int, default=4, show_default=True, metavar="N", help="From one size to the next.")
@click.option("--baseline", metavar="T[:A]", help="What the others are compared with: mpi:native, or the first one.")
@click.option("--seconds", type=float, default=0.5, show_default=True, metavar="S", help="Of samples for each row.")
@_json_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it too: .png, .svg or .pdf.")
@device_option
@_share_option
def collectives(
    transports: str | None,
    ops: str,
    algorithms: str | None,
    dtypes: str,
    least: str,
    most: str,
    factor: int,
    baseline: str | None,
    seconds: float,
    json_file: Path | None,
    plot: Path | None,
    device: str | None,
    share_device: bool,
) -> int:
    """Time collectives of all sizes, and check every result.

    Run it with a launcher: mpiexec -n 2 mpishard bench collectives. The exit code is 1 where a result was wrong.
    """
    from mpishard.bench.collectives import Ask
    from mpishard.bench.sizes import nbytes, sweep
    from mpishard.bench.statistics import OPS
    from mpishard.bench.variants import DTYPE_NAMES, asked, listed, parse_baseline

    if plot is not None:
        from mpishard.pictures import check_picture

        check_picture(plot)
    if not 0.001 <= seconds <= 3600:
        raise ConfigError(f"--seconds is {seconds:g}; it is the time of a row's samples, 0.001 to 3600")
    wanted = listed("--ops", ops, OPS)
    kinds = listed("--dtypes", dtypes, tuple(DTYPE_NAMES))
    sizes = sweep(nbytes("--min", least), nbytes("--max", most), factor)
    named = asked(transports if transports is not None else "mpi", algorithms)
    reference = parse_baseline(baseline) if baseline is not None else None
    several("bench collectives")
    lines = [f"{name} = {value}" for name, value in click.get_current_context().params.items()]
    with _job(device, share_device, lines, json_file) as (comm, calls):
        variants = named if transports is not None else asked(_usual(comm), algorithms)
        chosen = reference or next((v for v in variants if v.native), variants[0])
        if chosen not in variants:
            variants = (chosen, *variants)
        ask = Ask(wanted, kinds, sizes, variants, chosen, seconds)
        return _collectives(comm, calls, ask, json_file, plot, share_device)


def several(command: str) -> None:
    """Refuse one process alone.

    Raises:
        ConfigError: the launcher has started no other one.
    """
    from mpishard.launched import environment_size

    if environment_size() in (None, 1):
        raise ConfigError(
            f"{command} is for 2 ranks or more, and this is one alone; start it with: mpiexec -n 2 mpishard {command}"
        )


@contextmanager
def _job(
    device: str | None, share: bool, lines: Sequence[str], json_file: Path | None, *, tf32: bool = False
) -> Iterator[tuple[Communicator, LibraryCalls]]:
    """Meet the other ranks, who must have been asked for the same."""
    from mpishard.cli.job import ending_all, start
    from mpishard.comm.together import on_rank_zero, same_on_all_ranks

    comm = start("auto", device or "auto", share=share, tf32=tf32)
    with ending_all(comm):
        if comm.size == 1:
            raise ConfigError("one rank has nobody to send to; start 2 or more: mpiexec -n 2 mpishard bench")
        same_on_all_ranks(comm, lines)
        on_rank_zero(comm, lambda: _check_file(json_file))
        from mpishard.comm.library_calls import LibraryCalls

        calls = LibraryCalls()
        yield comm, calls
        calls.close()
    comm.close()


def _check_file(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "is a folder" if path.is_dir() else f"cannot be written, there is no folder {path.parent}"
        raise ConfigError(f"{path}: {what}; choose another with --json")


def _usual(comm: Communicator) -> str:
    """Return the transports that are measured where none are named."""
    if comm.on_device:
        return "staged,nccl"
    return "mpi,node,node:shared" if comm.node.count == 1 else "mpi"


@contextmanager
def opened(
    comm: Communicator, calls: LibraryCalls, variants: Sequence[Variant], share: bool
) -> Iterator[dict[Variant, Communicator]]:
    """Connect each variant; the MPI library's own uses the buffers of its transport. Collective.

    Raises:
        ConfigError: on all ranks, where one of them is not possible here.
    """
    made: dict[Variant, Communicator] = {}
    for variant in variants:
        algorithm = "auto" if variant.native or variant.shared else variant.algorithm
        made[variant] = calls.connect(comm.ops, variant.transport, algorithm, share_device=share)
    yield made
    for one in made.values():
        one.close()


def _collectives(
    comm: Communicator, calls: LibraryCalls, ask: Ask, json_file: Path | None, plot: Path | None, share: bool
) -> int:
    from mpishard.bench.collectives import Sweep
    from mpishard.bench.host import described
    from mpishard.bench.rows import document
    from mpishard.bench.tables import collective_table, fit_table
    from mpishard.comm.together import on_rank_zero, together
    from mpishard.train.display import console

    out = console(launched=True)
    with opened(comm, calls, ask.variants, share) as comms:
        sweep = Sweep(ask, comms, calls, calls)
        together(comm, lambda: sweep.check_room(comm.node.local_size))
        host = described(comm, calls.name, {variant.name: one for variant, one in comms.items()})
        host["transports"] |= {v.name: f"{calls.name}'s own calls, which claim no bits" for v in comms if v.native}
        if comm.rank == 0:
            for name, line in host["transports"].items():
                click.echo(f"{name}: {line}")
        rows = sweep.run(lambda rows: out.print(collective_table(rows, ask.baseline.name)) if not comm.rank else None)
    found = document(host, rows, sweep.notes)
    if comm.rank == 0:
        if found["fits"]:
            out.print(fit_table(found["fits"]))
        for note in sweep.notes:
            click.echo(note)
    on_rank_zero(comm, lambda: _write(found, json_file))
    if plot is not None:
        from mpishard.bench.picture import draw

        on_rank_zero(comm, lambda: draw(rows, plot))
        if comm.rank == 0:
            click.echo(f"plot: {plot}")
    wrong = [row for row in rows if not row.correct]
    if wrong and comm.rank == 0:
        click.echo(f"mpishard: {len(wrong)} of {len(rows)} rows are WRONG: do not trust this transport", err=True)
    return int(bool(wrong))


def _write(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@bench.command(cls=ConfiguredCommand)
@settings_options
@click.option("--transports", metavar="T[:A][,T...]", help="As in bench collectives: mpi,node by default on a CPU.")
@click.option("--steps", type=int, default=10, show_default=True, metavar="N", help="Steps of each that count.")
@_json_option
@device_option
@_share_option
def step(
    config_file: Path | None,
    preset: str | None,
    overrides: Sequence[str],
    transports: str | None,
    steps: int,
    json_file: Path | None,
    device: str | None,
    share_device: bool,
) -> int:
    """Time a training step over several transports in turn, and compare the bits of its losses.

    Run it with a launcher: mpiexec -n 2 mpishard bench step --preset tiny. Settings are those of mpishard train; tokens
    are random. The exit code is 1 where two transports gave other bits.
    """
    from mpishard.bench.variants import asked
    from mpishard.cli.train import settings_text
    from mpishard.train.config import load

    if not 1 <= steps <= 10_000:
        raise ConfigError(f"--steps is {steps}; it must be 1 to 10000")
    named = asked(transports if transports is not None else "mpi", usual=("auto",))
    if native := next((variant for variant in named if variant.native), None):
        raise ConfigError(f"--transports: {native.name} claims no bits and trains nothing; leave it out")
    if shared := next((variant for variant in named if variant.shared), None):
        raise ConfigError(f"--transports: {shared.name} is an all-gather, which training over node has; name node")
    if ring := next((variant for variant in named if not variant.ordered), None):
        raise ConfigError(f"--transports: {ring.name} adds up in an order of its own, so bits differ; leave it out")
    config = load(config_file, preset, [*overrides, *([f"device.kind={device}"] if device else [])])
    for key, value in (("transport", config.comm.transport), ("algorithm", config.comm.algorithm)):
        if value != "auto":
            raise ConfigError(f"comm.{key} is {value}, and bench step has --transports for it; leave it at auto")
    for name in dict.fromkeys(variant.transport for variant in named):  # each is a training of its own
        load(config_file, preset, [*overrides, f"comm.transport={name}"])
    several("bench step")
    lines = [*settings_text(config), f"--steps = {steps}", f"--transports = {transports}"]
    share = share_device or config.device.share
    with _job(config.device.kind, share, lines, json_file, tf32=config.precision.tf32) as (comm, calls):
        usual = [variant for variant in asked(_usual(comm), usual=("auto",)) if not variant.shared]
        variants = named if transports is not None else usual
        return _steps(comm, calls, config, variants, steps, json_file, share)


def _steps(
    comm: Communicator,
    calls: LibraryCalls,
    config: Config,
    variants: Sequence[Variant],
    steps: int,
    json_file: Path | None,
    share: bool,
) -> int:
    from mpishard.bench.host import described
    from mpishard.bench.silent import SilentCommunicator
    from mpishard.bench.steps import Steps, document
    from mpishard.bench.tables import step_table
    from mpishard.cli.train import settings_text
    from mpishard.comm.together import on_rank_zero, together
    from mpishard.train.config import check_ranks
    from mpishard.train.display import console
    from mpishard.train.prepare import make_engine, prepare
    from mpishard.train.room import check_room

    check_ranks(config, comm.size)
    with opened(comm, calls, variants, share) as comms:
        prepared = {variant: prepare(config, one) for variant, one in comms.items()}
        silent = SilentCommunicator(comms[variants[0]], comm.ops)
        without = prepare(config, silent, alone=True)
        parts = [*prepared.values(), without]
        held, pinned = sum(part.held for part in parts), sum(part.forecast.host for part in parts)
        together(comm, lambda: check_room(held, comm.node.local_size, comm.ops, pinned))
        engines = {(v.transport, v.algorithm): make_engine(config, one, prepared[v]) for v, one in comms.items()}
        quiet = make_engine(config, silent, without)
        host = described(comm, calls.name, {variant.name: one for variant, one in comms.items()})
        seed, vocabulary = config.train.seed, config.model.vocabulary
        found, rows = Steps(engines, quiet, calls, steps, seed, vocabulary, config.optim.lr).run()
        for engine in (*engines.values(), quiet):
            engine.close()
    if comm.rank == 0:
        out = console(launched=True)
        for name, line in host["transports"].items():
            click.echo(f"{name}: {line}")
        out.print(step_table(rows, found, comm.size))
    on_rank_zero(comm, lambda: _write(document(host, settings_text(config), found, rows), json_file))
    return int(not all(row.same_bits for row in rows))
