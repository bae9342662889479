"""What follows from what was tried and measured: problems, each with its remedy, and notes. Plain functions of data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from mpishard.doctor.facts import Facts
from mpishard.doctor.findings import Finding, note, problem
from mpishard.doctor.measure import Peers, Progress
from mpishard.doctor.trial import Trial

__all__ = ["judge_peers", "judge_progress", "judge_trial"]

_SLOW = 4.0  # times slower than its like


def judge_trial(trial: Trial, mpi: Facts) -> Iterator[Finding]:
    """Judge what the child job came to.

    Args:
        mpi: what MPI says of itself.
    """
    if trial.problem:
        yield problem(
            "child-job",
            f"the child job that tries each call does not start ({trial.problem}); give its launcher, as in --launcher "
            "'mpiexec -n 2', or leave it out with --no-try",
        )
    if trial.ranks == 1:
        yield problem(
            "child-alone",
            f"{trial.launcher[0]} starts processes that are alone, so it is another MPI's; give the launcher of "
            f"{mpi['library']}, as in --launcher 'mpiexec -n 2'",
        )
    for one in trial.bad("host"):
        yield problem(
            f"host-{one.outcome}",
            f"{one.what} of {one.nbytes} bytes in host memory: {one.outcome} ({one.text}); try another transport layer "
            "(UCX_TLS=tcp,self or sm,self; --mca pml ob1 for Open MPI), or another MPI",
        )
    bad = trial.bad("GPU")
    library = [one for one in bad if one.what.startswith("transport ")]
    calls = [one for one in bad if one not in library]
    for one in library:
        yield problem(
            f"gpu-{one.outcome}",
            f"{one.what} on a GPU: {one.outcome} ({one.text}); use another transport (comm.transport), and see whether "
            "driver, CuPy and NCCL fit each other",
        )
    for one in calls if mpi["gpu_aware"] else []:
        yield problem(
            f"gpu-{one.outcome}",
            f"{mpi['gpu_aware_reason']}, and {one.what} of {one.nbytes} bytes on a GPU: {one.outcome} ({one.text}); "
            "set MPISHARD_GPU_AWARE=0, or comm.transport = staged or nccl",
        )
    tried = [one for one in trial.tries if one.memory == "GPU" and not one.what.startswith("transport ")]
    if tried and not mpi["gpu_aware"]:
        if calls:
            yield note(
                "not-gpu-aware",
                f"MPI does not take GPU memory: {mpi['gpu_aware_reason']}, and {calls[0].what}: {calls[0].outcome}",
            )
        elif all(one.outcome == "ok" for one in tried):
            yield note(
                "gpu-aware-untold",
                f"{mpi['gpu_aware_reason']}, and yet each call works on GPU memory: MPISHARD_GPU_AWARE=1 uses it",
            )


def judge_peers(peers: Sequence[Peers]) -> Iterator[Finding]:
    """Find pairs that are much slower than their like."""
    for same in (True, False):
        alike = [one for one in peers if one.same_node is same]
        for which in ("transport", "mpi"):
            rates = {one.ranks: max(getattr(one, which).values()) for one in alike if getattr(one, which)}
            if len(rates) < 3:
                continue
            usual = statistics.median(rates.values())
            slow = {ranks: rate for ranks, rate in rates.items() if rate * _SLOW < usual}
            if slow:
                (one, other), rate = min(slow.items(), key=lambda each: each[1])
                yield problem(
                    "slow-pair",
                    f"ranks {one} and {other} reach {rate / 1e9:.2f} GB/s and pairs like them {usual / 1e9:.2f} GB/s; "
                    "look at that link, at what else runs there, and at how ranks are placed",
                    (one, other),
                )
                break


def judge_progress(progress: Progress, transport: str, cores: int, local: int) -> Iterator[Finding]:
    """Say why little is hidden, where it is.

    Args:
        cores: that the ranks of a node have together.
        local: ranks of a node.
    """
    if progress.hidden is None or progress.hidden >= 0.5:
        return
    why = "see whether BLAS threads or other programs take the cores"
    if transport == "node":
        why = "node copies while a rank waits, so nothing goes on behind its computation"
    elif cores < 2 * local:
        why = f"{local} ranks have {cores} cores, and moving data needs a core, too"
    yield note("little-hidden", f"{progress.hidden:.0%} of communication was hidden: {why}")
