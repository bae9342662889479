"""Initial values: the same bits for every number of ranks and strategy, and the distribution asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mpishard.array.dtypes import Array
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from mpishard.comm.dry import DryCommunicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.scratch import transport_scratch
from mpishard.comm.threads import run
from mpishard.models.gpt2 import Gpt2
from mpishard.shard.schedule import STRATEGIES
from tests.shard.training import SMALL, Job


def job_of(ranks: int, strategy: str = "full_shard", sizes: Gpt2 = SMALL, seed: int = 5) -> Job:
    group = max(1, ranks // 2) if strategy == "hybrid_shard" and ranks % 2 == 0 else 0
    return Job(sizes, 1, ranks, seed).with_settings(strategy=strategy, group=group)


def held(comm: Communicator, job: Job) -> dict[str, list[tuple[int, Array]]]:
    """What a rank holds of each parameter, by public name: (first element, values)."""
    engine = job.engine(comm)
    found: dict[str, list[tuple[int, Array]]] = {}
    for part in engine.state.values():
        for slot in part.layout.slots:
            begin, end = max(slot.offset, part.start), min(slot.offset + slot.size, part.stop)
            if begin < end:
                values = part.arrays["param"][begin - part.start : end - part.start]
                found.setdefault(part.unit.prefix + slot.name, []).append((begin - slot.offset, values.copy()))
        for name in ("grad", "exp_avg", "exp_avg_sq"):
            assert not part.arrays[name].any()
    return found


def gathered(ranks: int, strategy: str, sizes: Gpt2 = SMALL) -> dict[str, Array]:
    """Each parameter, put together from what the ranks hold; no communication is needed to make it."""
    job = job_of(ranks, strategy, sizes)
    whole: dict[str, Array] = {}
    for unit in job.model.units:
        for spec in unit.specs:
            whole[unit.prefix + spec.name] = np.full(int(np.prod(spec.shape)), np.nan, np.float32)
    for rank in range(ranks):
        ops = NumpyOps()
        for name, pieces in held(DryCommunicator(rank, ranks, ops, transport_scratch("threads", ranks)), job).items():
            for start, values in pieces:
                whole[name][start : start + values.size] = values
    return whole


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_equal_on_any_number_of_ranks(ranks: int, strategy: str) -> None:
    """Widths are odd, so shards end inside pairs of normal numbers."""
    expected = gathered(1, "full_shard")
    found = gathered(ranks, strategy)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name
        assert np.isfinite(values).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_checksum_names_them(ranks: int) -> None:
    def checksum(comm: Communicator, strategy: str = "full_shard", **changes: object) -> str:
        return replace(job_of(ranks, strategy), **changes).engine(comm).checksum()

    alone = job_of(1).engine(LocalCommunicator(NumpyOps())).checksum()
    for strategy in STRATEGIES:
        assert run(ranks, lambda comm, strategy=strategy: checksum(comm, strategy)) == [alone] * ranks
    assert alone not in run(ranks, lambda comm: checksum(comm, seed=6))


def test_the_checksum_sees_every_bit_and_place() -> None:
    engine = job_of(1).engine(LocalCommunicator(NumpyOps()))
    seen = {engine.checksum()}
    for unit in ("root", "h.3"):
        for array in (engine.state[unit].arrays[name] for name in ("param", "exp_avg", "exp_avg_sq")):
            for slot in engine.state[unit].layout.slots:
                for at in (slot.offset, slot.offset + slot.size - 1):
                    before = array[at]
                    array[at] = np.nextafter(before, np.float32(9))
                    seen.add(engine.checksum())
                    array[at] = before
    assert len(seen) == 1 + 3 * 2 * (4 + 12)
    first, second = engine.state["h.0"].arrays["param"][40:42].tolist()
    engine.state["h.0"].arrays["param"][40:42] = second, first
    assert engine.checksum() not in seen


def test_distribution() -> None:
    sizes = Gpt2(layers=2, width=64, heads=2, sequence=50, vocabulary=301, std=0.1)
    for name, values in gathered(3, "full_shard", sizes).items():
        if name.endswith("bias"):
            assert not values.any()
        elif ".ln_" in name or name.startswith("ln_f"):
            assert (values == 1).all()
        else:
            std = 0.05 if name == "wpe.weight" or "c_proj" in name else 0.1
            assert abs(values.std() - std) < 4 * std / np.sqrt(2 * values.size)
            assert abs(values.mean()) < 4 * std / np.sqrt(values.size)


def test_no_two_parameters_are_alike() -> None:
    """Blocks are the same layer, and yet each draws its own numbers."""
    values = [v[:50].tobytes() for n, v in gathered(1, "full_shard").items() if n.endswith("weight") and "ln" not in n]
    assert len(set(values)) == len(values)
