"""Runs as the first process of namespaces of its own: makes the hosts, starts the ranks, tells what went over the link.

[Note: how it ends]
Everything runs in the process numbers' namespace whose first process this is, in namespaces that have no name outside.
So when it ends, for whatever reason, the system ends every process here, and hosts, links and mounts with them: there
is nothing to tear down. It ends with its command; or a while after a signal; or at once when its standard input is
closed, since then the program that holds the other end is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from two_hosts.launching import Installed, environment, words
from two_hosts.link import INTERFACE, LinkError, call, delay_words, rate_words, sent
from two_hosts.outside import NOT_PERMITTED, TOO_LONG, UNSHARE

__all__ = ["agent_script", "main", "table"]

#: of the launcher, which stands beside the hosts and is no part of any
LOGIN = "login"
_OWN = Path("/dev/shm")  # a file system of our own
_GRACE = 10.0  # seconds from a signal to the end
_AGENT = _OWN / "ssh"
#: Becomes a host's first process, which a shell is because it reaps. Open MPI's daemons end with a segmentation fault
#: where they do not find the agent on their own host, though nothing is started from there.
_HOST = f"mount -t tmpfs tmpfs {_OWN} && ln -s /bin/false {_AGENT} && echo ready && while sleep 3600; do :; done"


def main(arguments: Sequence[str]) -> int:
    """Run what one JSON text describes; return the command's exit code."""
    task: dict[str, Any] = json.loads(arguments[0])
    names = [f"n{number + 1}" for number in range(task["hosts"])]
    try:
        holders = _hosts(names, task["rate"], task["delay"])
    except (LinkError, OSError) as error:
        print(f"two_hosts: the system does not let hosts be made here: {error}", file=sys.stderr)
        return NOT_PERMITTED
    _AGENT.write_text(agent_script(dict(zip(names, (holder.pid for holder in holders)))))
    _AGENT.chmod(0o755)
    installed = Installed(*task["installed"])
    command = [*words(installed, names, task["ranks_per_host"], str(_AGENT)), *task["command"]]
    before = [sent(holder.pid) for holder in holders]
    ranks = task["hosts"] * task["ranks_per_host"]
    code = _run(command, environment(installed, os.environ, ranks), task["limit"])
    bytes_sent = {name: sent(holder.pid) - old for name, holder, old in zip(names, holders, before)}
    if not task["quiet"]:
        print(table(bytes_sent), file=sys.stderr, flush=True)
    with os.fdopen(task["result"], "w") as result:
        json.dump(bytes_sent, result)
    return code


def _hosts(names: Sequence[str], rate: int | None, delay: int | None) -> list[subprocess.Popen[str]]:
    """Make the hosts, joined by a switch; return the processes that hold them."""
    socket.sethostname(LOGIN)
    call(["mount", "-t", "tmpfs", "tmpfs", str(_OWN)])
    addresses = {name: f"10.77.0.{number + 1}" for number, name in enumerate(names)} | {LOGIN: "10.77.0.254"}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (_OWN / "hosts").write_text("\n".join(lines) + "\n")
    call(["mount", "--bind", str(_OWN / "hosts"), "/etc/hosts"])
    call(["ip", "link", "set", "lo", "up"])
    call(["ip", "link", "add", "name", "switch", "type", "bridge"])
    call(["ip", "addr", "add", f"{addresses[LOGIN]}/24", "dev", "switch"])
    call(["ip", "link", "set", "switch", "up"])
    holders = []
    for name in names:
        # `mount` of its own must come after this process' mounts, and before the ranks'.
        holder = subprocess.Popen(
            [*UNSHARE, "sh", "-c", _HOST], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        holders.append(holder)
        if holder.stdout is None or holder.stdout.readline() != "ready\n":
            raise LinkError(f"host {name} did not start")
        within = ["nsenter", f"--target={holder.pid}", "--net", "--uts"]
        call(["ip", "link", "add", "name", name, "type", "veth", "peer", "name", INTERFACE, "netns", str(holder.pid)])
        call(["ip", "link", "set", name, "master", "switch", "up"])
        call([*within, "hostname", name])
        call([*within, "ip", "link", "set", "lo", "up"])
        call([*within, "ip", "addr", "add", f"{addresses[name]}/24", "dev", INTERFACE])
        call([*within, "ip", "link", "set", INTERFACE, "up"])
        if rate is not None:
            call([*within, *rate_words(INTERFACE, rate)])
        if delay is not None:
            call(delay_words(name, delay))  # on the switch's side: what the host receives is late
    return holders


def agent_script(holders: dict[str, int]) -> str:
    """Return a program that takes ssh's place: ``PROGRAM [options] HOST COMMAND...``."""
    cases = "\n".join(f"    {name}) process={pid} ;;" for name, pid in holders.items())
    known = " ".join(holders)
    return f"""#!/bin/sh
while :; do
    case $1 in
    -[bcDEeFIiJLlmOopRSWw]) shift 2 ;;
    -*) shift ;;
    *) break ;;
    esac
done
case ${{1#*@}} in
{cases}
    *) echo "two_hosts: there is no host $1; there are {known}" >&2; exit 255 ;;
esac
shift
exec nsenter --target=$process --net --uts --ipc --mount --pid=/proc/$process/ns/pid_for_children sh -c "$*" </dev/null
"""


def _run(command: Sequence[str], variables: dict[str, str], limit: float) -> int:
    launcher = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL)
    threading.Thread(target=_listen, args=(launcher,), daemon=True).start()
    try:
        code = launcher.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"two_hosts: not done after {limit:g} s (--limit), so it is ended", file=sys.stderr, flush=True)
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_GRACE / 2)
        return TOO_LONG
    return 128 - code if code < 0 else code


def _listen(launcher: subprocess.Popen[bytes]) -> None:
    """Hand on the signals that arrive as numbers, a line each."""
    ending = False
    for line in sys.stdin:
        number = signal.Signals(int(line))
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            launcher.send_signal(number)
            continue
        if ending:
            os._exit(128 + number)
        ending = True
        launcher.send_signal(number)
        timer = threading.Timer(_GRACE, os._exit, (128 + number,))
        timer.daemon = True
        timer.start()
    os._exit(128 + signal.SIGHUP)


def table(bytes_sent: dict[str, int]) -> str:
    """Return what each host has sent, in one line."""
    parts = [f"{name} {count:,}".replace(",", " ") for name, count in bytes_sent.items()]
    return f"two_hosts: bytes sent over the link, headers included: {', '.join(parts)}"
