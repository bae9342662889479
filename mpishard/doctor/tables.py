"""A report as tables for people, and the list of problems at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.table import Table

from mpishard.doctor.facts import Facts
from mpishard.doctor.judge import own_gpu
from mpishard.doctor.report import Report
from mpishard.train.display import size

__all__ = ["binary", "core_ranges", "tables"]

_SHOWN = 32  # ranks


def _table(*columns: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def binary(nbytes: int) -> str:
    """Return bytes in powers of 1024, which sizes of messages are."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def core_ranges(cores: Sequence[int]) -> str:
    """Return numbers as ranges: "0-3,8"."""
    runs = []
    for _, run in groupby(enumerate(cores), key=lambda pair: pair[1] - pair[0]):
        numbers = [core for _, core in run]
        runs.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return ",".join(runs)


def tables(report: Report) -> Iterator[str | Table]:
    """Yield lines and tables, in the order in which they are read; problems come last."""
    yield from _mpi(report.ranks)
    yield "Ranks"
    yield _map(report.ranks)
    yield from _tried(report)
    yield from _used(report)
    if report.directory:
        free = report.directory["free"]
        yield f"runs: in {report.directory['path']}" + ("" if free is None else f", {size(free)} free")
    for one in report.notes:
        yield f"note: {one.line}"
    count = len(report.problems)
    yield f"{count} problem{'' if count == 1 else 's'} found" + (":" if count else "")
    for one in report.problems:
        yield f"problem: {one.line}"


def _mpi(ranks: Sequence[Facts]) -> Iterator[str]:
    mpi, launcher = ranks[0]["mpi"], ranks[0]["launcher"]
    if mpi:
        yield f"MPI: {mpi['library']} ({mpi['version']}), MPI {mpi['standard']}, {mpi['path']}"
        yield (
            f"threads: MPI_THREAD_{mpi['thread_asked'].upper()} asked for, "
            f"MPI_THREAD_{mpi['thread_provided'].upper()} given"
        )
        yield f"GPU memory: {mpi['gpu_aware_reason']}"
    else:
        yield "MPI: none"
    told = " ".join(f"{name}={value}" for name, value in launcher["variables"].items())
    yield f"launcher: {launcher['name'] or 'none'}{f' ({told})' if told else ''}"
    if launcher["settings"]:
        yield "settings: " + " ".join(f"{name}={value}" for name, value in launcher["settings"].items())


def _map(ranks: Sequence[Facts]) -> Table:
    table = _table("rank", "host", "node", "local", "cores", "GPU", "memory", left=("host", "cores", "GPU"))
    for one in ranks[:_SHOWN]:
        own = own_gpu(one)
        gpu = "none" if own is None else f"{own['name']} {own['uuid'] or own['place']}"
        numbers = [str(one["rank"]), one["host"], str(one["node"]), str(one["local_rank"])]
        table.add_row(*numbers, f"{core_ranges(one['cores'])} of {one['cpus']}", gpu, size(one["memory"]))
    if len(ranks) > _SHOWN:
        table.add_row("...", f"{len(ranks) - _SHOWN} more", *[""] * 5)
    return table


def _tried(report: Report) -> Iterator[str | Table]:
    trial = report.trial
    if trial is None or not trial.tries:
        return
    yield f"Tried by a child job of {trial.ranks} ranks ({' '.join(trial.launcher)})"
    if all(one.memory == "host" for one in trial.tries):
        yield "no GPU here: nothing to try on one; each call was tried in host memory"
    table = _table("call", "memory", "bytes", "outcome", left=("call", "outcome"))
    for (what, memory), group in groupby(trial.tries, key=lambda one: (one.what, one.memory)):
        alike: dict[str, list[str]] = {}
        for one in group:
            end = one.outcome + (f": {one.text}" if one.text else "")
            alike.setdefault(end, []).append(binary(one.nbytes))
        for end, sizes in alike.items():
            table.add_row(what, memory, ", ".join(sizes), end)
    yield table


def _used(report: Report) -> Iterator[str | Table]:
    chosen = report.chosen
    if not chosen:
        return
    algorithm = f", reduce-scatter by {chosen['algorithm']}" if chosen["algorithm"] else ""
    yield f"a training would use: {chosen['describe']}{algorithm}; device {chosen['device']} ({chosen['device_why']})"
    if report.peers:
        yield "Between ranks, in turn: GB/s by size of message (MPI in host memory; the transport above)"
        yield _peers(report)
    if report.progress is not None:
        p = report.progress
        hidden = "not to be told, as times vary" if p.hidden is None else f"{p.hidden:.0%} hidden"
        yield (
            f"progress: an all-gather of {binary(p.nbytes)} alone {1e3 * p.communication:.2f} ms, computation alone "
            f"{1e3 * p.compute:.2f} ms, both at once {1e3 * p.together:.2f} ms: {hidden}"
        )


def _peers(report: Report) -> Table:
    sizes = list(report.peers[0].mpi)
    transport = report.chosen["transport"]
    both = any(one.transport for one in report.peers)
    names = [f"mpi\n{binary(nbytes)}" for nbytes in sizes]
    names += [f"{transport}\n{binary(nbytes)}" for nbytes in sizes] if both else []
    table = _table("ranks", "where", "latency", *names, left=("ranks", "where"))
    for one in report.peers:
        rates = [one.mpi[nbytes] for nbytes in sizes]
        rates += [one.transport.get(nbytes, 0.0) for nbytes in sizes] if both else []
        table.add_row(
            f"{one.ranks[0]} - {one.ranks[1]}",
            "one node" if one.same_node else "two nodes",
            f"{1e6 * one.latency:.1f} us",
            *(f"{rate / 1e9:.2f}" for rate in rates),
        )
    return table
