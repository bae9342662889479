"""mpi4py's communicators and requests, as subclasses that record which memory MPI reads and writes, and when.

A blocking call touches its buffers in the calling thread. A nonblocking one is an agent of its own from its post to the
call that finds it complete. Only memory of the stand-in's machine is recorded, pinned or on a device. Calls that are
not in the table are refused where they take buffers: what is not seen cannot be judged.
"""

from __future__ import annotations

from typing import Any, NoReturn

from tests.standin.machine import Access, here
from tests.standin.memory import DeviceFault
from tests.standin.regions import one

__all__ = ["recording_classes"]

#: call -> (times that the size of the sent buffer's count is read, of the received one's is written)
_BOTH = {"Allgather": (1, "N"), "Alltoall": ("N", "N")}
_REFUSED = (
    *("Allgatherv", "Alltoallv", "Alltoallw", "Allreduce", "Bsend", "Exscan", "Gather", "Gatherv", "Mprobe", "Reduce"),
    *("Reduce_scatter", "Reduce_scatter_block", "Rsend", "Scan", "Scatter", "Scatterv", "Sendrecv", "Ssend"),
    *("Sendrecv_replace", "Allgather_init", "Alltoall_init", "Bcast_init", "Send_init", "Recv_init", "Psend_init"),
    "Precv_init",
)


def _range(spec: Any, times: int, MPI: Any) -> tuple[int, int] | None:
    """Return the address and the bytes of a buffer as mpi4py takes it; None where there is none."""
    count: Any = None
    kind: Any = None
    if isinstance(spec, (list, tuple)):
        spec, *rest = spec
        for part in rest:
            if isinstance(part, MPI.Datatype):
                kind = part
            elif isinstance(part, int):
                count = part
            else:
                raise DeviceFault(f"mpi4py: buffers are read as [data, count, type] here, {part!r} is something else")
    if spec is None or spec is MPI.IN_PLACE or spec is MPI.BOTTOM:
        return None
    if hasattr(spec, "__cuda_array_interface__"):
        about = spec.__cuda_array_interface__
        start, nbytes = about["data"][0], spec.nbytes
        if about.get("strides") is not None:
            raise DeviceFault("mpi4py: a view with gaps was given; MPI would take what lies between its elements")
    else:
        buffer = MPI.buffer(spec)
        start, nbytes = buffer.address, buffer.nbytes
    if count is not None and kind is not None:
        wanted = count * kind.Get_size() * times
        if wanted > nbytes:
            raise DeviceFault(f"mpi4py: {wanted} bytes were asked for in a buffer of {nbytes}")
        nbytes = wanted
    return (start, nbytes) if nbytes else None


def _accesses(found: list[tuple[tuple[int, int] | None, bool]]) -> list[Access]:
    memory = here().memory
    accesses: list[Access] = []
    for piece, written in found:
        if piece is not None and memory.at(piece[0]) is not None:
            accesses.append((memory.find(*piece, "mpi4py"), one(*piece), written))
    return accesses


def recording_classes(trace: Any, MPI: Any) -> tuple[Any, Any]:
    """Return the classes of communicators and requests that record in a trace."""

    class RecordingRequest(MPI.Request):  # type: ignore[misc]
        agent: int | None = None
        accesses: list[Access] = []  # noqa: RUF012 - replaced, never changed

    class RecordingComm(MPI.Intracomm):  # type: ignore[misc]
        pass

    def harvest(requests: Any) -> None:
        for request in requests:
            if getattr(request, "agent", None) is not None and request == MPI.REQUEST_NULL:
                trace.completed(request.agent, "MPI completion")
                for block, parts, written in request.accesses:
                    if written:
                        trace.looked(block, parts)
                request.agent = None

    def of_one(name: str) -> Any:
        plain = getattr(MPI.Request, name)

        def method(self: Any, *args: Any) -> Any:
            result = plain(self, *args)
            harvest([self])
            return result

        return method

    def of_many(name: str) -> Any:
        plain = getattr(MPI.Request, name)

        def method(cls: Any, requests: Any, *args: Any) -> Any:
            result = plain(requests, *args)
            harvest(requests)
            return result

        return classmethod(method)

    for name in ("Test", "Wait"):
        setattr(RecordingRequest, name, of_one(name))
        for kind in ("all", "any", "some"):
            setattr(RecordingRequest, name + kind, of_many(name + kind))

    def find(name: str, comm: Any, args: Any) -> list[Access]:
        if name in _BOTH:
            reads, writes = (comm.Get_size() if times == "N" else times for times in _BOTH[name])
            return _accesses([(_range(args[0], reads, MPI), False), (_range(args[1], writes, MPI), True)])
        if name == "Bcast":
            root = args[1] if len(args) > 1 else 0
            return _accesses([(_range(args[0], 1, MPI), comm.Get_rank() != root)])
        return _accesses([(_range(args[0], 1, MPI), name == "Recv")])

    def blocking(name: str) -> Any:
        plain = getattr(MPI.Intracomm, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            accesses = find(name, self, args)
            trace.thread_access(f"MPI {name}", accesses)
            result = plain(self, *args, **kwargs)
            for block, parts, written in accesses:
                if written:
                    trace.looked(block, parts)
            return result

        return method

    def nonblocking(name: str) -> Any:
        posted = "I" + name.lower()
        plain = getattr(MPI.Intracomm, posted)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            accesses = find(name, self, args)
            request = RecordingRequest(plain(self, *args, **kwargs))
            if accesses:
                request.agent, request.accesses = trace.started(f"MPI {posted}", accesses), accesses
            return request

        return method

    for name in (*_BOTH, "Bcast", "Send", "Recv"):
        setattr(RecordingComm, name, blocking(name))
        setattr(RecordingComm, "I" + name.lower(), nonblocking(name))
    for name in _REFUSED:
        for spelled in (name, "I" + name.lower()):
            if hasattr(MPI.Intracomm, spelled):
                setattr(RecordingComm, spelled, _refusal(spelled))

    def derived(name: str) -> Any:
        plain = getattr(MPI.Intracomm, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return RecordingComm(plain(self, *args, **kwargs))

        return method

    for name in ("Dup", "Split", "Split_type", "Create", "Create_group", "Clone"):
        setattr(RecordingComm, name, derived(name))
    return RecordingComm, RecordingRequest


def _refusal(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise DeviceFault(f"mpi4py {name}: the stand-in does not record it; see tests/standin/messages.py")

    return method
