"""Runs that are interrupted, saved and resumed: what the tests of checkpoints share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.array.numpy_ops import NumpyOps
from mpishard.checkpoint import load, save
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.shard.engine import Engine
from tests.shard.training import Job, Outcome, train, train_alone

BASE = Job()
#: interrupted after, and ends after
MIDDLE, END = 3, 5


@functools.cache
def expected(steps: int = END) -> Outcome:
    return train_alone(BASE, steps)


def second_half() -> Outcome:
    """What a resumed run must give: checksum, and losses and norms of its steps alone."""
    whole = expected()
    return Outcome(whole.checksum, whole.losses[MIDDLE:], whole.norms[MIDDLE:])


def alone(job: Job = BASE, **changes: Any) -> Engine:
    return job.engine(LocalCommunicator(NumpyOps()), **changes)


def saved_alone(path: Path, steps: int = 2, job: Job = BASE) -> Engine:
    """Train on one rank, save, and return the engine."""
    engine = alone(job)
    train(engine, job, steps)
    save(engine, path, configuration={"seed": job.seed})
    return engine


def train_and_save(comm: Communicator, path: Path, job: Job = BASE) -> None:
    engine = job.engine(comm)
    train(engine, job, MIDDLE)
    save(engine, path, configuration={"strategy": job.settings.strategy})


def resume(comm: Communicator, path: Path, job: Job = BASE) -> Outcome:
    """Load into an engine that holds NaN, holes included, and train to the end."""
    engine = job.engine(comm)
    for part in engine.state.values():
        for array in part.arrays.values():
            array.fill(np.nan)
    manifest = load(engine, path)
    assert (engine.steps, engine.updates) == (manifest.step, manifest.updates) == (MIDDLE, MIDDLE)
    assert engine.checksum() == manifest.checksum
    return train(engine, job, END - MIDDLE, first=MIDDLE)
