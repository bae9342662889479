"""The program scripts/two_hosts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from two_hosts import units
from two_hosts.launching import KINDS, find
from two_hosts.outside import NOT_PERMITTED, TOO_LONG, Hosts, problem, run

__all__ = ["add_hosts", "main", "whole"]

_DESCRIPTION = """Run a command on MPI ranks in several hosts that this machine plays: network, host name, shared
memory, IPC and process numbers are each host's own, and what ranks of two hosts say to each other goes over TCP and
over a link between them. Files are shared, but /dev/shm, where TMPDIR is. At the end the bytes that each host has
sent are printed, counted on its interface, the launcher's own included. However it ends, nothing remains."""
_EPILOG = f"""{{python}} in the command is the interpreter that belongs to the MPI. Exit code: the launcher's;
{TOO_LONG} when the limit is over; {NOT_PERMITTED} where the machine does not permit it, with the reason in one line;
2 wrong arguments. Example: scripts/two_hosts --rate 1gbit -- mpishard train --preset demo"""


def whole(least: int, most: int = 2**31) -> type:
    """Return a type of argument: a whole number from ``least`` on."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    return number  # type: ignore[return-value]


def _worded(parse: object) -> object:
    def value(text: str) -> object:
        try:
            return parse(text)  # type: ignore[operator]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which MPI to use."""
    parser.add_argument("--mpi", choices=KINDS, default="", help="which MPI (the one beside this Python, or on PATH)")
    parser.add_argument("--programs", default="", metavar="FOLDER", help="where its mpiexec is; first on PATH then")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="two_hosts",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage="two_hosts [options] -- COMMAND ...",
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", type=whole(1, 250), default=2, metavar="N", help="hosts (2)")
    parser.add_argument("--ranks-per-host", type=whole(1), default=1, metavar="N", help="ranks of each (1)")
    parser.add_argument("--rate", type=_worded(units.bits), metavar="RATE", help="of each host's link: 1gbit, 200mbit")  # type: ignore[arg-type]
    parser.add_argument(
        "--delay",
        type=_worded(units.microseconds),  # type: ignore[arg-type]
        metavar="TIME",
        help="from host to host, one way: 1ms, 250us; where the kernel has netem",
    )
    add_hosts(parser)
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS", help="end it then (3600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the exit code and the bytes sent")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each rank runs")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("there is no command; give it after --")
    if not options.limit > 0:
        parser.error(f"--limit is {options.limit:g}; give seconds above 0")
    if why := problem(options.rate, options.delay):
        print(f"two_hosts: hosts cannot be made here: {why}", file=sys.stderr)
        return NOT_PERMITTED
    try:
        installed = find(options.mpi, options.programs)
    except ValueError as error:
        parser.error(str(error))
    hosts = Hosts(installed, options.hosts, options.ranks_per_host, options.rate, options.delay)
    command = [installed.python if word == "{python}" else word for word in command]
    code, sent = run(hosts, command, limit=options.limit)
    if options.json:
        options.json.write_text(json.dumps({"exit_code": code, "sent": sent}) + "\n")
    return code
