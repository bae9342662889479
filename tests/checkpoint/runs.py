"""Runs that are interrupted, saved and resumed: what the tests of checkpoints share."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
from collections.abc import Callable
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


def sealed(table: dict[str, Any]) -> str:
    """A manifest's text with the digest of what it says: BLAKE2b-128 of all else, sorted and without spaces."""
    rest = {key: value for key, value in table.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return json.dumps({**rest, "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says, as somebody would who knows how its digest is made."""
    table = json.loads((folder / "manifest.json").read_text())
    change(table)
    (folder / "manifest.json").write_text(sealed(table))


def unreadable(path: Path, kind: str) -> None:
    """Put something in place of a file that has no end, or that waits for ever when it is opened."""
    if path.exists():
        path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        here = os.open(path.parent, os.O_RDONLY)  # names of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


UNREADABLE = ["fifo", "socket", "folder", "device"]
