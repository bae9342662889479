"""A small GPT of odd sizes, its data, and runs of it on any communicator: what the tests of the engine share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpishard.array.constants import IGNORE
from mpishard.array.numpy_ops import NumpyOps
from mpishard.array.ops import Ops
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.nn.model import Model
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings

SMALL = Gpt2(layers=4, width=15, heads=3, sequence=7, vocabulary=29, dropout=0.1, attention_block=5, head_chunk=5)
#: small enough that the norm is above it in some steps and below it in others
LIMIT = 1.0
MICROS = 12
DEFAULT = Settings()


@dataclass(frozen=True)
class Job:
    """One training job: all that decides its bits, and what must not decide them (``settings``, ``poison``)."""

    sizes: Gpt2 = SMALL
    micro_batch: int = 2
    micros: int = MICROS
    seed: int = 5
    lr: float = 0.01
    settings: Settings = DEFAULT
    poison: bool = False

    def with_settings(self, **changes: Any) -> Job:
        return replace(self, settings=replace(self.settings, **changes))

    @property
    def model(self) -> Model:
        return gpt2(self.sizes)

    def engine(self, comm: Communicator, ops: Ops | None = None, **changes: Any) -> Engine:
        options: dict[str, Any] = {
            "micro_batch": self.micro_batch,
            "global_batch": self.micro_batch * self.micros,
            "seed": self.seed,
            "poison": self.poison,
        }
        model = changes.pop("model", None) or self.model
        settings = changes.pop("settings", self.settings)
        optimizer = changes.pop("optimizer", AdamW(limit=LIMIT))
        return Engine(model, comm, ops or comm.ops, optimizer, settings, **{**options, **changes})

    def feed(self, step: int) -> Callable[[int, np.ndarray, np.ndarray], None]:
        """Tokens and targets of one step; micro-batches have unequal numbers of targets that count."""

        def fill(micro: int, inputs: np.ndarray, targets: np.ndarray) -> None:
            draw = np.random.Generator(np.random.Philox(key=[self.seed, step * 1000 + micro]))
            inputs[...] = draw.integers(0, self.sizes.vocabulary, inputs.shape)
            targets[...] = (inputs * 3 + 1) % self.sizes.vocabulary
            targets[draw.random(targets.shape) < (micro % 5) / 8] = IGNORE

        return fill


@dataclass(frozen=True)
class Outcome:
    """What must be the same: compare with ``==``."""

    checksum: str
    losses: tuple[float, ...]
    norms: tuple[float, ...]


def train(engine: Engine, job: Job, steps: int, first: int = 0) -> Outcome:
    """Train and return the checksum of parameters and moments, the losses and the norms."""
    results = [engine.step(job.feed(step), lr=job.lr) for step in range(first, first + steps)]
    return Outcome(engine.checksum(), tuple(r.loss for r in results), tuple(r.grad_norm for r in results))


def train_alone(job: Job, steps: int) -> Outcome:
    return train(job.engine(LocalCommunicator(NumpyOps())), job, steps)


def train_threads(ranks: int, job: Job, steps: int, **changes: Any) -> list[Outcome]:
    """Return what every rank of a run in threads has."""
    return run(ranks, lambda comm: train(job.engine(comm, **changes), job, steps), deadline=60.0)
