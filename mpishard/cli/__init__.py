"""The program ``mpishard``.

A mistake of the user's is one line on standard error, printed by rank 0, and exit code 2 on every rank. The
commands import what they need when they run, so that ``--help`` answers at once and starts neither MPI nor NumPy.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import click

from mpishard import __version__
from mpishard.cli.bench import bench as bench_command
from mpishard.cli.data import data as data_command
from mpishard.cli.doctor import doctor as doctor_command
from mpishard.cli.generate import generate as generate_command
from mpishard.cli.plan import plan as plan_command
from mpishard.cli.schedule import schedule as schedule_command
from mpishard.cli.timeline import timeline as timeline_command
from mpishard.cli.train import train as train_command
from mpishard.errors import ConfigError, LaunchError
from mpishard.launched import abort_before_mpi, environment_rank, environment_size, in_step

__all__ = ["EXIT_INTERRUPTED", "EXIT_USER", "main", "program"]

EXIT_USER = 2
EXIT_INTERRUPTED = 130
#: Seconds before a rank leaves that cannot start MPI. Open MPI's launcher may crash, and leave the others waiting,
#: when one rank ends while another one connects; srun loses what was printed just before.
_CONNECT = 2.0
#: What may be wrong with standard output: no room, no device.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
#: Seconds in which srun prints what rank 0 has said.
_DRAIN = 1.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(__version__, prog_name="mpishard")
def program() -> None:
    """Fully sharded data parallelism (ZeRO-3) on MPI.

    One process: mpishard train --preset demo. Several: mpiexec -n 4 mpishard train --preset demo.
    """


program.add_command(train_command)
program.add_command(schedule_command)
program.add_command(plan_command)
program.add_command(bench_command)
program.add_command(data_command)
program.add_command(generate_command)
program.add_command(timeline_command)
program.add_command(doctor_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the program on ``arguments`` (None: those of the process) and leave it.

    Exit codes: 0 done, 2 a mistake of the user's, 130 interrupted; a command may return others. Any other
    exception is a bug and passes through, to whatever ends the whole job.
    """
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample of text holds what the terminal may not know
    try:
        code = program.main(
            args=None if arguments is None else list(arguments), prog_name="mpishard", standalone_mode=False
        )
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "mpishard"
        _report(f"{error.format_message().rstrip('.')}; see '{path} --help'")
        code = EXIT_USER
    except LaunchError as error:
        _say_alone(str(error))
        code = EXIT_USER
    except ConfigError as error:
        _report(str(error))
        code = EXIT_USER
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "mpishard" or "mpi4py.MPI" in sys.modules:
            raise  # a bug, or an end for which the other ranks must be told through MPI
        _say_alone(
            f"{sys.executable} cannot import {error.name} ({error}); install mpishard with what it needs for that "
            "interpreter, or let every rank use one that has it"
        )
        code = EXIT_USER
    except click.Abort:
        if _others_may_wait():
            _say_alone("interrupted", EXIT_INTERRUPTED)
        code = EXIT_INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise  # a bug
        _report(f"the output cannot be written ({error.strerror}); make room, or write it elsewhere")
        code = EXIT_USER
    sys.exit(code)


def _others_may_wait() -> bool:
    """Return whether other ranks were launched that this one has not met: they wait for it in MPI's start."""
    return (environment_size() or 1) > 1 and "mpi4py.MPI" not in sys.modules


def _say_alone(message: str, code: int = EXIT_USER) -> None:
    """Print what this rank has found alone, before it met the others, with its name, and end them."""
    rank = environment_rank()
    who = "" if rank is None else f"rank {rank} on {os.uname().nodename}: "
    click.echo(f"mpishard: {who}{' '.join(message.split())}", err=True)
    if rank is not None:
        sys.stderr.flush()
        time.sleep(_CONNECT)
        abort_before_mpi(code)


def _report(message: str) -> None:
    """Print one line, once per job."""
    first = environment_rank() in (None, 0) or environment_size() == 1
    if first:
        click.echo(f"mpishard: {' '.join(message.split())}", err=True)
    if _others_may_wait():
        if not first:
            # Where all ranks have found the same, the first one has said so by then, and the job has ended.
            time.sleep(2 * _CONNECT)
            _say_alone(message)
        else:
            sys.stderr.flush()
            time.sleep(_CONNECT)
            abort_before_mpi(EXIT_USER)
    elif not first and in_step():
        time.sleep(_DRAIN)  # srun --kill-on-bad-exit may end rank 0 before its line is out
