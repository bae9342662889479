"""A child job that tries what may crash or hang, seen from its parent.

[Note: a crash is a finding]
The child says what it begins and what has ended. Where it ends in between, what it had begun is what ended it; where
it says nothing for too long, what it had begun hangs. Then another one tries the rest.

[Note: a launcher inside a launch]
A process that was launched has variables by which MPI finds its launcher. A launcher that inherits them, or its
processes, would look for the wrong one; so they are left out, and settings of the user's are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpishard.doctor.child import MARK

__all__ = [
    "CHILD",
    "Launch",
    "Trial",
    "Try",
    "find_launcher",
    "free_environment",
    "judge_end",
    "start_problem",
    "try_all",
    "watch",
]

_START = "from mpi4py import MPI"
#: what a launch is followed by
CHILD = (sys.executable, "-m", "mpishard.doctor.child")
#: seconds that a child has to end by itself, beyond its limit
_GRACE = 10.0
_TAIL = 8192  # bytes of standard error that are kept
_MOST = 3  # jobs that may end badly

_LAUNCHED = re.compile(
    r"PMI_|PMIX_(?!MCA_)|OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT)|OMPI_MCA_(PREFIXES|cpu_type|initial_wdir|num_procs)$|PRTE_(?!MCA_)"
    r"|HYDI_|MPI_LOCALN?RANK|MV2_COMM_WORLD_|PALS_"
)


@dataclass(frozen=True)
class Try:
    """One thing that was tried: ``outcome`` is ok, wrong, crash, hang, failed, impossible or untried."""

    what: str
    memory: str
    nbytes: int
    outcome: str
    text: str = ""


@dataclass
class Launch:
    """What one child job said, and how it ended."""

    said: list[dict[str, Any]] = field(default_factory=list)
    code: int | None = None
    hung: bool = False
    errors: str = ""


@dataclass
class Trial:
    """What was tried, by which launcher; ``problem`` where nothing could be."""

    launcher: tuple[str, ...] = ()
    ranks: int = 0
    tries: list[Try] = field(default_factory=list)
    problem: str = ""

    def bad(self, memory: str) -> list[Try]:
        """Return what went wrong with a kind of memory."""
        fine = ("ok", "impossible", "untried")
        return [one for one in self.tries if one.memory == memory and one.outcome not in fine]


def free_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that tie a process to its launcher."""
    free = {name: value for name, value in environment.items() if not _LAUNCHED.match(name)}
    if os.geteuid() == 0:  # who runs this as root means it
        free |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return free


def find_launcher(path: str, library: str, ranks: int, step_type: str | None = None) -> tuple[str, ...]:
    """Return the words that launch so many ranks of the library at ``path``; none where no launcher is found.

    Args:
        step_type: under ``srun``, its ``--mpi`` ("" where that is not told): another step is made.
    """
    if step_type is not None:
        found = shutil.which("srun")
        kind = (f"--mpi={step_type}",) if step_type else ()
        return (found, "--overlap", *kind, "-n", str(ranks)) if found else ()
    places = [folder / "bin" / "mpiexec" for folder in list(Path(path).parents)[1:4]] if path else []
    places.append(Path(sys.executable).with_name("mpiexec"))
    beside = next((str(place) for place in places if os.access(place, os.X_OK)), shutil.which("mpiexec"))
    if not beside:
        return ()
    # Its ranks share the cores of the rank that starts it.
    more = ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none") if library.startswith("Open MPI") else ()
    return (beside, *more, "-n", str(ranks))


def watch(command: Sequence[str], environment: Mapping[str, str], limit: float) -> Launch:
    """Run a child job to its end, or for as long as it says something every ``limit`` seconds."""
    launch = Launch()
    try:
        child = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        launch.errors = f"{command[0]}: {error.strerror}"
        return launch
    assert child.stdout is not None
    assert child.stderr is not None
    out, err = b"", b""
    last = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stderr, selectors.EVENT_READ)
        while selector.get_map():
            if time.monotonic() - last > limit + _GRACE:
                launch.hung = True
                break
            for key, _ in selector.select(0.2):
                got = os.read(key.fd, 65536)
                if not got:
                    selector.unregister(key.fileobj)
                elif key.fileobj is child.stdout:
                    *lines, out = (out + got).split(b"\n")
                    if heard := [fact for line in lines if (fact := _fact(line))]:
                        launch.said += heard
                        last = time.monotonic()
                else:
                    err = (err + got)[-_TAIL:]
    _end(child)
    launch.code, launch.errors = child.returncode, err.decode(errors="replace")
    launch.hung = launch.hung or "Timeout (" in launch.errors
    return launch


def _fact(line: bytes) -> dict[str, Any] | None:
    _, mark, rest = line.decode(errors="replace").partition(MARK)
    try:
        found = json.loads(rest) if mark else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Wait for a launcher that has closed its output; end it and what it started where it stays."""
    for wait, number in ((3.0, signal.SIGTERM), (3.0, signal.SIGKILL)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait if child.poll() is None else 0)
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
    child.wait()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def judge_end(launch: Launch, limit: float) -> tuple[str, str]:
    """Return the outcome of what a job had begun when it ended, and in which words it ended."""
    if launch.hung:
        return "hang", f"it did not end within {limit:g} s"
    fatal = re.search(r"Fatal Python error: (.+)", launch.errors)
    reason = fatal.group(1).strip() if fatal else _last_words(launch.errors)
    code = f"exit code {launch.code}"
    return "crash", f"{reason} ({code})" if reason else code


def _last_words(errors: str) -> str:
    """Return the line in which a library said why it ended, as far as one can tell."""
    lines = [line.strip() for line in errors.splitlines() if re.search(r"[a-zA-Z]{4}", line)]
    lines = [line for line in lines if not re.search(r"Sorry!|^from the file|\.txt: No such file", line)]
    first = [line for line in lines if re.match(r"--> Returned|(\[\S+\] )?\*\*\* An error occurred", line)]
    telling = [line for line in lines if re.search(r"error|abort|fail|signal|killed|not enough|unable", line, re.I)]
    return (first[:1] or (telling or lines or [""])[-1:])[0][:200]


def start_problem(limit: float) -> str:
    """Return how a process ends that starts MPI alone; "" where it does not, and where there is no MPI to start."""
    launch = watch([sys.executable, "-c", _START], os.environ, limit)
    if launch.hung or (launch.code and "Traceback" not in launch.errors):
        return judge_end(launch, limit)[1]
    return ""


def try_all(launcher: Sequence[str], memory: str, limit: float, child: Sequence[str] = CHILD) -> Trial:
    """Run child jobs until each thing was tried, or too many jobs have ended badly.

    Args:
        launcher: words that start the ranks of a job.
        memory: ``host``, or ``gpu`` for that too.
        limit: seconds for one thing.
        child: what they start, followed by its arguments.
    """
    trial = Trial(tuple(launcher))
    environment = free_environment(os.environ)
    names: list[tuple[str, str, int]] = []
    first, failures = 0, 0
    while not names or first < len(names):
        launch = watch([*launcher, *child, memory, str(first), str(limit)], environment, limit)
        head = next((one for one in launch.said if "things" in one), None)
        if head is None:
            trial.problem = judge_end(launch, limit)[1] if launch.code or launch.hung else launch.errors.strip()
            trial.problem = trial.problem or "it said nothing"
            break
        trial.ranks = int(head["ranks"])
        names = names or [(str(what), str(where), int(nbytes)) for what, where, nbytes in head["things"]]
        ended = {one["end"]: (str(one["outcome"]), str(one["text"])) for one in launch.said if "end" in one}
        begun = [one["begin"] for one in launch.said if "begin" in one]
        trial.tries += [_try(names[number], *ended[number]) for number in sorted(ended)]
        first = max([first - 1, *ended]) + 1
        if any("over" in one for one in launch.said):
            break
        if begun and begun[-1] not in ended:
            trial.tries.append(_try(names[begun[-1]], *judge_end(launch, limit)))
            first = begun[-1] + 1
        failures += 1
        if failures == _MOST:
            break
    trial.tries += [_try(name, "untried", "") for name in names[len(trial.tries) :]]
    return trial


def _try(name: tuple[str, str, int], outcome: str, text: str) -> Try:
    what, memory, nbytes = name
    return Try(what, memory, nbytes, outcome, text)
