"""What a plan says is what engines hold and send: every strategy, to the byte, on 1 to 4 ranks in threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.alone import AloneCommunicator
from mpishard.comm.base import Communicator
from mpishard.comm.threads import run
from mpishard.errors import ConfigError
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.nn import Hidden, Layer, Linear, LinearHead, Model, ParamSpec, Stage, Unit, freeze
from mpishard.optim import AdamW, LossScale
from mpishard.plan import PLANNED, plan_model
from mpishard.plan.planner import KEPT, Job, Planner
from mpishard.shard.engine import Engine
from mpishard.shard.precision import precision
from mpishard.shard.schedule import Settings
from tests.shard.training import SMALL
from tests.shard.training import Job as Training

Feed = Callable[[int, np.ndarray, np.ndarray], None]
SENT = {
    "all_gather": ("all_gather", "across_all_gather"),
    "reduce_scatter": ("reduce_scatter", "across_reduce_scatter"),
    "exchange": ("records",),
}


def measured(job: Job, strategy: str, ranks: int, feed: Feed) -> list[tuple[dict[str, int], dict[str, int]]]:
    """What an engine on each rank holds, and what it sends in a step."""
    settings = replace(Planner(job).settings(strategy, ranks, job.micro_batch), micros=1)
    kind, wire = str(job.types.kind), str(job.types.wire)

    def one(comm: Communicator) -> tuple[dict[str, int], dict[str, int]]:
        engine = Engine(
            job.model,
            comm,
            comm.ops,
            AdamW(),
            settings,
            micro_batch=job.micro_batch,
            global_batch=job.global_batch,
            seed=0,
            dtype_name=kind,
            reduce_dtype="" if wire == kind else wire,
            loss_scale=LossScale() if job.types.overflows else None,
        )

        def so_far() -> dict[str, int]:
            every = [comm, *(engine._parts or ())]
            return {kind: sum(each.tallies[kind].bytes for each in every) for kind in SENT}

        before = so_far()
        engine.step(feed, lr=0.01)
        return engine.memory(), {kind: count - before[kind] for kind, count in so_far().items()}

    return run(ranks, one)


def check(job: Job, strategy: str, ranks: int, feed: Feed) -> None:
    planner = Planner(job)
    planned = planner.rank(strategy, ranks)
    sent = planner.sent(strategy, ranks)
    assert planned["peak"] == sum(count for name, count in planned.items() if name != "peak")
    assert sent["total"] == sum(count for name, count in sent.items() if name != "total")
    for held, done in measured(job, strategy, ranks, feed):
        assert {**held, "peak": sum(held.values())} == planned
        assert done == {kind: sum(sent[part] for part in parts) for kind, parts in SENT.items()}


def job_of(ranks: int, micros: int, dtypes: tuple[str, str], **settings: Any) -> Job:
    return Job(
        gpt2(SMALL),
        Settings(**settings),
        precision(*dtypes),
        micro_batch=2,
        global_batch=2 * micros * ranks,
        node=2,
        transport="threads",
    )


CASES = [
    (1, 1, ("float32", ""), {"prefetch": 0}),
    (1, 4, ("bfloat16", ""), {"recompute": "block"}),
    (2, 1, ("float32", "bfloat16"), {}),
    (2, 4, ("float16", ""), {"prefetch": 2, "accumulate": "no_sync"}),
    (3, 1, ("float32", ""), {"recompute": "block", "prefetch": 2}),
    (3, 5, ("float32", ""), {"accumulate": "no_sync"}),
    (4, 1, ("bfloat16", "float32"), {"recompute": "block", "recompute_every": 2}),
    (4, 7, ("bfloat16", ""), {"prefetch": 0}),
]


@pytest.mark.parametrize("strategy", PLANNED)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{'-'.join(case[2])}")
def test_a_plan_is_what_engines_hold_and_send(case: tuple[Any, ...], strategy: str) -> None:
    ranks, micros, dtypes, settings = case
    check(job_of(ranks, micros, dtypes, **settings), strategy, ranks, Training(micro_batch=2).feed(0))


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_mpi_takes_for_itself_is_planned(ranks: int) -> None:
    """The thread that calls MPI adds up with operations, and scratch, of its own."""
    job = replace(job_of(ranks, 1, ("bfloat16", "")), transport="mpi")
    comm = AloneCommunicator(0, ranks, NumpyOps(), "mpi")
    engine = Engine(
        job.model, comm, comm.ops, AdamW(), job.settings, micro_batch=2, global_batch=2 * ranks, seed=0,
        dtype_name="bfloat16",
    )  # fmt: skip
    held = engine.memory()
    assert {**held, "peak": sum(held.values())} == Planner(job).rank("full_shard", ranks)


@pytest.mark.parametrize("strategy", PLANNED)
def test_frozen_parameters_are_planned(strategy: str) -> None:
    job = replace(job_of(2, 2, ("bfloat16", "")), model=freeze(gpt2(SMALL), ["wpe.weight", "h.1.*", "h.2.ln_1.*"]))
    check(job, strategy, 2, Training(micro_batch=2).feed(0))


class Funnel(Layer):
    """A layer of one's own: features through two products, with memory of each kind, to fewer features."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        self.into, self.last = Linear("into", width, inner), Linear("last", inner, out)
        self.inner, self.out = inner, out

    def param_specs(self) -> tuple[ParamSpec, ...]:
        return self.into.param_specs() + self.last.param_specs()

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], self.out)

    def forward(self, ops: Any, ctx: Any, params: Any, x: Any, y: Any) -> Any:
        middle = ctx.keep((*x.shape[:-1], self.inner))
        first = self.into.forward(ops, ctx, params, x, middle)
        return first, self.last.forward(ops, ctx, params, middle, y)

    def backward(self, ops: Any, ctx: Any, params: Any, grads: Any, saved: Any, dy: Any, dx: Any) -> None:
        first, second = saved
        with ctx.frame():
            dmiddle = ctx.scratch((*dy.shape[:-1], self.inner))
            self.last.backward(ops, ctx, params, grads, second, dy, dmiddle)
            self.into.backward(ops, ctx, params, grads, first, dmiddle, dx)


def own_model() -> Model:
    layers = {"a": Hidden("in", 6, 11), "b": Funnel(11, 40, 9), "c": LinearHead("out", 9, 5)}
    units = tuple(Unit(name, f"{name}.", layer.param_specs()) for name, layer in layers.items())
    stages = tuple(Stage(name, layer, (name,), (name,)) for name, layer in layers.items())
    return Model(units, stages, sample_shape=(6,), sample_dtype="float32", target_shape=())


def fill(micro: int, inputs: np.ndarray, targets: np.ndarray) -> None:
    inputs[...] = np.linspace(-1, 1, inputs.size).reshape(inputs.shape)
    targets[...] = np.arange(targets.size) % 5


@pytest.mark.parametrize("strategy", PLANNED)
def test_layers_of_ones_own_are_planned(strategy: str) -> None:
    job = Job(own_model(), Settings(), precision("float32"), micro_batch=3, global_batch=6, node=1, transport="threads")
    check(job, strategy, 2, fill)


def test_the_library_plans_a_model_of_ones_own() -> None:
    model = own_model()
    plan = plan_model(model, ranks=[2, 1], strategies=["zero3", "ddp"], micro_batch=3, global_batch=6, node=1,
                      transport="threads", devices={"a small one": 100_000})  # fmt: skip
    assert plan.parameters == model.parameters == 6 * 11 + 11 + 11 * 40 + 40 + 40 * 9 + 9 + 9 * 5 + 5
    assert plan.model_state_bytes["total"] == 16 * model.parameters
    job = Job(model, Settings(), precision("float32"), micro_batch=3, global_batch=6, node=1, transport="threads")
    assert [each.ranks for each in plan.by_ranks] == [2, 1]
    for each in plan.by_ranks:
        assert list(each.per_rank) == ["full_shard", "no_shard"]
        for name, held in each.per_rank.items():
            assert held == Planner(job).rank(name, each.ranks)
    assert plan.devices["a small one"].model_state_only == 1
    assert (plan.assumed, plan.notes) == ({}, ())


@pytest.mark.parametrize("accumulate", ["reduce", "no_sync"])
def test_more_micro_batches_hold_no_more(accumulate: str) -> None:
    """A plan counts up to three; here many are counted."""
    for strategy, prefetch, recompute in itertools.product(PLANNED, (0, 1, 3), ("none", "block")):
        job = job_of(3, 1, ("bfloat16", ""), accumulate=accumulate, prefetch=prefetch, recompute=recompute)
        planner = Planner(job)
        settings = replace(planner.settings(strategy, 3, 2), micros=9)
        assert planner._held(settings, 3, 2) == planner._held(replace(settings, micros=3), 3, 2)


def test_buffers_are_placed_anew_for_each_number_of_ranks() -> None:
    """The lists of a step are made once; a planner that is asked for many ranks answers as one that is asked once."""
    job = replace(job_of(1, 1, ("bfloat16", "")), global_batch=0, transport="auto")
    many = Planner(job)
    for strategy, ranks in itertools.product(PLANNED, (1, 2, 3, 7, 12, 64)):
        assert many.rank(strategy, ranks) == Planner(job).rank(strategy, ranks)
        assert many.rank(strategy, ranks, 5) == Planner(job).rank(strategy, ranks, 5)


def test_a_gpu_receives_whole_units_but_through_host_memory() -> None:
    job = job_of(4, 1, ("float32", ""))
    held = {
        (name, on): Planner(replace(job, transport=name, on_device=on)).rank("full_shard", 4)
        for name, on in (("mpi", False), ("mpi", True), ("nccl", True), ("staged", True), ("auto", True))
    }
    assert held["mpi", True] == held["nccl", True] == held["auto", True]
    for name in ("parameters", "gradients", "optimizer", "saved"):
        assert len({each[name] for each in held.values()}) == 1
    assert held["mpi", True]["workspace"] > held["mpi", False]["workspace"] + 32 * 2**20  # cuBLAS


def test_offload_moves_the_optimiser_to_the_host() -> None:
    job = replace(job_of(2, 1, ("bfloat16", "")), transport="auto", on_device=True)
    here = Planner(job).rank("full_shard", 2)
    there = Planner(replace(job, on_device=False, offload="optimizer")).rank("full_shard", 2)
    assert "host" not in here
    assert there["host"] == here["masters"] + here["optimizer"] > 0
    assert there["masters"] == there["optimizer"] == 0
    assert there["peak"] == sum(there[name] for name in here if name != "peak")
    assert there["parameters"] == here["masters"] // 2  # narrow copies, which are gathered from
    same = ("gradients", "gathered", "unreduced", "saved", "workspace")
    assert [there[name] for name in same] == [here[name] for name in same]


def test_the_largest_micro_batch_and_the_least_ranks_are_at_the_border() -> None:
    job = replace(job_of(1, 1, ("float32", "")), global_batch=0, transport="auto")
    planner = Planner(job)
    for strategy, scale in itertools.product(("full_shard", KEPT, "no_shard"), (0.9, 1.0, 1.02, 1.3)):
        memory = int(planner.rank(strategy, 3)["peak"] * scale)
        found = planner.most_samples(memory, strategy, 3)
        fits = [n for n in range(1, 90) if planner.rank(strategy, 3, n)["peak"] <= memory]
        assert found == (max(fits) if fits else None)
        assert found is None or found < 89
    for ranks in (1, 2, 3, 5, 9):
        memory = planner.rank("full_shard", ranks)["peak"]
        brute = next(n for n in range(1, 20) if planner.rank("full_shard", n)["peak"] <= memory)
        assert planner.least_ranks(memory) == (brute, "")
    none, why = planner.least_ranks(planner.rank("full_shard", 2)["saved"])
    assert none is None
    assert "do not shrink" in why


def test_no_sync_needs_more_memory_where_a_rank_has_several_micro_batches() -> None:
    """So more ranks may need less at once than in proportion, and the least that fit have one micro-batch each."""
    job = replace(job_of(1, 6, ("float32", ""), accumulate="no_sync"), transport="auto")
    planner = Planner(job)
    assert [job.micros(ranks, 2) for ranks in (1, 2, 3, 4, 6, 12)] == [6, 3, 2, 1, 1, 1]
    peaks = {ranks: planner.rank("full_shard", ranks)["peak"] for ranks in range(1, 9)}
    assert peaks[3] > peaks[4]
    for memory in {*peaks.values(), *(peak + 1 for peak in peaks.values())}:
        assert planner.least_ranks(memory)[0] == next(ranks for ranks, peak in peaks.items() if peak <= memory)


TINY = Gpt2(layers=1, width=2, heads=1, sequence=2, vocabulary=3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 8}, r"^ranks is 8; it must be a list, such as \[8\]$"),
        ({"ranks": ["8"]}, r"^ranks is '8'; it must be a whole number, 1 or more$"),
        ({"strategies": "zero3"}, r"^strategies is 'zero3'; it must be a list, such as \['zero3'\]$"),
        ({"global_batch": -1}, r"^global_batch is -1; it must be a whole number, 0 or more$"),
        ({"devices": {"mine": 0}}, r"^devices\['mine'\] is 0; it must be a whole number, 1 or more$"),
        ({"devices": {"mine": 24e9}}, r"^devices\['mine'\] is 24000000000\.0; it must be a whole number"),
        ({"model": TINY}, r"^model is a Gpt2; give a Model, such as gpt2\(sizes\) returns$"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_line(changes, words) -> None:
    options = {"model": gpt2(TINY), **changes}
    with pytest.raises(ConfigError, match=words):
        plan_model(options.pop("model"), **options)
