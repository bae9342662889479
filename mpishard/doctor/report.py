"""The examination from beginning to end, and what it comes to. All ranks go through it together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mpishard import __version__
from mpishard.array.device import choose, operations
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.choice import TRANSPORTS
from mpishard.comm.diagnose import Meeting, meet, use
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.together import same_on_all_ranks
from mpishard.doctor import judge, measured
from mpishard.doctor.facts import Facts, everybody, of_rank
from mpishard.doctor.findings import Finding, note, problem
from mpishard.doctor.measure import Peers, Progress, measure_peers, measure_progress
from mpishard.doctor.places import clock_skew, run_directory
from mpishard.doctor.trial import Trial, find_launcher, start_problem, try_all
from mpishard.errors import ConfigError
from mpishard.launched import environment_local_rank, environment_size, in_step

__all__ = ["Asked", "Report", "begin", "examine"]

_MOST_TRIED = 8  # ranks of a child job


class Asked(NamedTuple):
    """What was asked for: a device and a transport as in a run, the child job's launcher, and what to leave out."""

    device: str = "auto"
    transport: str = "auto"
    launcher: tuple[str, ...] = ()
    limit: float = 60.0
    run_dir: Path = Path("runs")
    tries: bool = True
    measures: bool = True

    @property
    def lines(self) -> list[str]:
        """Return what all ranks must have been told alike."""
        return [f"--{name.replace('_', '-')} {value}" for name, value in self._asdict().items()]


@dataclass
class Report:
    """What was found. ``chosen`` is what a training would use; empty where it would be refused."""

    ranks: list[Facts]
    findings: list[Finding] = field(default_factory=list)
    trial: Trial | None = None
    chosen: Facts = field(default_factory=dict)
    peers: list[Peers] = field(default_factory=list)
    progress: Progress | None = None
    directory: Facts = field(default_factory=dict)
    skew: list[float] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        """Findings that have a remedy."""
        return [one for one in self.findings if one.remedy]

    @property
    def notes(self) -> list[Finding]:
        """Findings that need none."""
        return [one for one in self.findings if not one.remedy]

    def as_json(self) -> dict[str, Any]:
        """Return all of it; docs/troubleshooting.md describes the keys."""
        return {
            "mpishard": __version__,
            "problems": [one.as_json() for one in self.problems],
            "notes": [one.as_json() for one in self.notes],
            "ranks": self.ranks,
            "tried": None if self.trial is None else asdict(self.trial),
            "chosen": self.chosen or None,
            "peers": [one.as_json() for one in self.peers],
            "progress": None if self.progress is None else self.progress.as_json(),
            "run_directory": self.directory or None,
            "clock_skew": self.skew,
        }


class _Device:
    """The operations that a training would use, made once; before MPI starts where the launcher tells the place."""

    def __init__(self, device: str) -> None:
        self._make = cache(lambda local_rank: operations(device, local_rank))

    def __call__(self, local_rank: int | None) -> Ops:
        return self._make(local_rank)

    def early(self) -> None:
        """Choose a GPU; a problem with it is met again, and told, when all ranks choose."""
        with contextlib.suppress(ConfigError):
            self(environment_local_rank())


def begin(asked: Asked) -> tuple[Meeting, Callable[[int | None], Ops]]:
    """Check what was asked for and meet the other ranks, if MPI can be loaded.

    Raises:
        ConfigError: there is no such transport, or it is for one rank and there are several.
    """
    if asked.transport not in TRANSPORTS:
        raise ConfigError(f"transport {asked.transport!r} is not known; choose one of {', '.join(TRANSPORTS)}")
    if asked.transport == "local" and (environment_size() or 1) > 1:
        raise ConfigError("transport 'local' is one rank alone and there are several; use transport auto")
    make_ops = _Device(asked.device)
    # A launched process cannot be asked so: some MPIs start only the launcher's way.
    if environment_size() is None and (reason := start_problem(asked.limit)):
        line = (
            f"MPI does not start here ({reason}); look at the settings above (UCX_TLS and the like), try without them, "
            "and see that mpi4py was built for this MPI"
        )
        return Meeting(LocalCommunicator(NumpyOps()), {}, line, "mpi-start"), make_ops
    return meet(make_ops.early), make_ops


def examine(asked: Asked, met: Meeting, make_ops: Callable[[int | None], Ops]) -> Report:
    """Find out everything. Collective.

    Returns:
        The report; on rank 0 it is whole, on the others what the ranks told each other.

    Raises:
        ConfigError: ranks were asked for different things.
    """
    comm = met.comm
    same_on_all_ranks(comm, asked.lines)
    report = Report(everybody(comm, of_rank(comm, met.facts)))
    add = report.findings.extend
    if met.problem:
        add([problem(met.name, met.problem)])
    add(judge.judge_mpi(report.ranks))
    add(judge.judge_settings(report.ranks))
    add(judge.judge_gpus(report.ranks, asked.device))
    add(judge.judge_machine(report.ranks))
    bad = False
    if met.facts and not met.problem and asked.tries:
        if comm.rank == 0:
            report.trial = _try(asked, report.ranks)
            add(measured.judge_trial(report.trial, met.facts))
            if not asked.launcher and comm.node.local_size < comm.size:
                add([note("tried-on-one-node", "calls were tried on rank 0's node alone: --launcher says how on all")])
        bad = everybody(comm, _would_end_us(report.trial, met.facts))[0]
    if not met.problem:
        _choose(asked, make_ops, report, measures=asked.measures and not bad, host=comm)
    if bad and asked.measures:
        add([note("not-measured", "nothing was measured, since what the child job tried does not work")])
    report.directory = run_directory(comm, asked.run_dir)
    add(_judge_directory(report.directory))
    if len({one["node"] for one in report.ranks}) > 1:
        report.skew = clock_skew(comm)
        add(judge.judge_clocks(report.ranks, report.skew))
    return report


def _try(asked: Asked, ranks: list[Facts]) -> Trial:
    """Run the child job, on rank 0's node unless a launcher was given."""
    local = sum(one["node"] == ranks[0]["node"] for one in ranks)
    step = os.environ.get("SLURM_MPI_TYPE", "") if in_step() else None
    mpi = ranks[0]["mpi"]
    count = max(2, min(local, _MOST_TRIED))
    launcher = asked.launcher or find_launcher(mpi["path"], mpi["library"], count, step)
    if not launcher:
        return Trial(problem="no mpiexec beside the MPI library, nor in PATH")
    gpu = asked.device != "cpu" and bool(ranks[0]["gpus"]["visible"])
    return try_all(launcher, "gpu" if gpu else "host", asked.limit)


def _would_end_us(trial: Trial | None, mpi: Facts) -> bool:
    """Return whether this process would come to the same end if it measured."""
    if trial is None:
        return False
    return bool(trial.bad("host")) or (bool(mpi["gpu_aware"]) and bool(trial.bad("GPU")))


def _choose(
    asked: Asked, make_ops: Callable[[int | None], Ops], report: Report, *, measures: bool, host: Communicator
) -> None:
    try:
        comm = use(make_ops, asked.transport)
    except ConfigError as refused:  # on all ranks
        already = {one.name for one in report.problems} & {"gpu-shared", "gpu-unusable"}
        if not already:
            report.findings.append(problem("refused", f"a training would be refused: {refused}"))
        return
    choice = choose(asked.device)
    report.chosen = {
        "transport": comm.transport,
        "algorithm": getattr(comm, "algorithm", "") if comm.transport == "mpi" else "",
        "describe": comm.describe(),
        "device": comm.ops.device,
        "device_why": choice.why,
    }
    if measures and comm.size > 1:
        report.peers = measure_peers(host, comm)
        report.progress = measure_progress(comm)
        report.findings.extend(measured.judge_peers(report.peers))
        local = [one for one in report.ranks if one["node"] == report.ranks[0]["node"]]
        cores = len(set().union(*(one["cores"] for one in local)))
        report.findings.extend(measured.judge_progress(report.progress, comm.transport, cores, len(local)))
    comm.close()


def _judge_directory(found: Facts) -> list[Finding]:
    path = found["path"]
    if found["problem"]:
        return [
            problem(
                "run-directory",
                f"{path} cannot be written by rank 0 ({found['problem']}); choose another place for runs (--run-dir)",
                (0,),
            )
        ]
    if found["unseen"]:
        return [
            problem(
                "run-directory",
                f"{path} is not the same directory for all ranks: {len(found['unseen'])} of them, rank "
                f"{found['unseen'][0]} first, do not see what rank 0 wrote; choose one on a file system that all nodes "
                "share (--run-dir)",
                tuple(found["unseen"]),
            )
        ]
    return []
