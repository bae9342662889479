"""A forecast of an engine that is there, what that engine used, and an engine on shapes."""

from __future__ import annotations

from typing import Any

from mpishard.array.dtypes import address
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.shape_ops import ShapeOps
from mpishard.comm.dry import DryCommunicator
from mpishard.comm.scratch import transport_scratch
from mpishard.shard.engine import Engine
from mpishard.shard.forecast import Forecast, forecast
from mpishard.shard.ledger import Moment
from mpishard.shard.world import World
from tests.shard.training import Job


def predicted(engine: Engine, transport: str, micro_batch: int = 0, schedule: Any = None, **place: Any) -> Forecast:
    """Predict from the engine's arguments alone, in a world that is imagined, of which ``place`` says more."""
    comm, settings = engine.comm, engine.settings
    world = World.imagined(comm.rank, comm.size, settings, transport=transport, own_bytes=comm.own_bytes, **place)
    states = None if engine.optimizer is None else engine.optimizer.states
    batch = micro_batch or engine._runner.micro_batch
    return forecast(
        engine.model,
        states,
        settings,
        engine.types,
        world,
        micro_batch=batch,
        ops_bytes=engine.ops.own_bytes,
        schedule=schedule,
    )


def used(engine: Engine) -> tuple[Moment, ...]:
    assert engine.ledger is not None
    assert engine.ledger.moments
    return engine.ledger.moments


def blocks_of(engine: Engine) -> dict[str, tuple[int, int]]:
    """Where the arena's blocks are, and how large."""
    return {name: (address(block), block.nbytes) for name, block in engine.arena._blocks.items()}


def dry(job: Job, rank: int, ranks: int, **changes: Any) -> Engine:
    """An engine of one rank, on arrays without memory and a communicator without peers."""
    shapes = ShapeOps(NumpyOps().own_bytes)
    comm = DryCommunicator(rank, ranks, shapes, transport_scratch("threads", ranks))
    return job.engine(comm, ledger=True, **changes)
