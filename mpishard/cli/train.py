"""``mpishard train``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpishard.cli.options import ConfiguredCommand
from mpishard.errors import ConfigError

if TYPE_CHECKING:
    from mpishard.comm.base import Communicator
    from mpishard.train.config import Config

__all__ = ["agree_run_dir", "settings_text", "train"]

#: bytes of the record in which rank 0 tells the others the run directory
_RECORD = 4096


@click.command(cls=ConfiguredCommand)
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of settings.")
@click.option("--preset", metavar="NAME", help="Settings to begin with; listed below.")
@click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="One setting; may be given many times."
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the run writes; by default runs/NAME-DATE-TIME, NAME that of the file or the preset.",
)
@click.option("--print-config", is_flag=True, help="Print every setting as TOML and leave.")
def train(
    config_file: Path | None, preset: str | None, overrides: Sequence[str], run_dir: Path | None, print_config: bool
) -> int:
    """Train a GPT.

    Settings come from the preset, then the file, then --set; the later wins.
    """
    from mpishard.comm.launch import environment_rank, environment_size
    from mpishard.train.config import Config, dump_toml, load

    loaded: Config | ConfigError
    try:
        loaded = load(config_file, preset, overrides)
    except ConfigError as error:
        loaded = error
    if print_config and isinstance(loaded, Config):
        if environment_rank() in (None, 0):
            click.echo(dump_toml(loaded), nl=False)
        return 0
    if isinstance(loaded, ConfigError) and environment_size() in (None, 1):
        raise loaded
    name = config_file.stem if config_file is not None else preset or "train"
    return _run(loaded, name, run_dir)


def _run(loaded: Config | ConfigError, name: str, run_dir: Path | None) -> int:
    """Start the ranks and train; every ConfigError from here on is raised on all ranks alike, or aborts the job."""
    from mpishard.array.numpy_ops import NumpyOps
    from mpishard.comm.launch import environment_size, install_abort_hook, world
    from mpishard.comm.together import same_on_all_ranks, together
    from mpishard.train.config import check_ranks
    from mpishard.train.loop import run

    # Until ranks have compared their settings, how they meet must not depend on one rank's.
    several = (environment_size() or 1) > 1
    transport = "auto" if several or isinstance(loaded, ConfigError) else loaded.comm.transport
    comm = world(NumpyOps(), transport=transport)
    install_abort_hook(comm)

    def settings() -> Config:
        # A file may be there for one rank and not for another: what one cannot read, none starts with.
        if isinstance(loaded, ConfigError):
            raise loaded
        return loaded

    config = together(comm, settings)
    same_on_all_ranks(comm, settings_text(config))
    if config.comm.transport == "local" and comm.size > 1:
        raise ConfigError(
            f"{comm.size} processes were launched and comm.transport is local, which is one rank alone; "
            "set it to auto, or start one process"
        )
    check_ranks(config, comm.size)
    directory = agree_run_dir(comm, name, run_dir)
    try:
        code: int = run(config, directory, comm)
    except ConfigError:
        # Raised on all ranks. What was made for the run goes again, unless there is something in it.
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise
    except (KeyboardInterrupt, EOFError, BrokenPipeError, SystemExit) as error:
        # One rank leaves, quietly as it would alone; the others would wait for it for ever.
        if comm.size > 1:
            closed = isinstance(error, BrokenPipeError)
            comm.abort(f"mpishard: {'standard output was closed' if closed else 'interrupted'}; ending all ranks", 1)
        raise
    comm.close()
    return code


def settings_text(config: Config) -> list[str]:
    """Return what must be the same on all ranks, a setting a line. Token files may lie elsewhere on each."""
    return [
        f"{section}.{key} = {('given' if value else 'empty') if section == 'data' and key != 'epochs' else value}"
        for section, entries in config.model_dump().items()
        for key, value in entries.items()
    ]


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
            record = f"-{error.filename}: cannot be made ({error.strerror}); choose another with --run-dir".encode(
                errors="surrogateescape"
            )
    answer = comm.exchange(record[:_RECORD].ljust(_RECORD, b"\0"))[0].rstrip(b"\0")
    text = answer[1:].decode(errors="surrogateescape")
    if not answer.startswith(b"+"):
        raise ConfigError(text)
    return Path(text)


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
