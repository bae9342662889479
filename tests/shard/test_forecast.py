"""What is predicted before anything is reserved is what a step uses: each moment, each category, to the byte."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpishard.array.arena import CATEGORIES
from mpishard.comm.base import Communicator
from mpishard.comm.scratch import transport_scratch
from mpishard.comm.threads import run
from mpishard.errors import ArenaError
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.models.mlp import MlpClassifier, mlp_classifier
from mpishard.nn.model import Model, freeze
from mpishard.optim.adamw import AdamW
from mpishard.shard.forecast import Forecast, forecast
from mpishard.shard.instructions import Reduce
from mpishard.shard.precision import precision
from mpishard.shard.schedule import STRATEGIES
from mpishard.shard.world import World
from tests.shard.predicted import blocks_of, dry, predicted, used
from tests.shard.training import SMALL, Job

SIZES = [
    Gpt2(layers=3, width=15, heads=3, sequence=7, vocabulary=129, dropout=0.1, attention_block=5, head_chunk=5),
    Gpt2(layers=4, width=26, heads=2, sequence=5, vocabulary=31, dropout=0.1, attention_block=0, head_chunk=64),
    Gpt2(layers=2, width=20, heads=1, sequence=9, vocabulary=301, dropout=0.0, gelu_tanh=False, head_chunk=4),
]
WAYS: dict[str, dict[str, object]] = {
    **{name: {"strategy": name} for name in STRATEGIES},
    "kept": {"strategy": "full_shard", "reshard_after_forward": False},
}
KINDS = ("float32", "bfloat16", "float16")
CHOICES = list(itertools.product(WAYS, KINDS, ("none", "block"), (1, 4), (0, 1, 2)))
#: each with one number of ranks, so that every pair of choices meets every number
COVERING = [
    (*choice, 1 + (w + k + 2 * r + a + p) % 4, SIZES[(w + r + a + p) % len(SIZES)])
    for choice, (w, k, r, a, p) in zip(CHOICES, itertools.product(*map(range, (6, 3, 2, 2, 3))), strict=True)
]


def job_of(way: str, recompute: str, local: int, prefetch: int, ranks: int, sizes: Gpt2) -> Job:
    changes = dict(WAYS[way])
    if way == "hybrid_shard":
        changes["group"] = 2 if ranks % 2 == 0 else 1
    job = Job(sizes, micro_batch=1 + sizes.layers % 2, micros=ranks * local)
    return job.with_settings(recompute=recompute, prefetch=prefetch, **changes)


def checked(ranks: int, job: Job, steps: int = 2, **changes: Any) -> list[Mapping[str, int]]:
    """Compare on every rank, and return what each holds."""

    def body(comm: Communicator) -> Mapping[str, int]:
        engine = job.engine(comm, ledger=True, **changes)
        expected = predicted(engine, "threads")
        before = blocks_of(engine)
        for step in range(steps):
            engine.step(job.feed(step), lr=job.lr)
        assert used(engine) == expected.moments
        sample = engine._runner.host_inputs[0].copy()
        if engine.settings.micros < 4:  # it is slow, and needs no more for more of them
            engine.evaluate(job.feed(9))
        engine.predict(sample, 0)
        assert engine.memory() == expected.held
        assert {name: stack.capacity for name, stack in engine.arena._stacks.items()} == expected.peaks
        assert blocks_of(engine) == before
        return expected.held

    return run(ranks, body)


def test_the_choice_covers() -> None:
    assert len(CHOICES) == 216
    for one, other in itertools.combinations(range(5), 2):
        pairs = itertools.product({(case[one], case[other]) for case in COVERING}, (1, 2, 3, 4))
        assert {((case[one], case[other]), case[5]) for case in COVERING} == set(pairs)


@pytest.mark.parametrize(("way", "kind", "recompute", "local", "prefetch", "ranks", "sizes"), COVERING)
def test_predicted_is_used(
    way: str, kind: str, recompute: str, local: int, prefetch: int, ranks: int, sizes: Gpt2
) -> None:
    checked(ranks, job_of(way, recompute, local, prefetch, ranks, sizes), steps=1, dtype_name=kind)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("way", "kind", "recompute", "local", "prefetch"), CHOICES)
def test_full_product(way: str, kind: str, recompute: str, local: int, prefetch: int, ranks: int) -> None:
    checked(ranks, job_of(way, recompute, local, prefetch, ranks, SIZES[0]), dtype_name=kind)


# --- an engine on shapes, which runs the step and predicts nothing


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_run_on_shapes_uses_the_same(way: str, kind: str) -> None:
    """Its ledger measures the schedule itself, one instruction after the other, without memory or peers."""
    for ranks, rank, local, recompute in ((1, 0, 2, "none"), (4, 3, 1, "block"), (4, 1, 3, "none"), (6, 5, 2, "block")):
        job = job_of(way, recompute, local, 1, ranks, SIZES[ranks % 3])
        engine = dry(job, rank, ranks, dtype_name=kind)
        expected = predicted(engine, "threads")
        engine.step(None, lr=0.0)
        assert used(engine) == expected.moments
        assert engine.arena.reserved() == expected.reserved
        engine.evaluate(None)
        engine._forward_one(1)
        assert engine.memory() == {**expected.held, **{name: engine.memory()[name] for name in ("saved", "workspace")}}


# --- other models, types and ways to sum

ODD: dict[str, Model] = {
    "no blocks": gpt2(replace(SMALL, layers=0)),
    "recompute attention": gpt2(replace(SMALL, recompute_attention=True, dropout=0.2)),
    "mlp": mlp_classifier(MlpClassifier(features=17, classes=11, width=33)),
    "one layer": mlp_classifier(MlpClassifier(features=6, classes=3, layers=0)),
    "frozen table": freeze(gpt2(SMALL), ["wte.*"]),
    "frozen blocks": freeze(gpt2(SMALL), ["wte.*", "wpe.*", "h.[0-2].*"]),
    "frozen biases": freeze(gpt2(SMALL), ["*.bias", "*ln_?.*"]),
    "frozen but one": freeze(gpt2(SMALL), ["w?e.*", "ln_f.*", "h.[013].*", "h.2.ln*", "h.2.attn*", "h.2.mlp.c_proj*"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ODD)
def test_odd_models(name: str, way: str) -> None:
    n = list(ODD).index(name) + list(WAYS).index(way)
    ranks, kind, recompute = 1 + n % 4, KINDS[n % 3], ("none", "block")[n // 2 % 2]
    job = job_of(way, recompute, 1 + n % 2, n % 3, ranks, SMALL)
    if name in ("mlp", "one layer"):
        job = Numbers(job.sizes, job.micro_batch, job.micros, settings=job.settings)
    checked(ranks, job, model=ODD[name], dtype_name=kind)


class Numbers(Job):
    """Its samples are numbers, and each has one class."""

    def feed(self, step: int) -> Any:
        def fill(micro: int, inputs: np.ndarray, targets: np.ndarray) -> None:
            draw = np.random.Generator(np.random.Philox(key=[self.seed, step * 1000 + micro]))
            inputs[...] = draw.standard_normal(inputs.shape)
            targets[...] = draw.integers(0, 3, targets.shape)

        return fill


OTHER: list[tuple[dict[str, object], dict[str, str]]] = [
    ({"accumulate": "no_sync"}, {}),
    ({"accumulate": "no_sync"}, {"dtype_name": "bfloat16"}),
    ({"recompute": "block", "recompute_every": 2}, {}),
    ({}, {"reduce_dtype": "bfloat16"}),
    ({}, {"dtype_name": "bfloat16", "reduce_dtype": "float32"}),
    ({"accumulate": "no_sync"}, {"dtype_name": "float16", "reduce_dtype": "bfloat16"}),
    ({}, {"dtype_name": "float64"}),
]


@pytest.mark.parametrize(
    ("way", "changes", "types"),
    [(way, *other) for i, way in enumerate(WAYS) for j, other in enumerate(OTHER) if (i + j) % 2],
    ids=str,
)
def test_other_sums_and_types(way: str, changes: dict[str, object], types: dict[str, str]) -> None:
    ranks = 4 if way == "hybrid_shard" else 3
    job = job_of(way, "none", 2, 1, ranks, SIZES[0]).with_settings(**changes)
    checked(ranks, job, **types)


def test_an_engine_that_trains_nothing() -> None:
    for way, kind in itertools.product(WAYS, KINDS):
        job = job_of(way, "none", 1, 1, 2, SIZES[0])

        def body(comm: Communicator, job: Job = job, kind: str = kind) -> None:
            engine = job.engine(comm, optimizer=None, dtype_name=kind)
            expected = predicted(engine, "threads")
            engine.evaluate(job.feed(0))
            assert engine.memory() == expected.held
            assert expected.moments == ()
            assert expected.held["gradients"] == expected.held["optimizer"] == expected.held["unreduced"] == 0
            assert expected.held["saved"] == 0

        run(2, body)


# --- what a forecast says


def of(job: Job, ranks: int, kind: str = "float32", transport: str = "threads", **changes: Any) -> Forecast:
    settings = replace(job.settings, micros=job.micros // ranks)
    types = precision(kind)
    world = World.imagined(changes.pop("rank", 0), ranks, settings, transport=transport)
    return forecast(job.model, AdamW().states, settings, types, world, micro_batch=job.micro_batch, **changes)


def test_totals_and_moments() -> None:
    job = Job(SIZES[0], micros=12)
    for ranks, prefetch in itertools.product((1, 2, 6), (0, 1)):
        found = of(job.with_settings(prefetch=prefetch), ranks, ops_bytes=1 << 20)
        assert set(found.held) == set(CATEGORIES)
        assert found.total == sum(found.held.values())
        assert len(found.moments) == len(found.steps.schedules[0])
        for moment in found.moments:
            assert set(moment.bytes) == set(CATEGORIES)
            assert moment.total == sum(moment.bytes.values()) <= found.total
        for name in ("parameters", "masters", "gradients", "optimizer", "saved"):
            assert max(moment.bytes[name] for moment in found.moments) == found.held[name]
        # An evaluation keeps nothing, and takes what a stage would keep from the workspace.
        assert max(moment.bytes["workspace"] for moment in found.moments) <= found.held["workspace"]
        assert found.host == 0


def test_scratch_and_own_bytes_are_staging() -> None:
    job = Job(SIZES[0], micros=6)
    without, own = of(job, 3), replace(World.imagined(0, 3, job.settings, transport="threads"), own_bytes=12345)
    settings = replace(job.settings, micros=2)
    more = forecast(job.model, AdamW().states, settings, precision("float32"), own, micro_batch=2)
    assert more.held == {**without.held, "staging": without.held["staging"] + 12345}
    nccl = of(job, 3, transport="nccl")
    largest = max(sum(m.bytes[k] for k in ("gathered", "unreduced", "staging")) for m in nccl.moments)
    assert nccl.held["gathered"] + nccl.held["unreduced"] + nccl.held["staging"] == largest
    assert nccl.total > without.total
    layouts, kind = dry(job, 0, 3).layouts, np.dtype(np.float32)
    for moment, plain, step in zip(nccl.moments, without.moments, nccl.steps.schedules[0], strict=True):
        if isinstance(step, Reduce):
            scratch = transport_scratch("nccl", 3)(layouts[step.unit].total, kind, kind)
            assert moment.bytes["staging"] - plain.bytes["staging"] == scratch > 0


def test_a_step_that_needs_more_than_was_predicted_raises() -> None:
    """The arena does not grow: a layer that keeps more than it kept on shapes is stopped."""
    job = Job(SIZES[0], micros=2)

    def body(comm: Communicator) -> None:
        engine = job.engine(comm)
        engine._runner.context.keep((1 << 16,))
        engine.step(job.feed(0), lr=0.0)

    with pytest.raises(ArenaError, match=r"saved: .* bytes are needed and .* were planned"):
        run(1, body)


def test_a_wrong_prediction_is_seen() -> None:
    """The comparison above fails where the ledger counts another byte, or the step runs another schedule."""
    job = Job(SIZES[0], micros=2)

    def body(comm: Communicator) -> tuple[bool, bool]:
        engine = job.engine(comm, ledger=True)
        engine.step(job.feed(0), lr=0.0)
        other = predicted(engine, "nccl")
        less = predicted(engine, "threads", micro_batch=1)
        return used(engine) == other.moments, used(engine) == less.moments

    assert run(2, body) == [(False, False)] * 2


def test_a_deep_model_costs_one_block() -> None:
    """Stages of the same layer are measured once: their number of measurements does not grow with depth."""
    counts = []
    for layers in (3, 30):
        model = gpt2(replace(SMALL, layers=layers))
        calls = 0
        block = model.stages[1].layer
        forward = type(block).forward

        def counted(self: Any, *arguments: Any, forward: Any = forward) -> Any:
            nonlocal calls
            calls += 1
            return forward(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(block), "forward", counted)
            job = Job(replace(SMALL, layers=layers), micros=2)
            of(job.with_settings(recompute="block"), 1)
        counts.append(calls)
    assert counts[0] == counts[1] < 20
