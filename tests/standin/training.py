"""Train on the stand-in as ranks of an MPI job.

``mpiexec -n 2 python -m tests.standin.training TRANSPORT FOLDER CASE...``
For each case rank 0 writes FOLDER/CASE.json, what the run came to, and each rank FOLDER/CASE.RANK.trace, what ordered
what. A case is ``dtype,strategy,prefetch,recompute``, and ``,optimizer`` where that is offloaded; the ranks of a group
stand behind ``hybrid_shard`` and a colon. All ranks share the stand-in's devices, one each.
``STANDIN_LATE`` runs the streams as late as order allows (machine.py). ``STANDIN_WITHOUT`` names a method of
comm/lane.py's Marks that then does nothing: a wait that was forgotten.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI  # noqa: F401 - starts MPI before anything is recorded

from mpishard.array.device import operations
from mpishard.comm.base import Communicator
from mpishard.comm.lane import Marks
from mpishard.comm.launch import world
from mpishard.models.gpt2 import Gpt2
from mpishard.shard import offload
from mpishard.shard.engine import Engine
from mpishard.shard.forecast import forecast
from mpishard.shard.schedule import Settings
from tests.shard.training import Job, Outcome, train
from tests.standin import Trace, installed, ordering

#: odd sizes, dropout, blocks of attention and chunks of the head that leave a rest
SIZES = Gpt2(
    layers=2, width=24, heads=2, sequence=7, vocabulary=37, dropout=0.1, attention_block=4, head_chunk=9, std=0.1
)
JOB = Job(SIZES, micro_batch=2, micros=6, lr=0.02)
STEPS = 2


def job_of(case: str) -> tuple[Job, str]:
    """Return the job of a case, and its element type."""
    kind, strategy, prefetch, recompute = case.split(",")[:4]
    name, _, group = strategy.partition(":")
    return replace(JOB, settings=Settings(name, int(prefetch), recompute, group=int(group or 0))), kind


def offload_of(case: str) -> str:
    """Return what a case offloads."""
    return case.split(",")[4] if case.count(",") == 4 else "none"


def result(engine: Engine, job: Job) -> Outcome:
    """Train and evaluate; the held-out loss stands among the losses."""
    trained = train(engine, job, STEPS)
    loss = engine.evaluate(job.feed(STEPS)).loss
    return replace(trained, losses=(*trained.losses, loss))


def third_step(engine: Engine, job: Job) -> dict[str, int]:
    """Return what one more step asks of the device."""
    engine.ops.counters.reset()
    engine.step(job.feed(0), lr=0.0)
    return asdict(engine.ops.counters)


def check_forecast(engine: Engine, moved: str) -> None:
    """Compare the memory of an engine with a ledger, after a step, with what is predicted: to the byte."""
    found = forecast(
        engine.model, engine.states, engine.settings, engine.types, engine.world, micro_batch=JOB.micro_batch,
        ops_bytes=engine.ops.own_bytes, offload=moved,
    )  # fmt: skip
    assert found.held == engine.memory(), (found.held, engine.memory())
    assert found.host == engine.host_memory(), (found.host, engine.host_memory())
    assert engine.ledger is not None
    assert found.moments == engine.ledger.moments


def labelled(trace: Trace, engine: Engine) -> None:
    """Name the engine's blocks in what is reported."""
    for category, block in engine.arena._blocks.items():
        if block.nbytes:
            trace.label(block.data.ptr, block.nbytes, category)
    for unit, part in engine.state.items():
        for name in sorted(part.offloaded & set(part.arrays)):
            array = part.arrays[name]
            trace.label(array.ctypes.data, array.nbytes, f"{name} of {unit} in host memory")
    trace.name_stream(engine.ops.stream, "compute")


def gather_and_leave(comm: Communicator) -> None:
    """After close() nothing of a communicator is in flight, so that its caller's buffers may go at once."""
    kind = np.dtype(np.float32)
    shard, out = comm.ops.empty(64, kind), comm.ops.empty(64 * comm.size, kind)
    comm.ops.fill(shard, 1.0)
    collective = comm.bind_all_gather(shard, out)
    collective.start().wait()
    comm.close()
    del shard, out, collective
    gc.collect()


def run_case(transport: str, case: str, trace: Trace) -> tuple[int, dict[str, Any]]:
    """Train one case; return this rank and what it came to."""
    (job, kind), moved = job_of(case), offload_of(case)
    comm: Communicator = world(lambda local_rank: operations("cuda", local_rank), transport)
    assert comm.transport == transport, comm.transport
    engine = job.engine(comm, dtype_name=kind, offload=moved, ledger=True)
    labelled(trace, engine)
    found = {**asdict(result(engine, job)), "third_step": third_step(engine, job)}
    check_forecast(engine, moved)
    gather_and_leave(comm)
    engine.ops.stream.synchronize()  # memory is about to be freed, and the last update runs
    if engine.pinned is not None:
        # Who gives host memory back waits for the copies of that update; only then the slots on the device may go.
        arena = engine.arena
        del engine
        gc.collect()
        del arena
    return comm.rank, found


def main(transport: str, folder: Path, cases: list[str]) -> None:
    """Run the cases one after another, each with devices, a communicator and a record of its own."""
    if forgotten := os.environ.get("STANDIN_WITHOUT"):
        assert callable(getattr(Marks, forgotten))
        setattr(Marks, forgotten, lambda self, *streams: None)
    offload.ELEMENTS = 1024  # so that small units are several chunks
    for case in cases:
        trace = Trace(f"{transport} {case}")
        with installed(trace, devices=8, late=os.environ.get("STANDIN_LATE", "")):
            rank, found = run_case(transport, case, trace)
            gc.collect()  # what is left of the case gives its handles back to the devices that it had
        trace.save(folder / f"{case}.{rank}.trace")
        conflicts = [str(conflict) for conflict in ordering.check(trace)]
        assert not conflicts, "\n".join(conflicts)
        if rank == 0:
            (folder / f"{case}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
