from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_tiles import aligned
from mpishard.array.shape_ops import ShapeOps
from mpishard.comm import Node
from mpishard.comm.dry import DryCommunicator
from mpishard.comm.scratch import SLOT_BYTES, transport_scratch
from mpishard.errors import CommError, ConfigError

F2, F4, U1 = DTYPES["float16"], DTYPES["float32"], DTYPES["uint8"]


def dry(rank: int = 1, size: int = 4) -> DryCommunicator:
    return DryCommunicator(rank, size, ShapeOps(), transport_scratch("mpi", size), local_size=2)


def test_a_step_runs_on_arrays_without_memory() -> None:
    comm = dry()
    out = comm.allocate(1 << 38, F4)  # a tebibyte
    gather = comm.bind_all_gather(out[1 << 36 : 1 << 37], out)
    full, scratch = comm.allocate(4000, F2), comm.allocate(comm.scratch_bytes(4000, F2, F2), U1)
    reduce = comm.bind_reduce_scatter(full, comm.allocate(1000, F4), scratch)
    room = comm.allocate(comm.scratch_bytes(1 << 38, F4, F2), U1)
    rounded = comm.bind_reduce_scatter(out, comm.allocate(1 << 36, F4), room, F2)
    for _ in range(2):
        works = [gather.start(), reduce.start(add=True), rounded.start()]
        for work in works:
            work.wait()
            work.released()
            work.wait_inputs()
    comm.broadcast(full, 3)
    comm.all_reduce(comm.allocate(9, F4))
    comm.barrier()
    assert not full.any()
    assert comm.tallies["all_gather"].calls == 3  # one of them within all_reduce
    assert comm.tallies["all_gather"].bytes == 2 * 3 * (1 << 38) + 3 * 4 * 3


def test_nothing_is_moved_or_written() -> None:
    comm = dry(0, 2)
    shard, out = np.arange(3, dtype=F4), np.full(6, 7, F4)
    comm.bind_all_gather(shard, out).start().wait_inputs()
    full, total, scratch = np.arange(4, dtype=F4), np.full(2, 7, F4), aligned(128, U1)
    scratch.fill(7)
    for wire in (F4, F2):
        comm.bind_reduce_scatter(full, total, scratch, wire).start().wait_inputs()
    assert (out == 7).all() and (total == 7).all() and (scratch == 7).all()


def test_bindings_are_validated_as_everywhere() -> None:
    comm = dry()
    with pytest.raises(CommError, match="out holds 15"):
        comm.bind_all_gather(comm.allocate(4, F4), comm.allocate(15, F4))
    with pytest.raises(CommError, match="there is no scratch; 64 bytes are needed"):
        comm.bind_reduce_scatter(comm.allocate(16, F4), comm.allocate(4, F4))


def test_scratch_is_that_of_the_transport_stood_for() -> None:
    assert dry().scratch_bytes(1 << 30, F4, F4) == transport_scratch("mpi", 4)(1 << 30, F4, F4) == 2 * SLOT_BYTES
    assert dry().scratch_rule == transport_scratch("mpi", 4)
    by_hand = DryCommunicator(0, 4, ShapeOps(), lambda count, kind, wire: count * wire.itemsize)
    assert by_hand.scratch_bytes(12, F4, F2) == 24
    assert by_hand.split([[0, 1], [2, 3]]).scratch_bytes(12, F4, F2) == 24
    with pytest.raises(ConfigError, match="give it a Scratch"):
        by_hand.scratch_rule  # noqa: B018


def test_nodes_hold_as_many_ranks_as_was_said() -> None:
    assert [dry(rank).node for rank in range(4)] == [Node(r % 2, 2, r // 2, 2) for r in range(4)]
    assert DryCommunicator(3, 4, ShapeOps(), transport_scratch("mpi", 4)).node == Node(3, 4, 0, 1)


def test_everybody_says_what_this_rank_says() -> None:
    assert dry().exchange(b"abc") == [b"abc"] * 4


def test_split() -> None:
    part = dry(3).split([[0, 2], [3, 1]])
    assert (part.rank, part.size, part.transport) == (0, 2, "dry")
    assert part.scratch_rule == transport_scratch("mpi", 2)
    assert part.node == Node(0, 1, 0, 2)  # ranks 3 and 1 are on two nodes
    assert part.split([[0], [1]]).size == 1
    with pytest.raises(ConfigError, match="exactly once"):
        dry().split([[0, 1]])


@pytest.mark.parametrize("kind", ["dry", "local"])
def test_abort_ends_the_process(kind: str) -> None:
    code = (
        "from mpishard.array.shape_ops import ShapeOps; from mpishard.comm import LocalCommunicator; "
        "from mpishard.comm.dry import DryCommunicator; "
        f"comm = DryCommunicator(0, 2, ShapeOps(), max) if {kind == 'dry'} else LocalCommunicator(ShapeOps()); "
        "comm.abort('no more', 7)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "no more\n")
