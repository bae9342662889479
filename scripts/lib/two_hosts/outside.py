"""Makes the namespaces in which hosts are made, hands signals on, and says why a machine does not permit it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from two_hosts.launching import Installed
from two_hosts.link import delay_words, rate_words

__all__ = ["NOT_PERMITTED", "TOO_LONG", "UNSHARE", "Hosts", "Outcome", "problem", "run", "signals_to"]

LIBRARY = Path(__file__).resolve().parents[1]
#: exit codes: the machine does not permit it (as automake's tests say that they skip), and the limit of `timeout`
NOT_PERMITTED, TOO_LONG = 77, 124
#: a program in namespaces of its own, which ends with the one that started it
UNSHARE = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
_PATH = "/usr/sbin:/sbin"


@dataclass(frozen=True)
class Hosts:
    """What to make: hosts, ranks on each, the link's rate (bits a second) and delay (microseconds) where it has any."""

    installed: Installed
    count: int = 2
    ranks_per_host: int = 1
    rate: int | None = None
    delay: int | None = None


class Outcome(NamedTuple):
    """The exit code of the command, and the bytes that each host has sent; none where hosts could not be made."""

    code: int
    sent: dict[str, int]


def _unshare() -> list[str]:
    """Who is not root is it in a namespace of users, where the system has them."""
    return [*UNSHARE, *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


def _variables() -> dict[str, str]:
    return {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), _PATH])}


def problem(rate: int | None = None, delay: int | None = None) -> str:
    """Return in one line why hosts cannot be made on this machine; an empty text where they can."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    needed = ["unshare", "nsenter", "mount", "ip", *(["tc"] if rate or delay else [])]
    for name in needed:
        if shutil.which(name, path=_variables()["PATH"]) is None:
            return f"there is no program {name}; install the package {_PACKAGES[name]}"
    steps = [
        ("mount a file system", "mount -t tmpfs tmpfs /dev/shm"),
        ("make a bridge", "ip link add name bridge0 type bridge"),
        ("make a pair of interfaces", "ip link add name veth0 type veth peer name veth1"),
        ("make a host inside", " ".join([*UNSHARE, "true"])),
    ]
    if rate:
        steps.append(("limit the rate of an interface (tbf)", " ".join(rate_words("veth0", rate))))
    if delay:
        steps.append(("delay what an interface sends (netem)", " ".join(delay_words("veth1", delay))))
    script = "\n".join(f"{command} || {{ echo '{what}'; exit 1; }}" for what, command in steps)
    done = subprocess.run(
        [*_unshare(), "sh", "-c", script],
        env=_variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    what = done.stdout.strip() or "make namespaces"
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"this system does not let {'root' if os.geteuid() == 0 else 'this user'} {what} ({said})"


def run(
    hosts: Hosts,
    command: Sequence[str],
    *,
    limit: float,
    quiet: bool = False,
    stdout: IO[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command on ranks in all hosts, until it ends or ``limit`` seconds are over. Signals reach its launcher.

    Whatever becomes of this process, nothing of the hosts remains.

    Args:
        quiet: do not print what the hosts have sent.
        stdout: for what the ranks print; else it is printed.
        variables: of the environment, beside those that are set.
    """
    reading, writing = os.pipe()  # what becomes of it; a file could remain
    task = {
        "installed": list(hosts.installed),
        "hosts": hosts.count,
        "ranks_per_host": hosts.ranks_per_host,
        "rate": hosts.rate,
        "delay": hosts.delay,
        "command": list(command),
        "limit": limit,
        "quiet": quiet,
        "result": writing,
    }
    start = f"import sys; sys.path.insert(0, {str(LIBRARY)!r}); from two_hosts.inside import main"
    program = [sys.executable, "-c", f"{start}; sys.exit(main(sys.argv[1:]))", json.dumps(task)]
    with os.fdopen(reading) as result:
        try:
            # A session of its own: Ctrl-C comes from here alone, not twice.
            process = subprocess.Popen(
                [*_unshare(), *program],
                env={**_variables(), **(variables or {})},
                stdin=subprocess.PIPE,
                stdout=stdout,
                start_new_session=True,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        with signals_to(process):
            code = process.wait()
        told = result.read()
    return Outcome(128 - code if code < 0 else code, json.loads(told) if told else {})


@contextlib.contextmanager
def signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hand signals on by the process's standard input, which is closed at the end."""
    assert process.stdin is not None
    pipe = process.stdin.fileno()

    def hand_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            os.write(pipe, f"{int(number)}\n".encode())

    before = {number: signal.signal(number, hand_on) for number in _HANDED_ON}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.wait()
