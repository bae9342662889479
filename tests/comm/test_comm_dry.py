from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mpishard.array.dtypes import DTYPES
from mpishard.array.shape_ops import ShapeOps
from mpishard.comm.dry import DryCommunicator
from mpishard.errors import CommError, ConfigError

F2, F4 = DTYPES["float16"], DTYPES["float32"]


def dry(rank: int = 1, size: int = 4) -> DryCommunicator:
    return DryCommunicator(rank, size, ShapeOps(), lambda count: count)


def test_a_step_runs_on_arrays_without_memory() -> None:
    comm = dry()
    out = comm.allocate(1 << 38, F4)  # a tebibyte
    gather = comm.bind_all_gather(out[1 << 36 : 1 << 37], out)
    full, scratch = comm.allocate(4000, F2), comm.allocate(comm.scratch_elements(4000), F2)
    reduce = comm.bind_reduce_scatter(full, comm.allocate(1000, F4), scratch)
    for _ in range(2):
        works = [gather.start(), reduce.start(add=True)]
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
    full, total = np.arange(4, dtype=F4), np.full(2, 7, F4)
    comm.bind_reduce_scatter(full, total, np.full(4, 7, F4)).start().wait_inputs()
    assert (out == 7).all() and (total == 7).all()


def test_bindings_are_validated_as_everywhere() -> None:
    comm = dry()
    with pytest.raises(CommError, match="out holds 15"):
        comm.bind_all_gather(comm.allocate(4, F4), comm.allocate(15, F4))
    with pytest.raises(CommError, match="scratch holds 0 elements, 16 are needed"):
        comm.bind_reduce_scatter(comm.allocate(16, F4), comm.allocate(4, F4))


def test_scratch_is_that_of_the_transport_stood_for() -> None:
    assert dry().scratch_elements(12) == 12
    assert DryCommunicator(0, 4, ShapeOps(), lambda count: count // 4).scratch_elements(12) == 3


def test_everybody_says_what_this_rank_says() -> None:
    assert dry().exchange(b"abc") == [b"abc"] * 4


def test_split() -> None:
    part = dry(3).split([[0, 2], [3, 1]])
    assert (part.rank, part.size, part.transport, part.scratch_elements(5)) == (0, 2, "dry", 5)
    with pytest.raises(ConfigError, match="exactly once"):
        dry().split([[0, 1]])


@pytest.mark.parametrize("kind", ["dry", "local"])
def test_abort_ends_the_process(kind: str) -> None:
    code = (
        "from mpishard.array.shape_ops import ShapeOps; from mpishard.comm import LocalCommunicator; "
        "from mpishard.comm.dry import DryCommunicator; "
        f"comm = DryCommunicator(0, 2, ShapeOps(), int) if {kind == 'dry'} else LocalCommunicator(ShapeOps()); "
        "comm.abort('no more', 7)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "no more\n")
