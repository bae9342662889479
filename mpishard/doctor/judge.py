"""What follows from what ranks say of themselves: problems, with their remedies, and notes. Functions of plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from mpishard.doctor.facts import Facts
from mpishard.doctor.findings import Finding, note, problem

__all__ = ["judge_clocks", "judge_gpus", "judge_machine", "judge_mpi", "judge_settings", "own_gpu"]

_LEVELS = ("single", "funneled", "serialized", "multiple")
_SHARED_NEED = 16 << 20  # bytes of /dev/shm that an MPI takes for a rank
_ADDRESSES = 4 << 30  # of address space that libraries want, before any array
_FILES = 256
_SKEW = 1.0  # seconds between clocks


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 1", "ranks 0 and 1", "ranks 0, 1 and 14 more"."""
    if len(ranks) > 4:
        return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} more"
    return f"rank{'s' if len(ranks) > 1 else ''} " + " and ".join(
        filter(None, [", ".join(map(str, ranks[:-1])), str(ranks[-1])])
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def judge_mpi(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Judge the library, its thread level, and whether the launcher counted the same ranks."""
    first = ranks[0]["mpi"]
    for one in ranks:
        if not one["mpi"]:
            continue
        size = one["launcher"]["size"]
        if size is not None and len(ranks) > 1 and size != len(ranks):
            yield problem(
                "launcher-size",
                f"rank {one['rank']} was told of {size} processes and MPI of {len(ranks)} ranks; use the mpiexec of "
                f"{first['library']}",
                (one["rank"],),
            )
            break
    for one in ranks[1:]:
        if one["mpi"].get("version") != first.get("version"):
            yield problem(
                "mpi-differs",
                f"rank {one['rank']} on {one['host']} has {one['mpi'].get('version') or 'no MPI'}, rank 0 "
                f"{first.get('version') or 'none'}; load the same MPI on every node",
                (one["rank"],),
            )
            break
    low = [one["rank"] for one in ranks if one["mpi"] and _LEVELS.index(one["mpi"]["thread_provided"]) < 2]
    if low:
        level = ranks[low[0]]["mpi"]["thread_provided"]
        yield problem(
            "thread-level",
            f"MPI gives {_ranks(low)} MPI_THREAD_{level.upper()}, so communication goes on only while a rank waits; "
            "set MPI4PY_RC_THREAD_LEVEL=serialized, or use an MPI that was built with threads",
            tuple(low),
        )


def judge_settings(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Judge settings of Open MPI by which less communication is hidden behind computation."""
    first = ranks[0]
    if len(ranks) == 1 or not first["mpi"].get("library", "").startswith("Open MPI"):
        return
    settings = first["launcher"]["settings"]
    crowded = any(len(local) > local[0]["cpus"] for local in _nodes(ranks).values())
    if settings.get("OMPI_MCA_mpi_yield_when_idle", "0") not in ("0", "false") and not crowded:
        yield note(
            "yields",
            "OMPI_MCA_mpi_yield_when_idle is set and each rank has a core, which costs about a third of the overlap; "
            "leave it out",
        )
    hosts = {one["host"] for one in ranks}
    if len(hosts) > 1 and not any(one["infiniband"] for one in ranks) and "OMPI_MCA_btl_tcp_links" not in settings:
        yield note(
            "tcp-links",
            "Open MPI has one TCP connection between two ranks, in which gathers wait for reductions; over TCP "
            "OMPI_MCA_btl_tcp_links=2 has hidden 81 % where one hid 48 %",
        )


def _nodes(ranks: Sequence[Facts]) -> dict[int, list[Facts]]:
    found: dict[int, list[Facts]] = {}
    for one in ranks:
        found.setdefault(one["node"], []).append(one)
    return found


def judge_machine(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Judge cores, threads, limits and shared memory, node by node."""
    nodes: dict[str, set[int]] = {}
    for one in ranks:
        nodes.setdefault(one["host"], set()).add(one["node"])
    for host, found in nodes.items():
        if len(found) > 1:
            yield note("host-split", f"MPI counts the ranks on {host} as {len(found)} nodes, which share no memory")
    for local in _nodes(ranks).values():
        host, numbers = local[0]["host"], [one["rank"] for one in local]
        if told := next((one["thread_warning"] for one in local if one["thread_warning"]), ""):
            yield problem("threads", told, tuple(one["rank"] for one in local if one["thread_warning"]))
        cpus = local[0]["cpus"]
        union = set().union(*(one["cores"] for one in local))
        if len(local) > cpus and not local[0]["gpus"]["visible"]:
            yield problem(
                "oversubscribed",
                f"{len(local)} ranks run on the {cpus} cores of {host}; start as many as there are cores, or fewer",
                tuple(numbers),
            )
        elif len(union) < len(local):
            yield problem(
                "bound-together",
                f"{_ranks(numbers)} on {host} are bound to {len(union)} core{'s' if len(union) > 1 else ''} of {cpus} "
                "together; give each its own (mpiexec --bind-to none for Open MPI, srun --cpus-per-task=N "
                "--cpu-bind=cores)",
                tuple(numbers),
            )
        yield from _limits(local, host)
        if len(local) > 1 and local[0]["large_pages"] is False and not local[0]["gpus"]["visible"]:
            yield note(
                "small-pages",
                f"shared memory of {host} has small pages, so transport node copies it a quarter slower; Linux 6.1 "
                "makes them large, and before it 'advise' in /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            )


def _limits(local: Sequence[Facts], host: str) -> Iterator[Finding]:
    need = _SHARED_NEED * len(local)
    shared = local[0]["shared_memory"]
    if len(local) > 1 and (shared is None or shared["free"] < need):
        left = "is not there" if shared is None else f"has {_mib(shared['free'])} left"
        yield problem(
            "shared-memory",
            f"/dev/shm of {host} {left} and {len(local)} ranks want {_mib(need)}; remove what lies there, or give the "
            "container more (docker run --shm-size=1g)",
            tuple(one["rank"] for one in local),
        )
    for one in local:
        limits, where = one["limits"], f"rank {one['rank']} on {host}"
        if limits["address_space"] is not None and limits["address_space"] < _ADDRESSES:
            yield problem(
                "address-space",
                f"{where} may use {_mib(limits['address_space'])} of addresses (ulimit -v); raise it, or lift it with "
                "ulimit -v unlimited",
                (one["rank"],),
            )
        if limits["files"] is not None and limits["files"] < _FILES:
            yield problem(
                "open-files", f"{where} may open {limits['files']} files (ulimit -n); raise it to 1024", (one["rank"],)
            )
        if one["infiniband"] and limits["locked"] is not None and limits["locked"] < (64 << 20):
            yield problem(
                "locked-memory",
                f"{where} has InfiniBand and may lock {_mib(limits['locked'])} of memory (ulimit -l), too little for "
                "it; lift it with ulimit -l unlimited, or in the batch system's configuration",
                (one["rank"],),
            )


def judge_gpus(ranks: Sequence[Facts], device: str) -> Iterator[Finding]:
    """Judge which GPUs ranks see and take.

    Args:
        device: auto, cpu or cuda, as it was asked for.
    """
    if device == "cpu":
        return
    for local in _nodes(ranks).values():
        host = local[0]["host"]
        for one in local:
            found = one["gpus"]
            if found["problem"] and (found["installed"] or device == "cuda"):
                yield problem(
                    "gpu-unusable", f"no GPU can be used on {host}: {found['problem']}", tuple(r["rank"] for r in local)
                )
                break
        owners: dict[str, list[int]] = {}
        for one in local:
            if (own := own_gpu(one)) is not None:
                owners.setdefault(own["uuid"] or own["place"], []).append(one["rank"])
        for gpu, sharing in owners.items():
            if len(sharing) > 1:
                yield problem(
                    "gpu-shared",
                    f"{_ranks(sharing)} on {host} would use one GPU ({gpu}); start as many ranks a node as it has GPUs "
                    "and let each see them all, or its own (CUDA_VISIBLE_DEVICES)",
                    tuple(sharing),
                )
        yield from _hidden(local, host, owners)


def _hidden(local: Sequence[Facts], host: str, owners: dict[str, list[int]]) -> Iterator[Finding]:
    installed = local[0]["gpus"]["installed"] or 0
    seen = {gpu["uuid"] or gpu["place"] for one in local for gpu in one["gpus"]["visible"]}
    numbers = tuple(one["rank"] for one in local)
    single = len(local) > 1 and all(len(one["gpus"]["visible"]) == 1 for one in local) and len(owners) == len(local)
    closed = [one for one in local if one["gpus"]["openable"] is not None and one["gpus"]["openable"] < installed]
    if single and closed:
        yield problem(
            "gpu-isolated",
            f"each rank on {host} may open its own GPU only, so they cannot read each other's memory (CUDA IPC, "
            "NVLink); ask for GPUs by node (--gpus-per-node and --gpu-bind=none in place of --gpus-per-task)",
            numbers,
        )
    elif single:
        yield note(
            "gpu-masked",
            f"each rank on {host} sees its own GPU only (CUDA_VISIBLE_DEVICES); older libraries then cannot use CUDA "
            "IPC between them, which the table of peers would show",
        )
    if seen and len(seen) < installed:
        yield note("gpu-invisible", f"{host} has {installed} GPUs and its ranks see {len(seen)}")
    if len(owners) < len(seen) and not any(len(sharing) > 1 for sharing in owners.values()):
        yield note("gpu-idle", f"{len(seen) - len(owners)} of {len(seen)} GPUs that are seen on {host} stay unused")


def own_gpu(one: Facts) -> Facts | None:
    """Return the GPU that a rank would take: its only one, or that of its number on its node."""
    visible = one["gpus"]["visible"]
    found: Facts | None = visible[one["local_rank"] % len(visible)] if visible else None
    return found


def judge_clocks(ranks: Sequence[Facts], skew: Sequence[float]) -> Iterator[Finding]:
    """Find clocks that differ: times in logs and of files would not compare."""
    apart = [(abs(skew[a] - skew[b]), a, b) for a, b in combinations(range(len(skew)), 2)]
    if apart and (worst := max(apart))[0] > _SKEW:
        seconds, one, other = worst
        yield problem(
            "clocks",
            f"the clocks of {ranks[one]['host']} and {ranks[other]['host']} are {seconds:.1f} s apart; set them by NTP "
            "(chronyc tracking tells)",
            (one, other),
        )
