"""``mpishard doctor``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpishard.cli.options import device_option
from mpishard.errors import ConfigError
from mpishard.launched import abort_before_mpi, environment_rank, environment_size

if TYPE_CHECKING:
    from mpishard.doctor.report import Report

__all__ = ["EXIT_PROBLEM", "doctor"]

EXIT_PROBLEM = 1
#: Seconds before a rank leaves that has no MPI, in which the others may still connect to the launcher.
_CONNECT = 2.0


@click.command()
@device_option
@click.option("--transport", default="auto", show_default=True, metavar="NAME", help="As comm.transport of a run.")
@click.option(
    "--launcher", default="", metavar="WORDS", help="How to start the child job; the mpiexec beside the MPI by default."
)
@click.option("--limit", type=click.FloatRange(min=1.0), default=60.0, show_default=True, help="Seconds for one call.")
@click.option("--no-try", is_flag=True, help="Start no child job.")
@click.option("--no-measure", is_flag=True, help="Measure neither peers nor progress.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Where runs will go."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone; docs/troubleshooting.md describes it.")
def doctor(
    device: str | None,
    transport: str,
    launcher: str,
    limit: float,
    no_try: bool,
    no_measure: bool,
    run_dir: Path,
    as_json: bool,
) -> int:
    """Find what is wrong with this machine, its MPI and this launch; each problem with its remedy.

    Start it as a run would be: mpiexec -n 4 mpishard doctor, or on one process. Exit code 0 where there is no problem,
    1 where there is one, 2 for a mistake in the options.
    """
    from mpishard.cli.job import ending_all
    from mpishard.comm.launch import install_abort_hook, leave_together
    from mpishard.doctor.facts import everybody
    from mpishard.doctor.report import Asked, begin, examine

    asked = Asked(device or "auto", transport, _words(launcher), limit, run_dir, not no_try, not no_measure)
    met, make_ops = begin(asked)
    comm = met.comm
    install_abort_hook(comm)
    leave_together(comm)
    with ending_all(comm):
        report = examine(asked, met, make_ops)
        if comm.rank == 0 and environment_rank() in (None, 0):
            _show(report, as_json)
        failed = any(everybody(comm, bool(report.problems)))
    comm.close()
    if met.problem and not met.facts:
        _end_others(met.problem)
    return EXIT_PROBLEM if failed else 0


def _words(launcher: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(launcher))
    except ValueError as error:
        raise ConfigError(f"--launcher is {launcher!r} ({error}); write it as in a shell") from None
    if words and shutil.which(words[0]) is None:
        raise ConfigError(f"--launcher begins with {words[0]!r}, which is no program here; give its path")
    return words


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
        return
    from mpishard.doctor.tables import tables
    from mpishard.train.display import console

    screen = console(environment_size() is not None)
    for part in tables(report):
        screen.print(part, markup=False, soft_wrap=isinstance(part, str))


def _end_others(message: str) -> None:
    """End the ranks that wait in MPI's start for this one, which has no MPI."""
    if (environment_size() or 1) == 1:
        return
    sys.stdout.flush()
    time.sleep(_CONNECT)
    if rank := environment_rank():  # not rank 0, whose report says it
        time.sleep(_CONNECT)
        click.echo(f"mpishard: rank {rank} on {os.uname().nodename}: {message}", err=True)
        sys.stderr.flush()
    abort_before_mpi(EXIT_PROBLEM)
