"""One suite for every model: the derivative of its loss, and the same bits however it is trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpishard.array.constants import IGNORE
from mpishard.array.dtypes import Array, dtype
from mpishard.comm.base import Communicator
from mpishard.comm.threads import run
from mpishard.nn.embedding import Embedding
from mpishard.nn.layer import LossLayer
from mpishard.nn.model import Model
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.feed import Batch, batch
from mpishard.shard.library import full_shard
from mpishard.testing.contract import ContractError, require
from mpishard.testing.layer import DERIVATIVE, STEP
from mpishard.testing.staged import telling

__all__ = ["check_model"]

_STEPS = 2


class _Run(NamedTuple):
    """What must be the same; named as it is told."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    evaluation: float
    predictions: bytes
    checksum: str


class _Way(NamedTuple):
    """What must not matter."""

    ranks: int
    strategy: str
    prefetch: int
    recompute: str

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.strategy}, prefetch {self.prefetch}, recompute {self.recompute}"


def check_model(
    make_model: Callable[[], Model],
    *,
    tokens: int = 0,
    micro_batch: int = 2,
    ranks: Sequence[int] = (1, 2, 3),
    seed: int = 0,
) -> float:
    """Check a model through the engine, in float64; return the worst relative error of a directional derivative.

    Args:
        make_model: gives the model; choose odd sizes, and units of some thousand elements: shards are whole chunks of
            512, so a smaller unit lies on one rank alone. Each engine gets a fresh one.
        tokens: inputs are whole numbers below this one; 0 takes the vocabulary of an embedding.
        micro_batch: samples of a micro-batch. A step has the least number of them that all of ``ranks`` divide.
        ranks: numbers of ranks to compare, in threads of this process.

    The gradient of the loss along random directions of each parameter, and of all, must agree with differences of the
    loss. Losses, gradient norms, evaluation, predictions and the checksum of parameters and moments must be the same
    bits on any number of ranks, with both strategies, prefetch 0 to 2, recomputed or not; released memory is
    filled with NaN all the while.

    Raises:
        ContractError: the model or one of its layers breaks its contract; the message says how.
        EngineError: the model cannot be built or planned.
    """
    samples = micro_batch * int(np.lcm.reduce(list(ranks)))
    feeds = [_data(make_model(), tokens, samples, seed + i) for i in range(_STEPS + 1)]

    def engine(comm: Communicator | None, way: _Way) -> Engine:
        return full_shard(
            telling(make_model()),
            AdamW(),
            comm,
            global_batch=samples,
            micro_batch=micro_batch,
            seed=seed,
            strategy=way.strategy,
            prefetch=way.prefetch,
            recompute=way.recompute,
            dtype="float64",
            device="cpu" if comm is None else "auto",
            poison=True,
        )

    def train(comm: Communicator, way: _Way) -> _Run:
        one = engine(comm, way)
        results = [one.step(feed, lr=0.01) for feed in feeds[:_STEPS]]
        evaluation = one.evaluate(feeds[_STEPS]).loss
        predictions = one.predict(feeds[_STEPS].inputs[0], 0).tobytes()
        norms = tuple(result.grad_norm for result in results)
        return _Run(tuple(result.loss for result in results), norms, evaluation, predictions, one.checksum())

    plain = _Way(1, "full_shard", 1, "none")
    # In a thread like all others: under mpiexec too, one rank alone is meant.
    (worst,) = run(1, lambda comm: _derivatives(engine(comm, plain), feeds[0], seed))
    (expected,) = run(1, lambda comm: train(comm, plain))
    ways = itertools.product(ranks, ("full_shard", "no_shard"), (0, 1, 2), ("none", "block"))
    for way in itertools.starmap(_Way, ways):
        for rank, found in enumerate(run(way.ranks, lambda comm, way=way: train(comm, way))):  # type: ignore[misc]
            _compare(found, expected, f"{way} (rank {rank})", str(plain))
    return worst


def _data(model: Model, tokens: int, samples: int, seed: int) -> Batch:
    """Random inputs and targets, of which some are not counted."""
    rng, head, first = np.random.default_rng(seed), model.stages[-1].layer, model.stages[0].layer
    if not isinstance(head, LossLayer):
        raise ContractError(f"the last stage, {model.stages[-1].name}, is no LossLayer")
    shape = (samples, *model.sample_shape)
    inputs: Array
    if dtype(model.sample_dtype).kind == "i":
        known = tokens or (first.vocabulary if isinstance(first, Embedding) else 0)
        require(known, "the model takes whole numbers; give tokens=, the number of their values")
        most = first.vocabulary if isinstance(first, Embedding) else known
        require(known <= most, f"tokens={known} is more than the vocabulary of the embedding, {most}")
        inputs = rng.integers(0, known, shape)
    else:
        inputs = rng.standard_normal(shape)
    targets = rng.integers(0, head.outputs(), (samples, *model.target_shape))
    targets.reshape(-1)[::5] = IGNORE
    return batch(inputs, targets)


def _views(engine: Engine, array: str) -> dict[str, Array]:
    """Views of ``param`` or ``grad`` of one rank, in the shapes of the trainable parameters, by public name."""
    found = {}
    for part in engine.state.values():
        for slot in part.layout.slots:
            if slot.trainable:
                flat = part.arrays[array][slot.offset : slot.offset + slot.size]
                found[part.unit.prefix + slot.name] = flat.reshape(slot.shape)
    return found


def _derivatives(engine: Engine, feed: Batch, seed: int) -> float:
    rng, worst, params = np.random.default_rng(seed), 0.0, _views(engine, "param")
    for param in params.values():
        # Away from the initial values, biases too, so that every term of a gradient shows.
        param += 0.3 * rng.standard_normal(param.shape)

    def loss() -> float:
        engine.steps = 0  # always the masks of the first step
        result = engine.step(feed, lr=0.0)
        require(result.updated, f"the loss {result.loss} or its gradient is not finite")
        return result.loss * result.tokens

    loss()
    slopes = {name: gradient / engine._scale for name, gradient in _views(engine, "grad").items()}
    start = {name: param.copy() for name, param in params.items()}
    for names in [*([name] for name in params), list(params), list(params)]:
        direction = {name: rng.standard_normal(params[name].shape) for name in names}
        around = []
        for h in (-2 * STEP, -STEP, STEP, 2 * STEP):
            for name, way in direction.items():
                params[name][...] = start[name] + h * way
            around.append(loss())
        for name in names:
            params[name][...] = start[name]
        numeric = (8 * (around[2] - around[1]) - (around[3] - around[0])) / (12 * STEP)
        exact = float(sum((slopes[name] * way).sum() for name, way in direction.items()))
        largest = max(abs(numeric), abs(exact))
        error = abs(numeric - exact) / largest if largest > 1e-9 else 0.0
        require(
            error <= DERIVATIVE,
            f"the gradient of {', '.join(names)} is wrong: along a random direction the step gives {exact!r} and "
            f"differences of the loss {numeric!r}, a relative error of {error:.1e} where {DERIVATIVE} is allowed",
        )
        worst = max(worst, error)
    return worst


def _compare(found: _Run, expected: _Run, way: str, plain: str) -> None:
    for what, mine, due in zip(_Run._fields, found, expected, strict=True):
        if mine != due:
            told = "other bits" if isinstance(mine, bytes) else f"{mine}, not {due}"
            raise ContractError(
                f"{way}: {what} are {told} as with {plain}; a layer's results may depend on its arguments and ctx.draw "
                "alone, not on calls before, and its reading of parameters must be declared in the stage's units"
            )
