"""Engines of models cut into units in other ways: untied, stages of two units, one stage, frozen parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpishard.array.dtypes import Array
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.base import Communicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.nn.head import TiedHead
from mpishard.nn.model import Model, Stage, Unit
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine, StepResult
from mpishard.shard.instructions import Backward
from mpishard.shard.schedule import STRATEGIES
from tests.shard.tallies import elements
from tests.shard.training import SMALL, Job, Outcome, train

STEPS = 3
JOB = Job(micros=6)
UNCLIPPED = AdamW(limit=0.0)
GPT = JOB.model


def halves() -> Model:
    """Each block's parameters in two units, both of which its stage reads."""
    units, stages = [GPT.units[0]], [GPT.stages[0]]
    for unit, stage in zip(GPT.units[1:], GPT.stages[1:-1], strict=True):
        names = (f"{unit.name}.first", f"{unit.name}.second")
        units += [Unit(names[0], unit.prefix, unit.specs[:6]), Unit(names[1], unit.prefix, unit.specs[6:])]
        stages.append(replace(stage, units=names, backward_units=names))
    return replace(GPT, units=tuple(units), stages=(*stages, GPT.stages[-1]))


def streamed_root() -> Model:
    """The root unit is gathered for each use, and its gradient is still one for both ends."""
    return replace(GPT, units=(replace(GPT.units[0], keep=False), *GPT.units[1:]))


def root_last() -> Model:
    """Units lie, and are updated, in another order."""
    return replace(GPT, units=(*GPT.units[1:], GPT.units[0]))


def untied() -> Model:
    """Embedding and head have units of their own, and neither is kept."""
    embedding, head = GPT.stages[0].layer, GPT.stages[-1].layer
    return replace(
        GPT,
        units=(
            Unit("embed", "", embedding.param_specs()),
            *GPT.units[1:],
            Unit("head", "head.", head.param_specs()),
        ),
        stages=(
            Stage("embed", embedding, ("embed",), ()),
            *GPT.stages[1:-1],
            Stage("head", head, ("head",), ("head",)),
        ),
    )


def loss_only() -> Model:
    """A linear classifier of float features: one stage, the loss."""
    head = TiedHead(SMALL.vocabulary, SMALL.width)
    return Model(
        (Unit("head", "", head.param_specs()),),
        (Stage("head", head, ("head",), ("head",)),),
        (SMALL.sequence, SMALL.width),
        "float32",
        (SMALL.sequence,),
    )


def frozen(model: Model, names: Callable[[str], bool]) -> Model:
    """The model with the parameters of some public names not trained."""
    units = [
        replace(u, specs=tuple(replace(s, trainable=not names(u.prefix + s.name)) for s in u.specs))
        for u in model.units
    ]
    return replace(model, units=tuple(units))


FROZEN: dict[str, Callable[[str], bool]] = {
    "tied table": lambda name: name == "wte.weight",
    "all of the root": lambda name: not name.startswith("h."),
    "one block": lambda name: name.startswith("h.1."),
    "norms and biases": lambda name: "ln" in name or name.endswith("bias"),
    "matrices": lambda name: name.endswith("weight") and "ln" not in name,
    "all but one": lambda name: name != "h.2.mlp.c_fc.weight",
    "below h.2": lambda name: name.startswith(("wte", "wpe", "h.0.", "h.1.")),
    "all": lambda name: True,
}
MODELS: dict[str, Model] = {
    **{make.__name__: make() for make in (halves, streamed_root, root_last, untied, loss_only)},
    **{f"frozen {name}": frozen(GPT, names) for name, names in FROZEN.items()},
    "frozen untied head": frozen(untied(), lambda name: name.startswith("head.")),
}


class Features(Job):
    """Its samples are numbers."""

    def feed(self, step: int) -> Callable[[int, Array, Array], None]:
        fill = super().feed(step)

        def features(micro: int, inputs: Array, targets: Array) -> None:
            tokens = np.empty(targets.shape, np.int64)
            fill(micro, tokens, targets)
            inputs[...] = np.cos(tokens[..., None] * np.arange(1, inputs.shape[-1] + 1))

        return features


def outcome(model: Model, ranks: int, poison: bool = False, **settings: Any) -> Outcome:
    kind = Features if model.sample_dtype == "float32" else Job
    job = kind(micros=6, poison=poison).with_settings(**settings)
    return run(ranks, lambda comm: train(job.engine(comm, model=model, optimizer=UNCLIPPED), job, STEPS))[ranks - 1]


@pytest.mark.parametrize("name", MODELS)
def test_same_bits(name: str) -> None:
    model = MODELS[name]
    reference = outcome(model, 1, strategy="no_shard")
    assert reference.losses[-1] < reference.losses[0] or name == "frozen all"
    for ranks, prefetch, recompute in ((3, 0, "none"), (2, 1, "block"), (2, 3, "none")):
        assert outcome(model, ranks, poison=ranks == 2, prefetch=prefetch, recompute=recompute) == reference
    for strategy in ("no_shard", "shard_grad_op"):
        assert outcome(model, 2, poison=True, strategy=strategy) == reference
    kept = {"prefetch": 1, "reshard_after_forward": False}
    assert outcome(model, 2, poison=True, **kept) == reference


@pytest.mark.parametrize("make", [halves, streamed_root, root_last])
def test_units_are_storage_and_change_no_bit(make: Callable[[], Model]) -> None:
    """Without clipping even the checksum is that of the ordinary GPT; norms are summed in other chunks."""
    ordinary, other = outcome(GPT, 2), outcome(make(), 3, prefetch=0)
    assert (other.checksum, other.losses) == (ordinary.checksum, ordinary.losses)
    assert other.norms == pytest.approx(ordinary.norms, rel=1e-12)


def test_an_untied_model_is_another_model() -> None:
    assert outcome(untied(), 1).losses != outcome(GPT, 1).losses


# --- frozen parameters


def stepped(model: Model, steps: int, **settings: Any) -> tuple[Engine, list[StepResult]]:
    job = JOB.with_settings(**settings)
    engine = job.engine(LocalCommunicator(NumpyOps()), model=model, optimizer=UNCLIPPED)
    return engine, [engine.step(job.feed(step), lr=job.lr) for step in range(steps)]


def named(engine: Engine, kind: str) -> dict[str, Array]:
    return {
        part.unit.prefix + slot.name: part.arrays[kind][slot.offset : slot.offset + slot.size].copy()
        for part in engine.state.values()
        for slot in part.layout.slots
        if kind in part.arrays
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("which", FROZEN)
def test_frozen_parameters(which: str, strategy: str) -> None:
    """They keep their values and have no gradient; the others have those of the whole model; the norm is theirs."""
    names = FROZEN[which]
    whole, _ = stepped(GPT, 1)
    model = frozen(GPT, names)
    engine, _ = stepped(model, 0, strategy=strategy)
    start = named(engine, "param")
    for part in engine.state.values():
        if part.trained:
            part.arrays["grad"].fill(np.nan)  # nobody may count on what is there
    result = engine.step(JOB.feed(0), lr=JOB.lr)
    assert result.updated
    expected, found = named(whole, "grad"), named(engine, "grad")
    assert found.keys() == named(engine, "exp_avg").keys() == named(engine, "exp_avg_sq").keys()
    assert found.keys() == {name for name in start if not names(name)}
    squares = 0.0
    for name, value in found.items():
        assert value.tobytes() == expected[name].tobytes(), name
        squares += float((value.astype(np.float64) ** 2).sum())
    assert result.grad_norm == pytest.approx(math.sqrt(squares) / (engine._scale * result.tokens), rel=1e-12)
    engine.step(JOB.feed(1), lr=JOB.lr)
    for name, value in named(engine, "param").items():
        moved = value.tobytes() != start[name].tobytes()
        assert moved != names(name), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", FROZEN)
def test_memory_of_frozen_parameters(which: str, kind: str, strategy: str) -> None:
    """A flat buffer of their own, which has neither gradients nor moments: exact bytes, on two ranks."""
    ranks, names = 2, FROZEN[which]
    parts = [
        [math.prod(spec.shape) for spec in unit.specs if names(unit.prefix + spec.name) == is_frozen]
        for unit in GPT.units
        for is_frozen in (False, True)
    ]
    totals = [elements(ranks, *sizes) if sizes else 0 for sizes in parts]
    trained, everything = sum(totals[::2]), sum(totals)
    shards = 1 if strategy == "no_shard" else ranks
    job = replace(JOB, micros=2).with_settings(strategy=strategy, group=2 if strategy == "hybrid_shard" else 0)
    narrow = kind != "float32"
    resident = strategy in ("no_shard", "shard_grad_op", "shard_optimizer")
    for held in run(ranks, lambda comm: job.engine(comm, model=frozen(GPT, names), dtype_name=kind).memory()):
        assert held["gradients"] == 4 * trained // shards
        assert held["optimizer"] == 8 * trained // shards
        assert held["masters"] == (4 * everything // shards if narrow else 0)
        whole = (2 if narrow else 4) * everything
        assert held["parameters"] == (whole if resident else 0 if narrow else whole // shards)


def test_backward_ends_at_the_lowest_stage_that_learns() -> None:
    """No backward of a stage below runs, and nothing is kept for one."""

    class Noted(NumpyOps):
        def __init__(self) -> None:
            super().__init__()
            self.norms = self.tables = 0

        def _layernorm_backward(self, *arguments: Any) -> None:
            self.norms += 1
            super()._layernorm_backward(*arguments)

        def _embedding_backward(self, *arguments: Any) -> None:
            self.tables += 1
            super()._embedding_backward(*arguments)

    seen = {}
    for name, model in {"whole": GPT, "frozen": frozen(GPT, FROZEN["below h.2"])}.items():
        ops = Noted()
        engine = JOB.engine(LocalCommunicator(ops), model=model, optimizer=UNCLIPPED)
        ops.norms = ops.tables = 0
        engine.step(JOB.feed(0), lr=JOB.lr)
        backward = [step.stage for step in engine.schedule if isinstance(step, Backward) and step.micro == 0]
        seen[name] = backward, ops.norms // JOB.micros, ops.tables // JOB.micros, engine.memory()["saved"]
    assert seen["whole"][:3] == (["h.3", "h.2", "h.1", "h.0", "embed"], 2 * 4 + 1, 1)
    assert seen["frozen"][:3] == (["h.3", "h.2"], 2 * 2 + 1, 0)
    assert seen["frozen"][3] < 0.6 * seen["whole"][3]


def test_a_frozen_unit_is_not_reduced() -> None:
    counts = {}
    for name, model in {"whole": GPT, "frozen": frozen(GPT, FROZEN["one block"])}.items():

        def body(comm: Communicator, model: Model = model) -> int:
            engine = JOB.engine(comm, model=model)
            before = comm.tallies["reduce_scatter"].calls
            engine.step(JOB.feed(0), lr=JOB.lr)
            return comm.tallies["reduce_scatter"].calls - before

        counts[name] = run(2, body)[0]
    assert counts == {"whole": 3 * 5, "frozen": 3 * 4}
