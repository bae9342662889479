"""From the third step on a step allocates nothing but Python's small change and NumPy's own short buffers.

Each instruction's growth of traced memory, temporaries included, stays below BOUND: a few tiles that depend on no
size of the model. Activations, logits, gradients and the parameters' matrices here are larger.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from mpishard.array.dtypes import Array
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.models.gpt2 import Gpt2
from mpishard.shard.schedule import STRATEGIES, Settings
from tests.shard.tracing import BOUND, OPERATION_BOUND, growths, watched_ops
from tests.shard.training import Job

MANY_TOKENS = Gpt2(layers=1, width=40, heads=1, sequence=256, vocabulary=2000, dropout=0.1, head_chunk=1024)
#: the exact GELU, whole attention, and the logits of half a micro-batch at once
AT_ONCE = Gpt2(
    layers=2,
    width=64,
    heads=2,
    sequence=192,
    vocabulary=3000,
    dropout=0.1,
    gelu_tanh=False,
    attention_block=0,
    head_chunk=10**6,
)


@pytest.mark.parametrize(
    ("sizes", "micro_batch", "settings"),
    [
        (MANY_TOKENS, 36, Settings("full_shard", 1, "none")),
        (AT_ONCE, 4, Settings("full_shard", 0, "block")),
        (AT_ONCE, 4, Settings("no_shard", 1, "none")),
    ],
    ids=["many tokens", "recompute", "no_shard"],
)
def test_nothing_large_is_allocated(sizes: Gpt2, micro_batch: int, settings: Settings) -> None:
    job = Job(sizes, micro_batch, 2, settings=settings)
    growth = growths(job.engine(LocalCommunicator(NumpyOps())), job)
    assert max(growth.values()) < BOUND, growth
    assert growth["what is left"] < 8192


#: tables, hidden features of a micro-batch and the logits of a chunk are half a mebibyte and more each, in 16 bits too
LARGE = Gpt2(layers=1, width=96, heads=2, sequence=64, vocabulary=3000, dropout=0.1, head_chunk=128)
WAYS: dict[str, dict[str, object]] = {
    **{name: {"strategy": name} for name in STRATEGIES},
    "kept": {"strategy": "full_shard", "reshard_after_forward": False, "recompute": "block"},
    "no_sync": {"strategy": "full_shard", "accumulate": "no_sync", "recompute": "block", "prefetch": 0},
}


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *((way, "float32") for way in WAYS),
        *((way, "bfloat16") for way in ("full_shard", "shard_optimizer", "no_shard", "no_sync")),
        *((way, "float16") for way in ("kept", "shard_grad_op")),
    ],
)
def test_a_step_takes_less_than_half_a_mebibyte_outside_the_arena(way: str, kind: str) -> None:
    """From its start to its end, all ranks and all that Python takes together; NumPy's arrays are part of it."""
    ranks = 2
    job = Job(LARGE, 12, 2 * ranks).with_settings(**WAYS[way], **({"group": 1} if way == "hybrid_shard" else {}))
    found: list[tuple[int, int]] = []

    def body(comm: Communicator) -> None:
        engine = job.engine(comm, dtype_name=kind)
        engine.step(job.feed(0), lr=job.lr)
        comm.barrier()
        if comm.rank == 0:
            tracemalloc.start()
        comm.barrier()
        engine.step(None, lr=job.lr)
        comm.barrier()
        if comm.rank == 0:
            domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
            left = tracemalloc.take_snapshot().filter_traces([domain])
            found.append((tracemalloc.get_traced_memory()[1], sum(trace.size for trace in left.traces)))
            tracemalloc.stop()
        comm.barrier()

    try:
        run(ranks, body)
    finally:
        tracemalloc.stop()
    ((peak, left),) = found
    assert peak < 1 << 19
    assert left < 4096


@pytest.mark.parametrize("sizes", [MANY_TOKENS, AT_ONCE], ids=["many tokens", "at once"])
def test_no_operation_allocates_more_than_numpys_buffers(sizes: Gpt2) -> None:
    peaks: dict[str, int] = {}
    job = Job(sizes, 8, 2)
    engine = job.engine(LocalCommunicator(watched_ops(peaks)))
    engine.step(job.feed(0), lr=job.lr)
    engine.step(None, lr=job.lr)
    tracemalloc.start()
    try:
        engine.step(None, lr=job.lr)
        engine.evaluate(None)
    finally:
        tracemalloc.stop()
    assert {"_matmul", "_gelu", "_cross_entropy", "_adamw", "_square_sums", "_ordered_sum"} <= peaks.keys()
    assert max(peaks.values()) < OPERATION_BOUND, peaks


class Careless(NumpyOps):
    """Adds by way of a temporary."""

    def _add(self, x: Array, y: Array, out: Array) -> None:
        np.copyto(out, x + y)


class Collecting(NumpyOps):
    """Turns all tokens into Python numbers at once."""

    def _embedding_backward(self, tokens: Array, dy: Array, dtable: Array, add: bool) -> None:
        assert tokens.tolist()
        super()._embedding_backward(tokens, dy, dtable, add)


@pytest.mark.parametrize(
    ("make", "guilty"),
    [(Careless, ["Forward", "Backward", "Recompute"]), (Collecting, ["Backward(stage='embed'"])],
)
def test_a_temporary_is_seen(make: Callable[[], NumpyOps], guilty: list[str]) -> None:
    job = Job(MANY_TOKENS, 36, 1)
    growth = growths(job.engine(LocalCommunicator(make())), job)
    above = [name for name, size in growth.items() if size >= BOUND]
    assert above
    assert all(name.startswith(tuple(guilty)) for name in above)
