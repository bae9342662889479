"""``mpishard train``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from mpishard.cli.options import ConfiguredCommand, device_option, settings_options
from mpishard.errors import ConfigError

if TYPE_CHECKING:
    from mpishard.comm.base import Communicator
    from mpishard.train.loop import Reporter
    from mpishard.train.resume import Resumed
    from mpishard.train.sections import Config

__all__ = ["Ask", "agree_run_dir", "settings_text", "train"]

#: bytes of the record in which rank 0 tells the others the run directory
_RECORD = 4096


@click.command(cls=ConfiguredCommand)
@settings_options
@click.option(
    "--init-from",
    metavar="PATH",
    help="GPT-2 weights to begin with: a model.safetensors, or a directory that holds one. Sets model.init_from.",
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Go on with a run: its directory (from its newest checkpoint), or one of its checkpoints.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the run writes; by default runs/NAME-DATE-TIME, NAME that of the file or the preset.",
)
@device_option
@click.option(
    "--as-rank",
    metavar="R/N",
    help="Be rank R of N, alone, for a few steps: its memory and time are real, its collectives are answered here, and "
    "its losses mean nothing.",
)
@click.option(
    "--memory-report",
    is_flag=True,
    help="Note what memory is in use at each moment of a step, and compare it with the plan at the end.",
)
@click.option(
    "--trace",
    metavar="STEPS",
    help="Time the instructions of these steps, counted from 0, for mpishard timeline, as in 10-12. Sets debug.trace.",
)
@click.option("--print-config", is_flag=True, help="Print every setting as TOML and leave.")
def train(
    config_file: Path | None,
    preset: str | None,
    overrides: Sequence[str],
    init_from: str | None,
    resume: Path | None,
    run_dir: Path | None,
    device: str | None,
    as_rank: str | None,
    memory_report: bool,
    trace: str | None,
    print_config: bool,
) -> int:
    """Train a GPT.

    Settings come from the checkpoint that --resume names, then the preset, then the file, then --set; the later wins.
    SIGUSR1 and SIGTERM end the run after the step that is being done, with a checkpoint.
    """
    # Before anything slow is imported: a signal that nobody handles would end this rank at once.
    from mpishard.train.signals import install

    signals = install()
    from mpishard.launched import environment_rank, environment_size
    from mpishard.train.config import dump_toml, toml_value

    loaded: Ask | ConfigError
    if device is not None:
        overrides = [*overrides, f"device.kind={device}"]
    if trace is not None:
        overrides = [*overrides, f"debug.trace={toml_value(trace)}"]
    try:
        loaded = _load(config_file, preset, overrides, init_from, resume, as_rank)
    except ConfigError as error:
        loaded = error
    reporter = None
    if memory_report and isinstance(loaded, Ask):
        try:
            reporter = _reporter()
        except ConfigError as error:
            loaded = error
    if print_config and isinstance(loaded, Ask):
        if environment_rank() in (None, 0):
            click.echo(dump_toml(loaded.config), nl=False)
        return 0
    if isinstance(loaded, ConfigError) and environment_size() in (None, 1):
        raise loaded
    name = config_file.stem if config_file is not None else preset or "train"
    try:
        if isinstance(loaded, Ask) and loaded.place is not None:
            return _run_alone(loaded.config, loaded.place, name, run_dir, reporter)
        return _run(loaded, name, run_dir, lambda: signals.asked, reporter)
    finally:
        signals.restore()


def _reporter() -> Reporter:
    """Return what makes the memory report, where this rank can draw it."""
    from mpishard.plan.memory_report import check_drawing, write_report

    check_drawing()
    return write_report


class Ask(NamedTuple):
    """What was asked for: settings, the checkpoint to go on from, and the (rank, ranks) to be."""

    config: Config
    resumed: Resumed | None
    place: tuple[int, int] | None = None


def _load(
    config_file: Path | None,
    preset: str | None,
    overrides: Sequence[str],
    init_from: str | None,
    resume: Path | None,
    as_rank: str | None,
) -> Ask:
    from mpishard.train.config import load, toml_value

    if as_rank is not None:
        from mpishard.cli.job import rank_of

        place = rank_of(as_rank)
        if resume is not None or init_from is not None:
            other = "--resume" if resume is not None else "--init-from"
            raise ConfigError(f"--as-rank and {other} were given; a rank alone learns nothing, so leave one out")
        return Ask(load(config_file, preset, overrides), None, place)
    if init_from is not None:
        overrides = [*overrides, f"model.init_from={toml_value(init_from)}"]
    if resume is None:
        return Ask(load(config_file, preset, overrides), None)
    if init_from is not None:
        raise ConfigError("--resume and --init-from were given; a run that goes on has its weights, so leave one out")
    from mpishard.train.resume import Resumed

    resumed = Resumed.find(resume)
    return Ask(load(config_file, preset, overrides, resumed.settings), resumed)


def _run(
    loaded: Ask | ConfigError, name: str, run_dir: Path | None, stopper: Callable[[], str], reporter: Reporter | None
) -> int:
    """Start the ranks and train; every ConfigError from here on is raised on all ranks alike, or aborts the job."""
    from mpishard.cli.job import ending_all, start
    from mpishard.comm.together import same_on_all_ranks
    from mpishard.train.config import check_ranks
    from mpishard.train.start import run

    if isinstance(loaded, ConfigError):
        # A file may be there for one rank and not for another: what one cannot read, none starts with.
        start("auto", "cpu", problem=loaded)
        raise loaded
    config, resumed, _ = loaded
    comm = start(
        config.comm.transport,
        config.device.kind,
        share=config.device.share,
        tf32=config.precision.tf32,
        algorithm=config.comm.algorithm,
    )
    with ending_all(comm):
        asked = f"--memory-report {'given' if reporter is not None else 'not given'}"
        same_on_all_ranks(comm, [*settings_text(config, resumed), asked])
        if config.comm.transport == "local" and comm.size > 1:
            raise ConfigError(
                f"{comm.size} processes were launched and comm.transport is local, which is one rank alone; "
                "set it to auto, or start one process"
            )
        check_ranks(config, comm.size)
        directory = agree_run_dir(comm, name, run_dir or (resumed.run if resumed is not None else None))
        try:
            code: int = run(config, directory, comm, resumed=resumed, stopper=stopper, reporter=reporter)
        except ConfigError:
            # Raised on all ranks. What was made for the run goes again, unless there is something in it.
            if comm.rank == 0:
                with contextlib.suppress(OSError):
                    directory.rmdir()
            raise
    comm.close()
    return code


def _run_alone(
    config: Config, place: tuple[int, int], name: str, run_dir: Path | None, reporter: Reporter | None
) -> int:
    """Be one rank of a job that is not there, without a launcher and without MPI."""
    from mpishard.cli.job import start_alone
    from mpishard.train.alone import measure
    from mpishard.train.config import check_ranks

    rank, size = place
    check_ranks(config, size)
    comm = start_alone(
        rank,
        size,
        config.comm.transport,
        config.device.kind,
        node=config.shard.group,
        tf32=config.precision.tf32,
        algorithm=config.comm.algorithm,
    )
    try:
        directory = _make_run_dir(f"{name}-as-rank-{rank}-of-{size}", run_dir)
    except OSError as error:
        raise ConfigError(_cannot_be_made(error)) from None
    try:
        measure(config, directory, comm, reporter=reporter)
    except ConfigError:
        with contextlib.suppress(OSError):
            directory.rmdir()
        raise
    except OSError as error:
        if error.filename is None or Path(error.filename).parent != directory:
            raise
        raise ConfigError(
            f"{error.filename}: cannot be written ({error.strerror}); make room, or choose another --run-dir"
        ) from None
    return 0


def settings_text(config: Config, resumed: Resumed | None = None) -> list[str]:
    """Return what must be the same on all ranks, a setting a line. Token files may lie elsewhere on each."""
    lines = [
        f"{section}.{key} = {('given' if value else 'empty') if section == 'data' and key != 'epochs' else value}"
        for section, entries in config.model_dump().items()
        for key, value in entries.items()
    ]
    return [*lines, f"checkpoint {resumed.path} {resumed.manifest.checksum}"] if resumed is not None else lines


def agree_run_dir(comm: Communicator, name: str, run_dir: Path | None) -> Path:
    """Return the run directory, the same on all ranks; rank 0 makes it.

    Without ``run_dir`` it is a new one, ``runs/<name>-<date>-<time>``, by rank 0's clock: runs that begin in
    the same second do not share one.

    Raises:
        ConfigError: on all ranks, when it cannot be made.
    """
    record = b""
    if comm.rank == 0:
        try:
            record = b"+" + str(_make_run_dir(name, run_dir)).encode(errors="surrogateescape")
        except OSError as error:
            record = f"-{_cannot_be_made(error)}".encode(errors="surrogateescape")
    answer = comm.exchange(record[:_RECORD].ljust(_RECORD, b"\0"), "the run directory")[0].rstrip(b"\0")
    text = answer[1:].decode(errors="surrogateescape")
    if not answer.startswith(b"+"):
        raise ConfigError(text)
    return Path(text)


def _cannot_be_made(error: OSError) -> str:
    return f"{error.filename}: cannot be made ({error.strerror}); choose another with --run-dir"


def _make_run_dir(name: str, run_dir: Path | None) -> Path:
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
        return run_dir
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while True:
        path = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path
