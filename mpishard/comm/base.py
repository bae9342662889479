"""The communicator contract. Transports are its leaves; everything above speaks only this.

[Note: three moments of a collective]
A started collective has three moments, not one, because transports may let peers read each other's memory:

- ``Work.wait()``: the result has arrived; ``out`` may be read.
- ``Work.released()``: this rank no longer reads ``out``, and no peer does; it may be overwritten.
- ``Work.wait_inputs()``: no peer reads this rank's input any more; it may be overwritten, and ``out`` too.

[Note: ordered sums]
A reduce-scatter adds the ranks' contributions one after another, in rank order, in fp32 (fp64 for fp64), to
the shard as it stands (``start(add=True)``), or writes the first one (``start(add=False)``). Every transport
gives these bits. Nothing here hands a sum to the MPI library. With ``bracket`` k above 1, what is added one after
another are the sums of k consecutive ranks each (a node's, say); a transport may give some ``brackets`` only.
Contributions may travel in a narrower type, ``wire``: each is rounded to it once, on one rank too, and summed in fp32.

[Note: everybody's failure]
Binding is validated on every rank and agreed by all: a mistake of one rank raises on all of them, naming it.

[Note: arrays on a device]
A transport works on the memory that its ``ops`` compute in, and takes no other. On a device the three moments hold
for ``ops.stream``: after ``wait()`` what is queued on it finds the result, and the host may be further on. Who reads
a result on the host fetches it (``ops.fetch``), which waits for the stream.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from mpishard.array.dtypes import DTYPES, Array, DType, accumulator, address, name_of, overlap
from mpishard.array.ops import Ops
from mpishard.comm.binding import agree_binding
from mpishard.comm.frames import FRAME_BYTES, INLINE, beginnings, frame
from mpishard.comm.pool import Pool
from mpishard.comm.rounding import Rounded
from mpishard.comm.scratch import ALIGNMENT, Scratch, copy_bytes
from mpishard.comm.work import Collective, Tally, Work
from mpishard.errors import CommError, ConfigError

__all__ = ["Collective", "Communicator", "Node", "Tally", "Work"]


@dataclass(frozen=True)
class Node:
    """Where a rank runs: its place among the ranks of its node, and its node among the nodes."""

    local_rank: int
    local_size: int
    index: int
    count: int


#: what may travel in place of fp32
_NARROW = (DTYPES["bfloat16"], DTYPES["float16"])


@dataclass(eq=False)
class Communicator(ABC):
    """A group of ranks. Transports implement the methods that begin with an underscore.

    Buffers are 1-D, contiguous arrays of a type in :data:`mpishard.array.dtypes.DTYPES`, in the memory of ``ops``.
    """

    transport: ClassVar[str] = ""
    #: transports that a group of the ranks may get instead of this one
    children: ClassVar[tuple[str, ...]] = ()

    rank: int
    size: int
    node: Node
    ops: Ops
    _tallies: dict[str, Tally] = field(
        default_factory=lambda: {k: Tally() for k in ("all_gather", "reduce_scatter", "exchange", "broadcast")}
    )
    #: bytes of memory, of the kind that it carries, that the transport holds for itself
    own_bytes: int = 0
    #: ranks whose contributions a reduce-scatter sums by themselves first, a divisor of ``size``; 1 for none. Alike on
    #: all ranks, and set before anything is bound; what is split from this one begins with 1, or all that it can give.
    bracket: int = 1
    closed: bool = False
    #: whether an engine gathers into one copy for all ``sharers``; alike on all ranks, set before it is made
    shares_gathered: bool = True
    #: what moves data while the program computes: ``background`` or ``none``; ``copies`` where its own cores move them
    progress: str = field(default="background", init=False)
    #: what a transport of several processes calls first in ``abort``
    before_abort: Callable[[], object] | None = field(default=None, init=False)
    _bound: int = 0

    @property
    def tallies(self) -> dict[str, Tally]:
        """What each kind of collective has cost this rank so far, as far as a device has come; ask anew each time."""
        self._settle()
        return self._tallies

    @property
    def brackets(self) -> tuple[int, ...]:
        """The values of ``bracket`` that this transport can give."""
        return tuple(k for k in range(1, self.size + 1) if self.size % k == 0)

    @property
    def on_device(self) -> bool:
        """Whether buffers are in a device's memory: the operations have a stream there."""
        return getattr(self.ops, "stream", None) is not None

    # --- what transports give

    @abstractmethod
    def _bind_all_gather(self, shard: Array, out: Array, tally: Tally, nbytes: int) -> Collective:
        """Bind validated buffers."""

    @abstractmethod
    def _bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None, wire: DType, tally: Tally, nbytes: int
    ) -> Collective:
        """Bind validated buffers. ``wire`` is full's type, but where ``_in_pieces``."""

    @abstractmethod
    def _exchange(self, record: bytes) -> list[bytes]:
        """All-gather one record of equal length from each rank."""

    @abstractmethod
    def _broadcast(self, array: Array, root: int) -> None:
        """Copy root's array to every rank."""

    @abstractmethod
    def _split(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> Communicator:
        """Make the communicator of ``own``, the group that holds this rank; ranks in the order listed."""

    @abstractmethod
    def abort(self, message: str, code: int = 1) -> None:
        """End every rank of the job, with ``message`` on standard error."""

    def _settle(self) -> None:  # noqa: B027 - on the host nothing is owed
        """Bring the tallies up to date without waiting for anything."""

    def close(self) -> None:  # noqa: B027 - not every transport holds something
        """Give back what the transport holds. Collective; no work may be in flight."""

    def describe(self) -> str:
        """Return one line for a log: the transport, what it runs on, and why it was chosen."""
        return self.transport

    @property
    def scratch_rule(self) -> Scratch:
        """What scratch this communicator's reduce-scatters need; ``of(n)`` tells of n ranks split from it."""
        return Scratch(self.transport, self.size, self.on_device)

    def scratch_bytes(self, count: int, kind: DType, wire: DType) -> int:
        """Bytes of scratch that a reduce-scatter of ``count`` elements of ``kind`` in all needs, sent as ``wire``."""
        return self.scratch_rule(count, kind, wire)

    def allocate(self, count: int, dtype: DType) -> Array:
        """Return a 1-D array that this transport can use well."""
        return self.ops.empty(count, dtype)

    @property
    def _in_pieces(self) -> bool:
        """Whether the transport rounds to the type that travels by itself, a piece at a time."""
        return self.scratch_rule.in_pieces

    @property
    def sharers(self) -> int:
        """Ranks that share one gathered copy, where :attr:`shares_gathered` lets them; 1 where each has its own."""
        return self.scratch_rule.sharers if self.shares_gathered else 1

    def pool(self, nbytes: int) -> Pool:
        """Return memory of all ``sharers``. Collective.

        Raises:
            ConfigError: on all ranks, when there is not as much, or this transport shares none.
        """
        raise ConfigError(f"transport {self.transport} has no memory that ranks share; use transport node")

    # --- what everybody calls

    def bind_all_gather(self, shard: Array, out: Array) -> Collective:
        """Bind ``out[r*k:(r+1)*k] = rank r's shard`` with ``k = shard.size``.

        ``shard`` may be this rank's own slice of ``out``; any other overlap is refused.

        Raises:
            CommError: on all ranks, when buffers do not fit or ranks bind different things.
        """
        problem = self._problem("shard", shard) or self._problem("out", out)
        if not problem and shard.dtype != out.dtype:
            problem = f"shard is {shard.dtype} and out is {out.dtype}; they must be of one type"
        if not problem and out.size != shard.size * self.size:
            need = shard.size * self.size
            problem = f"out holds {out.size} elements, {self.size} ranks with {shard.size} each need {need}"
        in_place = not problem and overlap(shard, out)
        if in_place:
            own = out[self.rank * shard.size : (self.rank + 1) * shard.size]
            if address(own) != address(shard):
                problem = f"shard overlaps out, but is not rank {self.rank}'s own slice of it"
        # MPI wants all ranks in place or none, so that is agreed too.
        self._agree_binding("all-gather in place" if in_place else "all-gather", shard, problem)
        nbytes = shard.nbytes * (self.size - 1)
        return self._bind_all_gather(shard, out, self.tallies["all_gather"], nbytes)

    def bind_reduce_scatter(
        self, full: Array, out: Array, scratch: Array | None = None, wire: DType | None = None
    ) -> Collective:
        """Bind ``out (+)= sum over ranks q, in rank order, of rank q's full[r*k:(r+1)*k]``, ``k = out.size``.

        Every element of ``full`` is read, padding too. ``out`` and ``scratch`` are the collective's from start on:
        ``out`` until ``wait()``, ``scratch`` until ``wait_inputs()``.

        Args:
            full: bf16, fp16, fp32 or fp64.
            out: fp32 (fp64 for fp64).
            scratch: uint8, at a multiple of 64 bytes, ``scratch_bytes(full.size, full.dtype, wire)`` of them or more;
                may be None where that is 0.
            wire: the type that travels: full's own (None), or bf16 or fp16 for fp32; see the note on ordered sums.

        Raises:
            CommError: on all ranks, when buffers do not fit or ranks bind different things.
        """
        wire = full.dtype if wire is None else np.dtype(wire)
        problem = self._problem("full", full) or self._problem("out", out)
        if not problem:
            problem = self._sum_problem(full, out, wire)
        if not problem and full.size != out.size * self.size:
            need = out.size * self.size
            problem = f"full holds {full.size} elements, {self.size} ranks with {out.size} each need {need}"
        if not problem:
            problem = self._scratch_problem(scratch, self.scratch_bytes(full.size, full.dtype, wire))
        pairs = [(full, out)] if scratch is None else [(full, out), (full, scratch), (out, scratch)]
        if not problem and any(overlap(one, other) for one, other in pairs):
            problem = "full, out and scratch overlap; a reduce-scatter is never in place"
        kind = "reduce-scatter" + (f" as {wire}" if wire != full.dtype else "")
        if self.bracket != 1:
            kind += f" by {self.bracket}"
        self._agree_binding(kind, full, problem)
        nbytes = out.size * wire.itemsize * (self.size - 1)
        tally = self.tallies["reduce_scatter"]
        if wire == full.dtype or self._in_pieces:
            return self._bind_reduce_scatter(full, out, scratch, wire, tally, nbytes)
        assert scratch is not None  # bound buffers were validated
        copy = scratch[: full.size * wire.itemsize].view(wire)
        rest = scratch[copy_bytes(full.size, full.dtype, wire) :]
        return Rounded(self._bind_reduce_scatter(copy, out, rest, wire, tally, nbytes), self.ops, full, copy)

    def exchange(self, record: bytes, what: str = "an exchange") -> list[bytes]:
        """All-gather one record per rank; records are of one length. Index ``r`` is rank ``r``'s.

        Args:
            what: names the exchange; the same on all ranks.

        Raises:
            CommError: on all ranks, when they are at different exchanges.
        """
        tally = self.tallies["exchange"]
        begin = time.perf_counter()
        records = beginnings(self._exchange(frame(what, record)))
        tally.calls += 1
        tally.bytes += FRAME_BYTES * (self.size - 1)
        if rest := record[INLINE:]:
            others = self._exchange(rest)
            tally.bytes += len(rest) * (self.size - 1)
            records = [first + other for first, other in zip(records, others, strict=True)]
        seconds = time.perf_counter() - begin
        tally.busy += seconds
        tally.waited += seconds
        return records

    def meet(self, what: str) -> None:
        """Return when every rank has come to the same ``what``.

        Raises:
            CommError: on all ranks, when they are at different things.
        """
        self.exchange(b"", what)

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Copy root's ``array`` into every rank's.

        Raises:
            CommError: the buffer is not 1-D and contiguous, or there is no such root.
        """
        problem = self._problem("array", array)
        if not problem and not 0 <= root < self.size:
            problem = f"root {root} is not one of the {self.size} ranks"
        self._agree_binding(f"broadcast from rank {root}", array, problem)
        tally = self.tallies["broadcast"]
        begin = time.perf_counter()
        self._broadcast(array, root)
        tally.calls += 1
        tally.bytes += array.nbytes if self.rank == root else 0
        seconds = time.perf_counter() - begin
        tally.busy += seconds
        tally.waited += seconds

    def all_reduce(self, array: Array) -> None:
        """Replace ``array`` (fp32 or fp64, 1-D) by the sum over ranks, added as a reduce-scatter adds.

        It is an ordered reduce-scatter and an all-gather; it allocates, so it is not for use inside a step.

        Raises:
            CommError: on all ranks, when an array does not fit or ranks give different ones.
        """
        problem = self._problem("array", array)
        if not problem and array.dtype not in (np.float32, np.float64):
            problem = f"array is {array.dtype}; float32 or float64 is needed"
        self._agree_binding("all-reduce", array, problem)
        each = -(-array.size // self.size)
        full = self.ops.empty(each * self.size, array.dtype)
        self.ops.fill(full, 0.0)
        self.ops.copy(array, full[: array.size])
        shard = self.ops.empty(each, accumulator(array.dtype))
        nbytes = self.scratch_bytes(full.size, full.dtype, full.dtype)
        scratch = self.ops.empty(nbytes, DTYPES["uint8"])
        self.bind_reduce_scatter(full, shard, scratch).start().wait_inputs()
        self.bind_all_gather(shard, full).start().wait_inputs()
        self.ops.copy(full[: array.size], array)
        self.ops.fetch(array[:1])  # a device is still at work on what is given back here

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.meet("a barrier")

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return the communicator of the group that holds this rank.

        Raises:
            ConfigError: the groups do not hold every rank exactly once.
            CommError: on all ranks, when ranks give different groups.
        """
        listed = [list(group) for group in groups]
        digests = self.exchange(hashlib.sha256(repr(listed).encode()).digest(), "a split")
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise CommError(f"ranks split differently: rank {rank}'s groups are not rank 0's; give the same on all")
        if sorted(r for group in listed for r in group) != list(range(self.size)):
            raise ConfigError(f"groups {listed} must hold each of the {self.size} ranks exactly once")
        own = next(group for group in groups if self.rank in group)
        return self._split(groups, own)

    # --- agreement

    def _problem(self, name: str, array: Array) -> str:
        """Say why an array cannot be a buffer; empty where it can."""
        if array.ndim != 1 or not array.flags.c_contiguous:
            return f"{name} has shape {array.shape} and strides {array.strides}; a 1-D contiguous array is needed"
        try:
            name_of(array.dtype)
        except ConfigError as error:
            return str(error)
        if hasattr(array, "__cuda_array_interface__") != self.on_device:
            found, due = ("host", "device") if self.on_device else ("device", "host")
            return f"{name} is in {found} memory; transport {self.transport} was made for arrays in {due} memory"
        return ""

    def _sum_problem(self, full: Array, out: Array, wire: DType) -> str:
        try:
            expected = accumulator(full.dtype)
            if self.on_device:
                self.ops.prepare(full.dtype)
                self.ops.prepare(wire)
        except ConfigError as error:
            return str(error)
        if out.dtype != expected:
            return f"full is {full.dtype}, so out must be {expected}, but it is {out.dtype}"
        if wire != full.dtype and (full.dtype != DTYPES["float32"] or wire not in _NARROW):
            return f"full is {full.dtype} and was to travel as {wire}; float32 can travel as bfloat16 or float16 alone"
        if self.bracket < 1 or self.size % self.bracket:
            return f"bracket is {self.bracket}; it must divide the number of ranks, {self.size}"
        if self.bracket not in self.brackets:
            return f"bracket is {self.bracket}; transport {self.transport} gives {self.brackets[0]} alone"
        return ""

    def _scratch_problem(self, scratch: Array | None, need: int) -> str:
        if not need:
            return ""
        if scratch is None:
            return f"there is no scratch; {need} bytes are needed"
        if scratch.dtype != DTYPES["uint8"]:
            return f"scratch is {scratch.dtype}; it must be uint8"
        if scratch.nbytes < need:
            return f"scratch holds {scratch.nbytes} bytes; {need} are needed"
        if address(scratch) % ALIGNMENT:
            return f"scratch begins {address(scratch) % ALIGNMENT} bytes behind a multiple of {ALIGNMENT}; align it"
        return self._problem("scratch", scratch)

    def _agree_binding(self, kind: str, array: Array, problem: str) -> None:
        """Compare what is being bound on all ranks; raise on all when one is wrong or differs."""
        number, self._bound = self._bound, self._bound + 1
        agree_binding(self.exchange, kind, array, number, problem)
