"""Two levels, on nodes that are told: all that divide the ranks of the launch, which may be on one host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator, Node
from mpishard.comm.scratch import SLOT_BYTES, Scratch
from mpishard.errors import CommError, ConfigError
from mpishard.launched import environment_size
from mpishard.testing import communicator as suite
from mpishard.testing import rounds
from tests.shard.training import Job, train

pytestmark = pytest.mark.mpi

BASE = Job()

#: As by default, and in slices, or in pieces, which then number several per block.
WAYS = [(threaded, chunk) for threaded in (True, False) for chunk in (2**28, 200)]
#: Ranks of a node (0 for all of the launch), and ways.
CASES = [(2, *way) for way in WAYS] + [(ranks, *WAYS[0]) for ranks in (3, 1, 0)]
SIZE = environment_size() or 1
#: The cases that a launch of this size has.
HERE = [case for case in CASES if not case[0] or (SIZE % case[0] == 0 and case[0] < SIZE)]
TREES = [(ranks, chunk) for ranks in (1, 2) for chunk in (2**28, 200) if SIZE / ranks in (2, 4)]


def told(ranks: int, **how: Any) -> Any:
    """A communicator on several nodes of so many ranks, or on one of all (0); skips where the launch has no such."""
    from mpi4py import MPI

    from mpishard.comm.hierarchical import HierarchicalCommunicator

    size, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    if size % (ranks or size) or ranks == size:
        pytest.skip(f"{size} ranks are not several nodes of {ranks}")
    ranks = ranks or size
    node = Node(rank % ranks, ranks, rank // ranks, size // ranks)
    return HierarchicalCommunicator(MPI.COMM_WORLD.Dup(), NumpyOps(), node=node, **how)


@pytest.fixture(scope="module", params=HERE, ids="{0[0]}-{0[1]}-{0[2]}".format)
def comm(request: pytest.FixtureRequest) -> Iterator[Any]:
    ranks, threaded, chunk = request.param
    made = told(ranks, threaded=threaded, chunk_bytes=chunk)
    yield made
    made.close()


@pytest.mark.parametrize("name", suite.CHECKS)
def test_contract(comm: Communicator, name: str) -> None:
    suite.CHECKS[name](comm)


def test_the_bits_are_those_of_other_transports(comm: Any) -> None:
    """With one bracket: plain MPI, shared memory, and what every rank can work out; ranks skewed."""
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator
    from mpishard.comm.node import NodeCommunicator

    others: list[Any] = [MpiCommunicator(MPI.COMM_WORLD, NumpyOps()), NodeCommunicator(MPI.COMM_WORLD, NumpyOps())]
    naps = np.random.default_rng(comm.rank).choice([0.0, 0.0, 0.002, 0.01], (4, 6))
    kinds = [("float32", None), ("bfloat16", None), ("float32", "bfloat16")]
    for (name, wire), nap in zip(kinds, naps, strict=False):
        reduces = []
        for other in (comm, *others):
            other.bracket = comm.bracket
            reduces.append(rounds.Reduce(other, 4001, DTYPES[name], wire=None if wire is None else DTYPES[wire]))
        for round_ in range(2):
            works = []
            for reduce, seconds in zip(reduces, nap[round_::2], strict=True):
                reduce.fill(round_)
                time.sleep(seconds)
                works.append(reduce.collective.start(add=True))
            for reduce, work in zip(reduces, works, strict=True):
                work.wait_inputs()
                reduce.check(round_, add=True)
                rounds.same(reduce.out, reduces[0].out, f"{reduce.comm.transport}, {name} as {wire}")
    for other in others:
        other.close()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"prefetch": 2}, "float32"), ({"prefetch": 0}, "bfloat16"), ({"reshard_after_forward": False}, "float32")],
)
def test_training(comm: Any, changes: dict[str, Any], kind: str) -> None:
    """Nothing reads what has not arrived, and nothing overwrites what a peer still reads; bits as above."""
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator

    job = replace(BASE, micros=comm.size, poison=True).with_settings(**changes)
    engine = job.engine(comm, dtype_name=kind)
    outcome = train(engine, job, 4)
    engine.close()
    plain = MpiCommunicator(MPI.COMM_WORLD, NumpyOps())
    plain.bracket = comm.bracket
    assert outcome == train(job.engine(plain, dtype_name=kind), job, 4)
    plain.close()


def test_arrays_from_elsewhere(comm: Any) -> None:
    """They are copied into shared memory; on one rank only, too."""
    count = 999
    for elsewhere in range(-1, comm.size):
        mine = elsewhere in (-1, comm.rank)
        new = NumpyOps().empty if mine else comm.allocate
        shard, out = new(count, DTYPES["float64"]), new(count * comm.size, DTYPES["float64"])
        full, total = new(count * comm.size, DTYPES["float32"]), new(count, DTYPES["float32"])
        gather = comm.bind_all_gather(shard, out)
        reduce = comm.bind_reduce_scatter(full, total, rounds.scratch_for(comm, full))
        for round_ in range(3):
            shards = [rounds.data(count, DTYPES["float64"], round_, rank) for rank in range(comm.size)]
            fulls = [rounds.data(full.size, DTYPES["float32"], round_, rank) for rank in range(comm.size)]
            shard[:], full[:], out[:] = shards[comm.rank], fulls[comm.rank], np.nan
            works = [gather.start(), reduce.start()]
            for work in works:
                work.wait_inputs()
            rounds.same(out, np.concatenate(shards), "gathered")
            expected = rounds.ordered(fulls, comm.rank * count, count, None, bracket=comm.bracket)
            rounds.same(total, expected, "summed")


def test_a_result_that_a_peer_still_reads_is_not_overwritten_by_the_next_start(comm: Any) -> None:
    gather = rounds.Gather(comm, 500, DTYPES["float32"])
    for round_ in range(2 * comm.size):
        rounds.write(comm, gather.input, gather.values(comm.rank, round_))
        comm.barrier()
        work = gather.collective.start()
        if comm.rank == round_ % comm.size:
            time.sleep(0.02)
        work.wait()
        gather.check(round_)
        # The input is this rank's own copy under MPI, so after a barrier all have it.
        comm.barrier() if gather.comm.node.count > 1 else work.wait_inputs()


def test_bytes_across(comm: Any) -> None:
    """A foreign byte enters a node once; of contributions, their sums leave it."""
    ranks, nodes = comm.node.local_size, comm.node.count
    before = comm.bytes_across
    for flight in rounds.pair(comm):
        flight.fill(0)
        flight.collective.start().wait_inputs()
    sent = {kind: total - before[kind] for kind, total in comm.bytes_across.items()}
    item = 2 if ranks == 1 else 4  # contributions travel in their own type, sums in fp32
    assert sent == {"all_gather": 301 * 4 * (nodes - 1), "reduce_scatter": 203 * item * (nodes - 1)}
    entered = sum(int.from_bytes(one, "little") for one in comm.exchange(sent["all_gather"].to_bytes(8, "little")))
    assert entered == nodes * (comm.size - ranks) * 301 * 4


class Counted:
    """Stands before an mpi4py communicator and notes the bytes that are sent to other ranks, by call."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.sent = comm, dict[str, int]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            nodes = self.comm.Get_size()
            if name == "Iallgatherv":
                self.sent[name] = args[1][0].itemsize * args[1][1][0] * (nodes - 1)
            elif name == "Ialltoallv":
                self.sent[name] = self.sent.get(name, 0) + args[0][0].itemsize * int(args[0][1].sum())
            elif name == "Isend":
                self.sent[name] = self.sent.get(name, 0) + args[0][0].nbytes
            return getattr(self.comm, name)(*args)

        return call


def test_what_mpi_is_given_is_what_is_counted(comm: Any) -> None:
    if not comm._two_levels:
        pytest.skip("one level")
    real, recorders = (comm._gathers, comm._sums), (Counted(comm._gathers), Counted(comm._sums))
    comm._gathers, comm._sums = recorders
    try:
        before = comm.bytes_across
        gather, reduce = rounds.pair(comm)
        for flight in (gather, reduce):
            flight.fill(0)
            flight.collective.start().wait_inputs()
    finally:
        comm._gathers, comm._sums = real
    after = comm.bytes_across
    sent = [after[kind] - before[kind] for kind in ("all_gather", "reduce_scatter")]
    assert [sum(one.sent.values()) for one in recorders] == sent
    assert set(recorders[0].sent) == ({"Isend"} if comm.chunk_bytes == 200 else {"Iallgatherv"})


def test_groups(comm: Any) -> None:
    """What a group is, and that it gives the bits; groups of groups too."""
    size, ranks = comm.size, comm.node.local_size
    everyone = list(range(size))
    inside = [everyone[first : first + ranks] for first in range(0, size, ranks)]
    across = [everyone[local::ranks] for local in range(ranks)]
    kinds = {"inside": (inside, "node"), "across": (across, "mpi" if size > ranks else "node")}
    if 1 < ranks < size:
        kinds["backwards"] = ([everyone[::-1]], "hierarchical")
        kinds["mixed"] = ([[*everyone[1:], 0]], "mpi")
    for what, (groups, kind) in kinds.items():
        part = comm.split(groups)
        assert part.transport == kind and part.describe().startswith(kind), what
        assert part.bracket == (ranks if kind == "hierarchical" else 1)
        own = next(group for group in groups if comm.rank in group)
        assert part.node.count == len({rank // ranks for rank in own})
        alone = part.split([[rank] for rank in range(part.size)])
        for name in ("skewed_ranks", "out_is_free_after_released"):
            suite.CHECKS[name](part)
            suite.CHECKS[name](alone)
        alone.close()
        part.close()


def test_it_says_what_it_is(comm: Any) -> None:
    nodes, ranks = comm.node.count, comm.node.local_size
    text = f"{nodes} node{'s' if nodes > 1 else ''} of {ranks} rank{'s' if ranks > 1 else ''}"
    assert comm.describe().startswith("hierarchical, ") and comm.describe().endswith(text)


def test_another_bracket_is_refused(comm: Any) -> None:
    ranks = comm.bracket
    assert comm.brackets == (ranks,) == (comm.node.local_size,)
    for other in (k for k in range(1, comm.size + 1) if comm.size % k == 0 and k != ranks):
        comm.bracket = other
        try:
            with pytest.raises(CommError, match=rf"bracket is {other}; transport hierarchical gives {ranks} alone"):
                rounds.Reduce(comm, 3, DTYPES["float32"])
        finally:
            comm.bracket = ranks


def test_the_scratch_is_known_without_anybody_being_there(comm: Any) -> None:
    ranks, float32 = comm.node.local_size, DTYPES["float32"]
    rule = Scratch("hierarchical", comm.size, chunk_bytes=comm.chunk_bytes, local_size=ranks)
    for wire in ("float32", "bfloat16"):
        for each in (0, 1, 1000, 10**9):
            need = comm.scratch_bytes(each * comm.size, float32, DTYPES[wire])
            assert need == rule(each * comm.size, float32, DTYPES[wire])
            assert need <= 2 * SLOT_BYTES + 2**20


def threaded() -> Any:
    return told(2, threaded=True, chunk_bytes=256)


def test_sums_go_on_while_the_program_computes() -> None:
    made = threaded()
    reduce = rounds.Reduce(made, 2000, DTYPES["float32"])
    reduce.fill(0)
    work: Any = reduce.collective.start()
    for round_ in range(20):  # on each rank at other moments, as seen from the pieces
        assert made.exchange(bytes([round_])) == [bytes([round_])] * made.size
    assert work._flight.done.wait(60) and not work._flight.awaited
    reduce.check(0)
    work.wait_inputs()
    made.close()


def test_a_late_rank_of_the_node_holds_nothing_up_but_its_sums() -> None:
    made = threaded()
    reduce, gather = rounds.Reduce(made, 2000, DTYPES["float32"]), rounds.Gather(made, 50, DTYPES["float32"])
    for late in range(made.size):
        reduce.fill(late)
        gather.fill(late)
        works: list[Any] = []
        if made.rank != late:
            works.append(reduce.collective.start())
            made._pump.call("anything else", lambda: None)  # MPI can be called
            assert made.rank // 2 != late // 2 or not works[0]._flight.done.is_set()
        made.barrier()
        if made.rank == late:
            works.append(reduce.collective.start())
        works.append(gather.collective.start())
        for work in works:
            work.wait_inputs()
        gather.check(late)
        reduce.check(late)
    made.close()


@pytest.mark.parametrize(("sizes", "message"), [((3, 1), "3 ranks, node 1 has 1"), ((1, 3), "1 rank, node 1 has 3")])
def test_nodes_of_different_sizes_are_refused(sizes: tuple[int, int], message: str) -> None:
    from mpi4py import MPI

    from mpishard.comm.hierarchical import HierarchicalCommunicator

    rank = MPI.COMM_WORLD.Get_rank()
    if MPI.COMM_WORLD.Get_size() != 4:
        pytest.skip("for four ranks")
    index = int(rank >= sizes[0])
    node = Node(rank - index * sizes[0], sizes[index], index, 2)
    with pytest.raises(ConfigError, match=f"transport is hierarchical and rank 0's node has {message}"):
        HierarchicalCommunicator(MPI.COMM_WORLD.Dup(), NumpyOps(), node=node)


def test_ranks_of_a_node_that_start_different_collectives_are_told() -> None:
    made = threaded()
    one, other = (rounds.Reduce(made, 20, DTYPES["float32"], seed=seed) for seed in range(2))
    numbers = [one.collective._what - 1, other.collective._what - 1]  # type: ignore[attr-defined]
    odd = made.rank % 2
    work = (other if odd else one).collective.start()
    first = made.rank - odd
    peer = f"rank {first + 1} starts reduce-scatter number {numbers[1]}, rank {first} starts reduce-scatter"
    mine = f"rank {first} starts reduce-scatter number {numbers[0]}, rank {first + 1} starts reduce-scatter"
    with pytest.raises(CommError, match="ranks start different collectives: " + (mine if odd else peer)):
        work.wait()
    made.close()


def tree(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The stated bracketing: those half of the nodes apart first."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [parts[node] + parts[node + half] for node in range(half)]
    return parts[0]


@pytest.mark.parametrize(("ranks", "chunk"), TREES)
def test_tree(ranks: int, chunk: int) -> None:
    """Gathers are gathers; sums have the stated order, in several pieces and in one, on skewed ranks."""
    made = told(ranks, algorithm="tree", chunk_bytes=chunk)
    assert made._two_levels and "reduce-scatter tree" in made.describe()
    for name in ("all_gather", "out_is_free_after_released", "results_stay_inside_out", "tallies"):
        suite.CHECKS[name](made)
    naps = iter(np.random.default_rng(made.rank).choice([0.0, 0.0, 0.002, 0.01], 100))
    kinds = [("float64", None), ("float32", None), ("bfloat16", None), ("float32", "bfloat16")]
    for count in (1, 203, 2001):
        reduces = [rounds.Reduce(made, count, DTYPES[a], wire=None if b is None else DTYPES[b]) for a, b in kinds]
        for add in (False, True):
            works = []
            for reduce in reduces:
                reduce.fill(7)
                time.sleep(next(naps))
                works.append(reduce.collective.start(add))
            for reduce, work in zip(reduces, works, strict=True):
                work.wait_inputs()
                fulls = [reduce.values(rank, 7) for rank in range(made.size)]
                nodes = [fulls[first : first + ranks] for first in range(0, made.size, ranks)]
                parts = [rounds.ordered(node, made.rank * count, count, None, reduce.wire, ranks) for node in nodes]
                total = reduce.before(7) + tree(parts) if add else tree(parts)
                rounds.same(reduce.out, total, f"{reduce.dtype} as {reduce.wire}, add={add}, {count}")
    made.close()


def test_unknown_algorithms_are_refused() -> None:
    from mpi4py import MPI

    from mpishard.comm.hierarchical import HierarchicalCommunicator

    with pytest.raises(ConfigError, match="algorithm 'ring' is not one of transport hierarchical; choose one of auto"):
        HierarchicalCommunicator(MPI.COMM_WORLD, NumpyOps(), algorithm="ring")
    if MPI.COMM_WORLD.Get_size() == 3:
        with pytest.raises(ConfigError, match=r"tree is for 2, 4, 8, \.\.\. nodes and there are 3; use alltoall"):
            told(1, algorithm="tree")
