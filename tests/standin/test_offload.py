"""Masters and optimiser states in pinned host memory: the bits of keeping them on the device, and all is ordered."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard.array.cupy_ops import CupyOps
from mpishard.array.dtypes import Array
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.array.pinned import SLOTS, PinnedHost
from mpishard.checkpoint import load, load_weights, save
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.errors import ArenaError, ConfigError
from mpishard.nn.model import freeze
from mpishard.optim.adamw import AdamW
from mpishard.shard import offload
from mpishard.shard.engine import Engine
from mpishard.shard.whole import parameter_names
from tests.cli.processes import mpiexec
from tests.shard.training import Outcome, train
from tests.standin import Trace, installed, mutate, ordering
from tests.standin.training import JOB, check_forecast, labelled, third_step

SHORT = replace(JOB, micros=2)
KINDS = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "ELEMENTS", 1024)


@contextlib.contextmanager
def machine(trace: Trace | None = None, late: str = "") -> Iterator[None]:
    with installed(trace, late=late):
        yield
        gc.collect()  # engines give back what they have of this machine


def engine_of(kind: str, moved: str, **changes: Any) -> Engine:
    return SHORT.engine(LocalCommunicator(CupyOps()), dtype_name=kind, offload=moved, **changes)


@functools.cache
def trained(kind: str) -> tuple[Outcome, dict[str, int]]:
    """What training comes to without offload, and its memory."""
    with machine():
        engine = engine_of(kind, "none")
        return train(engine, SHORT, 3), engine.memory()


def plain(kind: str) -> Outcome:
    return trained(kind)[0]


# --- in one process


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_and_the_memory(kind: str) -> None:
    trace = Trace()
    with machine(trace):
        engine = engine_of(kind, "optimizer", ledger=True)
        labelled(trace, engine)
        held, count = engine.memory(), sum(part.stop - part.start for part in engine.state.values())
        assert held["optimizer"] == held["masters"] == 0
        assert engine.host_memory() == count * (8 if kind == "float32" else 12)
        assert held["parameters"] == count * (4 if kind == "float32" else 2)
        slots = SLOTS * (2 if kind == "float32" else 3) * offload.ELEMENTS * 4
        assert held["staging"] == trained(kind)[1]["staging"] + slots
        assert train(engine, SHORT, 3) == plain(kind)
        check_forecast(engine, "optimizer")
        asked = third_step(engine, SHORT)
        assert asked["allocations"] == 0 and asked["waits"] <= 2
        engine.checksum()  # waits for the last copies
        engine.ops.stream.synchronize()
        del engine
    ordering.assert_ordered(trace)


def test_chunks_have_what_is_updated_of_them() -> None:
    segments = ((0, 5, 0.1), (5, 6, 0.0), (8, 20, 0.2), (23, 24, 0.3))
    for size in range(1, 26):
        found = {}
        for start in range(0, 25, size):
            for first, last, decay in offload._clipped(segments, start, min(start + size, 25)):
                assert 0 <= first < last <= size
                found |= dict.fromkeys(range(start + first, start + last), decay)
        assert found == {i: decay for first, last, decay in segments for i in range(first, last)}


@pytest.mark.parametrize("late", ["needed", "others"])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_streams_that_run_late(kind: str, late: str) -> None:
    with machine(late=late):
        assert train(engine_of(kind, "optimizer"), SHORT, 3) == plain(kind)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_one_chunk_and_poisoned_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "ELEMENTS", 1 << 20)
    with machine():
        assert train(engine_of(kind, "optimizer", poison=True), SHORT, 3) == plain(kind)


@dataclass(frozen=True)
class Additions:
    """An optimiser of other operations, with or without a state, which leaves rounding to the engine."""

    states: tuple[str, ...] = ("total",)
    decay: float = 0.0

    def clip(self, norm: float) -> float:
        return 1.0

    def update(
        self, ops: Ops, arrays: Mapping[str, Array], segments: Any, factor: float, lr: float, count: int
    ) -> None:
        by = arrays["grad"]
        for name in self.states:
            by = arrays[name]
            ops.add(by, arrays["grad"], by)
        ops.multiply(by, arrays["grad"], arrays["param"], add=True)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_other_optimisers_and_frozen_parameters(kind: str) -> None:
    with machine():
        model = freeze(SHORT.model, ["h.0.mlp.*", "h.1.*"])
        found = [
            train(engine_of(kind, moved, optimizer=optimizer, model=model), SHORT, 2)
            for moved in offload.OFFLOAD
            for optimizer in (Additions(), Additions(states=()), AdamW())
        ]
    assert found[:3] == found[3:] and len(set(found)) == 3


@pytest.mark.parametrize(("first", "second"), [("none", "optimizer"), ("optimizer", "none")])
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("late", ["", "needed"])
def test_checkpoints_do_not_know_where_arrays_were(
    kind: str, first: str, second: str, late: str, tmp_path: Path
) -> None:
    with machine(late=late):
        one = engine_of(kind, first)
        train(one, SHORT, 2)
        save(one, tmp_path / "saved", configuration={})
        other = engine_of(kind, second)
        load(other, tmp_path / "saved")
        assert other.checksum() == one.checksum()
        assert train(other, SHORT, 1, 2).checksum == plain(kind).checksum
        weights = engine_of(kind, second, seed=9)
        load_weights(weights, tmp_path / "saved" / "model.safetensors")
        for name in parameter_names(one.state):
            assert (weights.parameter(name) == one.parameter(name)).all(), name
        assert weights.evaluate(SHORT.feed(0)) == one.evaluate(SHORT.feed(0))


def test_predictions_without_an_optimiser() -> None:
    sample = np.arange(SHORT.sizes.sequence)
    with machine():
        found = [engine_of("bfloat16", moved, optimizer=None).predict(sample, 2) for moved in offload.OFFLOAD]
    assert (found[0] == found[1]).all()


def test_reading_parameters_without_waiting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace()
    with machine(trace):
        from mpishard.array.cupy_pinned import CupyPinnedHost

        engine = engine_of("bfloat16", "optimizer")
        labelled(trace, engine)
        for step in range(2):  # the first one's tables make the host wait now and then
            engine.step(SHORT.feed(step), lr=0.1)
        with monkeypatch.context() as patch:
            patch.setattr(CupyPinnedHost, "settle", lambda self: None)
            engine.parameter(parameter_names(engine.state)[0])
        engine.checksum()
        del engine
    conflicts = [str(conflict) for conflict in ordering.check(trace)]
    assert any("in host memory" in text and "host read" in text for text in conflicts), conflicts


# --- what cannot be had


def test_what_cannot_be_offloaded() -> None:
    comm = LocalCommunicator(NumpyOps())
    with pytest.raises(ConfigError, match=r"^offload is 'optimizer' and arrays are in host memory already \(cpu\); .*"):
        SHORT.engine(comm, offload="optimizer")
    with pytest.raises(ConfigError, match=r"^offload is 'disk'; it must be one of none, optimizer$"):
        SHORT.engine(comm, offload="disk")


def test_memory_that_cuda_does_not_give() -> None:
    with machine():
        import cupy

        def refused(size: int, flags: int) -> int:
            raise cupy.cuda.runtime.CUDARuntimeError(2)

        before, cupy.cuda.runtime.hostAlloc = cupy.cuda.runtime.hostAlloc, refused
        with pytest.raises(ConfigError) as caught:
            engine_of("float32", "optimizer")
        cupy.cuda.runtime.hostAlloc = before
    assert str(caught.value).startswith("rank 0 cannot keep the optimiser in host memory (")
    assert "bytes of pinned host memory were asked of CUDA" in str(caught.value)
    assert str(caught.value).endswith("; use more ranks, or leave offload out")


class Counted(PinnedHost):
    """Host memory of the tests' own, of 64 bytes at most."""

    def _allocate(self, nbytes: int) -> Array:
        if nbytes > 64:
            raise MemoryError(f"{nbytes} bytes")
        return np.empty(nbytes, np.uint8)

    def copy_in(self, slot: int, pairs: Any) -> None: ...
    def copy_out(self, slot: int, pairs: Any) -> None: ...
    def settle(self) -> None: ...


def test_what_one_rank_cannot_have_all_are_told() -> None:
    def take(comm: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            offload.take_together(comm, Counted(NumpyOps()), 64 + comm.rank)
        return str(caught.value)

    told = run(2, take)
    assert told[0] == told[1] and told[0].startswith("rank 1 cannot keep the optimiser in host memory (65 bytes)")


def test_no_more_than_was_taken_is_given_out() -> None:
    pinned = Counted(NumpyOps())
    pinned.take(64)
    assert pinned.reserve(3, np.dtype(np.float32)).shape == (3,) and pinned.nbytes == 64
    with pytest.raises(ArenaError, match="pinned host memory: 128 bytes are needed and 64 were planned"):
        pinned.reserve(1, np.dtype(np.float32))


# --- several ranks


def case(kind: str, strategy: str, moved: bool = True) -> str:
    return f"{kind},{strategy},1,none" + ",optimizer" * moved


STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard:1")
CASES = {
    1: (case("float32", "full_shard", False), case("bfloat16", "full_shard", False), case("float32", "full_shard")),
    2: (
        *(case(kind, strategy) for kind in KINDS[:2] for strategy in STRATEGIES),
        *(case(kind, "hybrid_shard:1", False) for kind in KINDS[:2]),
    ),
    3: (case("float32", "full_shard"), case("bfloat16", "full_shard"), case("bfloat16", "no_shard")),
}


@functools.cache
def folder_of(ranks: int) -> Path:
    """Run a job once; return where its results and records are. Each rank has judged its record."""
    folder = Path(tempfile.mkdtemp(prefix=f"standin-offload-{ranks}-"))
    ended = mpiexec("-m", "tests.standin.training", "staged", str(folder), *CASES[ranks], ranks=ranks, seconds=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def outcome(ranks: int, name: str) -> dict[str, Any]:
    return dict(json.loads((folder_of(ranks) / f"{name}.json").read_text()))


@pytest.mark.jobs
@pytest.mark.parametrize("ranks", CASES)
def test_ranks_have_the_bits_of_one_without_offload(ranks: int) -> None:
    for name in CASES[ranks]:
        kind, strategy = name.split(",")[:2]
        found = outcome(ranks, name)
        asked = found.pop("third_step")
        assert asked["allocations"] == 0 and asked["waits"] <= 2, name
        alike = (ranks, strategy) if ":" in strategy else (1, "full_shard")
        like = outcome(alike[0], case(kind, alike[1], False))
        assert found == {key: like[key] for key in found}, name


#: a place in mpishard/array/cupy_pinned.py that orders something -> words of the conflict that is there without it
ORDERS = {
    "self._in.wait_event(events.left)": ("staging+", "copy host to device (write)"),
    "events.left.record(self._out)": ("staging+", "copy host to device (write)"),
    "events.came.record(self._in)": ("staging+", "copy host to device (write)", "adamw_cast (write)"),
    "self._stream.wait_event(events.came)": ("staging+", "copy host to device (write)", "adamw_cast (write)"),
    "events.used.record(self._stream)": ("staging+",),
    "self._out.wait_event(events.used)": ("staging+",),
    "self._out.synchronize()": ("in host memory+", "copy device to host (write)", "host read (read)"),
    "stream.synchronize()": ("in host memory+", "copy device to host (write)", "free (write)"),
}


@pytest.mark.jobs
def test_each_order_is_needed() -> None:
    name = case("bfloat16", "full_shard")
    traces = [Trace.load(path) for path in sorted(folder_of(2).glob(f"{name}.*.trace"))]
    assert len(traces) == 2
    found = {}
    for row in mutate.table(traces):
        file, _, line = row.site.partition(":")
        if file == "mpishard/array/cupy_pinned.py":
            found[Path(file).read_text().splitlines()[int(line) - 1].strip()] = row.exposes
    assert found.keys() == ORDERS.keys()
    for place, words in ORDERS.items():
        assert all(word in found[place] for word in words), (place, found[place])
