"""A small GPT-2, its batches, and a run of it over any communicator: what the checks of whole steps share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.optim import LossScale
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings

__all__ = ["BATCH", "LR", "Run", "engine", "feed", "run", "sizes_of"]

#: Two blocks of rows in attention and several chunks in the head; dropout, so that masks are compared too.
_SIZES = Gpt2(layers=3, width=96, heads=3, sequence=64, vocabulary=509, dropout=0.1, attention_block=24, head_chunk=48)
_SMALL = Gpt2(layers=2, width=12, heads=3, sequence=9, vocabulary=61, dropout=0.1, attention_block=4, head_chunk=7)
#: Samples of a step, each a micro-batch: as many ranks as that can share them.
BATCH = 4
LR = 1e-3
#: Of float16: small enough that no step is skipped, for a loss must be compared with one of the same parameters.
SCALE = 1024.0


class Run(NamedTuple):
    """What a run left: losses and norms of the steps, and the checksum of parameters and optimiser states."""

    losses: list[float]
    norms: list[float]
    checksum: str


def sizes_of(small: bool) -> Gpt2:
    return _SMALL if small else _SIZES


def feed(step: int, vocabulary: int) -> Callable[[int, Any, Any], None]:
    """Return the batches of a step: token by token a rule with noise, so that there is something to learn."""

    def fill(micro: int, inputs: Any, targets: Any) -> None:
        rng = np.random.default_rng([17, step, micro])
        samples, length = inputs.shape
        tokens = np.empty((samples, length + 1), np.int64)
        tokens[:, 0] = rng.integers(0, vocabulary, samples)
        for place in range(length):
            tokens[:, place + 1] = (5 * tokens[:, place] + 3 + rng.integers(0, 4, samples)) % vocabulary
        inputs[...], targets[...] = tokens[:, :-1], tokens[:, 1:]
        targets[:, ::7] = -100

    return fill


def engine(ops: Any, comm: Any, kind: str, small: bool, strategy: str = "full_shard") -> Engine:
    return Engine(
        gpt2(sizes_of(small)),
        comm,
        ops,
        AdamW(),
        Settings(strategy, prefetch=1),
        micro_batch=1,
        global_batch=BATCH,
        seed=11,
        dtype_name=kind,
        loss_scale=LossScale(SCALE) if kind == "float16" else None,
    )


def run(ops: Any, comm: Any, kind: str, steps: int, small: bool) -> Run:
    made, vocabulary = engine(ops, comm, kind, small), sizes_of(small).vocabulary
    results = [made.step(feed(step, vocabulary), lr=LR) for step in range(steps)]
    found = Run([r.loss for r in results], [r.grad_norm for r in results], made.checksum())
    made.close()
    return found
