"""Which transport carries the ranks' arrays: decided from what all ranks say of themselves, so the same on all.

Each rank tells what it computes on, which GPU that is, whether its MPI takes GPU memory, and what went wrong. A rank
that fails here fails on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpishard.array.device import identity
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.probe import OVERRIDE, probe
from mpishard.comm.segments import check_algorithm
from mpishard.errors import ConfigError, MpishardError
from mpishard.launched import environment_local_rank

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["TRANSPORTS", "Candidate", "choose", "connect", "made"]

#: What a program may ask for.
TRANSPORTS = ("auto", "local", "node", "mpi", "hierarchical", "staged", "nccl")
#: Those that carry arrays of a GPU, and those that carry arrays in host memory.
_GPU, _HOST = ("mpi", "staged", "nccl"), ("node", "mpi", "hierarchical")


class Candidate(NamedTuple):
    """What a rank says of itself."""

    #: number of its machine
    node: int = 0
    #: the operations' device, in words; empty where there are none
    device: str = "cpu"
    #: a name of the GPU that is its own on the machine; empty on a CPU
    gpu: str = ""
    #: whether MPI takes GPU memory, and how that is known
    aware: bool = False
    reason: str = ""
    #: why this rank cannot take part
    problem: str = ""
    #: the transport that it asks for, and whether it may share a GPU
    asked: str = ""


def choose(ranks: Sequence[Candidate], transport: str, share_device: bool = False) -> tuple[str, str]:
    """Return the transport and why; in words for a log.

    Args:
        ranks: what each one says.
        transport: one of TRANSPORTS but ``local``; ``auto`` is, on a CPU, ``node`` on one host and ``mpi`` on several;
            on GPUs ``mpi`` where MPI takes the arrays, else ``staged``.
        share_device: whether two ranks may use one GPU.

    Raises:
        ConfigError: a rank has a problem, they ask for different things or compute on different kinds of device, two
            share a GPU, or the transport does not fit the device.
    """
    for rank, one in enumerate(ranks):
        if one.problem:
            same = all(other.problem == one.problem for other in ranks)
            raise ConfigError(one.problem if same else f"rank {rank}: {one.problem}")
    for rank, one in enumerate(ranks):
        if one.asked != ranks[0].asked:
            raise ConfigError(
                f"rank {rank} asks for transport {one.asked}, rank 0 for {ranks[0].asked}; start all ranks with the "
                "same settings"
            )
    devices = [one.gpu != "" for one in ranks]
    if len(set(devices)) > 1:
        gpu, cpu = devices.index(True), devices.index(False)
        raise ConfigError(
            f"rank {gpu} computes on a GPU ({ranks[gpu].device}) and rank {cpu} on the CPU; give all ranks a GPU, or "
            "all the CPU (device cpu)"
        )
    if not devices[0]:
        return _on_the_host([one.node for one in ranks], transport), ""
    if transport != "auto" and transport not in _GPU:
        raise ConfigError(
            f"transport {transport!r} carries arrays in host memory and these are on a GPU; use transport auto, or one "
            f"of {', '.join(_GPU)}, or compute on the CPU (device cpu)"
        )
    _check_shared(ranks, transport, share_device)
    if transport == "nccl":
        return "nccl", ""
    unaware = [rank for rank, one in enumerate(ranks) if not one.aware]
    reason = ranks[unaware[0] if unaware else 0].reason
    if unaware and len(unaware) < len(ranks):
        reason = f"on rank {unaware[0]} {reason}"
    if transport == "mpi" and unaware:
        raise ConfigError(
            f"transport 'mpi' hands GPU memory to MPI, and {reason}; use transport staged or auto, or an MPI that is "
            f"GPU-aware; set {OVERRIDE}=1 if this one is and does not say so"
        )
    if transport == "staged":
        return "staged", ""
    return ("staged" if unaware else "mpi"), reason


def _on_the_host(nodes: Sequence[int], transport: str) -> str:
    """Return the transport of arrays in host memory."""
    if transport != "auto" and transport not in _HOST:
        raise ConfigError(
            f"transport {transport!r} carries arrays of a GPU and these are in host memory; "
            "use transport auto or mpi, or compute on a GPU (device cuda says what is missing for it)"
        )
    hosts = len(set(nodes))
    if transport == "node" and hosts > 1:
        raise ConfigError(
            f"transport 'node' is the shared memory of one host and the ranks are on {hosts}; use transport auto, mpi "
            "or hierarchical"
        )
    if transport == "auto":
        return "mpi" if hosts > 1 else "node"
    return transport


def _check_shared(ranks: Sequence[Candidate], transport: str, share_device: bool) -> None:
    places: dict[tuple[int, str], list[int]] = {}
    for rank, one in enumerate(ranks):
        places.setdefault((one.node, one.gpu), []).append(rank)
    for (node, gpu), sharing in places.items():
        if len(sharing) > 1 and (transport == "nccl" or not share_device):
            names = " and ".join(filter(None, [", ".join(map(str, sharing[:-1])), str(sharing[-1])]))
            problem = (
                f"ranks {names} use one GPU ({ranks[sharing[0]].device}, {gpu}, node {node}); start as many ranks a "
                "node as it has GPUs and let each see them all or its own (CUDA_VISIBLE_DEVICES)"
            )
            if transport == "nccl":
                raise ConfigError(f"{problem}; NCCL takes one rank for each GPU")
            raise ConfigError(f"{problem}, compute on the CPU (device cpu), or set device.share = true for a test run")


def made(make_ops: Ops | Callable[[int | None], Ops], local_rank: int | None) -> Ops:
    """Return the operations, which may have to be made for a rank's place on its machine."""
    return make_ops if isinstance(make_ops, Ops) else make_ops(local_rank)


def connect(
    comm: MPI.Intracomm,
    make_ops: Ops | Callable[[int | None], Ops],
    transport: str = "auto",
    *,
    share_device: bool = False,
    algorithm: str = "alltoall",
) -> Communicator:
    """Return the communicator of the ranks of ``comm`` on the transport that fits. Collective.

    Args:
        comm: duplicated; no message of the program meets ours.
        make_ops: operations, or what makes them when it is called with the rank's number on its machine.
        algorithm: how reduce-scatters go, one of :data:`mpishard.comm.segments.ALGORITHMS`; only ``mpi`` in host memory
            has a choice, and the others take ``auto`` and ``alltoall`` for what they do.

    Raises:
        ConfigError: on all ranks; see :func:`choose`. What is no ConfigError is raised as it is on its own rank.
    """
    from mpishard.comm.mpi import MpiCommunicator, library, place

    own = comm.Dup()
    node = place(own)
    error: Exception | None = None
    ops: Ops | None = None
    try:
        if transport not in TRANSPORTS:
            raise ConfigError(f"transport {transport!r} is not known; choose one of {', '.join(TRANSPORTS)}")
        if transport == "local":
            raise ConfigError(f"transport 'local' is one rank alone and there are {own.Get_size()}; use transport auto")
        if algorithm != "tree":  # which is of hierarchical alone
            check_algorithm(algorithm)
        # comm may hold some of the machine's ranks, and others theirs: the launcher's number is among all of them.
        told = environment_local_rank()
        ops = made(make_ops, node.local_rank if told is None else told)
        mine = _candidate(ops, node.index, library(), own)
    except Exception as caught:  # everybody's, lest the others wait
        error, mine = caught, Candidate(problem=_line(caught))
    asked = f"{transport} with shared GPUs" if share_device else transport
    mine = mine._replace(asked=asked if algorithm == "alltoall" else f"{asked} with algorithm {algorithm}")
    ranks = [Candidate(*one) for one in own.allgather(tuple(mine))]
    try:
        if error is not None and not isinstance(error, MpishardError):
            raise error
        name, why = choose(ranks, transport, share_device)
        if algorithm == "tree" and name != "hierarchical":
            raise ConfigError(f"algorithm 'tree' is of transport 'hierarchical', and here {name!r} is used; use auto")
        if algorithm not in ("auto", "alltoall", "tree") and (name != "mpi" or mine.gpu):
            where = f"transport {name!r} carries them" if name != "mpi" else "they are on a GPU"
            raise ConfigError(
                f"algorithm {algorithm!r} is for arrays in host memory that transport 'mpi' carries, and here {where}; "
                "use algorithm auto, or transport mpi with device cpu"
            )
    except Exception:
        own.Free()
        raise
    assert ops is not None
    if name == "node":
        from mpishard.comm.node import NodeCommunicator

        try:
            return NodeCommunicator(own, ops, node=node)
        except ConfigError as problem:  # on all ranks
            if transport != "auto":
                raise
            own, why = comm.Dup(), f"and not node, since {problem}"
    if name == "hierarchical":
        from mpishard.comm.hierarchical import HierarchicalCommunicator

        return HierarchicalCommunicator(own, ops, node=node, algorithm=algorithm)
    if not mine.gpu:
        return MpiCommunicator(own, ops, why=why, node=node, algorithm=algorithm)
    if name == "mpi":
        from mpishard.comm.mpi_device import DeviceMpiCommunicator

        return DeviceMpiCommunicator(own, ops, why=why, node=node)
    if name == "staged":
        from mpishard.comm.staged import StagedCommunicator

        return StagedCommunicator(own, ops, why=why, node=node)
    from mpishard.array.numpy_ops import NumpyOps
    from mpishard.comm.nccl import NcclCommunicator

    return NcclCommunicator(MpiCommunicator(own, NumpyOps(), node=node), ops, why=why)


def _candidate(ops: Ops, node: int, library: str, comm: MPI.Intracomm) -> Candidate:
    if getattr(ops, "stream", None) is None:
        return Candidate(node)
    from mpi4py import MPI

    info = comm.Get_info()
    found = probe(f"{library}, {MPI.Get_library_version()}", info.Get("mpi_memory_alloc_kinds"))
    info.Free()
    return Candidate(node, ops.device, identity(ops) or "unnamed", *found)


def _line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, MpishardError) else f"{type(error).__name__}: {text}"
