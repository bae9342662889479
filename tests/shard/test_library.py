"""The library interface on one rank and on ranks in threads: what it gives, and how it refuses what is wrong."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpishard
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import Communicator, LocalCommunicator, run_threads
from mpishard.comm.launch import communicator
from mpishard.errors import ConfigError, EngineError
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.models.mlp import MlpClassifier, mlp_classifier
from mpishard.optim import AdamW, LossScale
from mpishard.shard.engine import Engine
from mpishard.shard.feed import Batch
from mpishard.shard.whole import parameter_names

MODEL = mlp_classifier(MlpClassifier(features=5, classes=3, width=9, layers=2))
#: large enough that every rank of three holds a part of every hidden layer
WIDE = mlp_classifier(MlpClassifier(features=5, classes=3, width=43, layers=3))
TEXT = gpt2(Gpt2(layers=2, width=6, heads=2, sequence=4, vocabulary=7))


def data(samples: int = 12, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return mpishard.batch(rng.standard_normal((samples, 5)), rng.integers(0, 3, samples))


def engine(comm: Communicator | None = None, **changes) -> Engine:
    options = {"global_batch": 12, "micro_batch": 2, **changes}
    return mpishard.full_shard(options.pop("model", MODEL), options.pop("optimizer", AdamW()), comm, **options)


def test_ten_lines_train() -> None:
    one = engine()
    results = [one.step(data(), lr=0.05) for _ in range(20)]
    assert results[-1].loss < results[0].loss / 3
    assert one.evaluate(data()).loss < results[-1].loss
    assert one.comm.transport == "local"
    one.close()
    one.close()


def test_the_same_bits_and_whole_parameters_on_any_ranks() -> None:
    def main(comm: Communicator) -> object:
        found = []
        for strategy in ("full_shard", "no_shard"):
            one = engine(comm, model=WIDE, strategy=strategy, seed=4)
            losses = [one.step(data(seed=step), lr=0.05).loss for step in range(3)]
            values = {name: one.parameter(name) for name in parameter_names(one.state)}
            assert all(array.flags.owndata or array.base.flags.owndata for array in values.values())
            found.append((losses, one.checksum(), {name: (a.shape, a.tobytes()) for name, a in values.items()}))
        return found

    results = [result for ranks in (1, 2, 3) for result in run_threads(ranks, main)]
    expected = results[0][0]
    assert all(found == expected for result in results for found in result)
    assert expected[2]["hidden.1.weight"][0] == (43, 43)
    assert len(expected[2]) == 8


def test_a_parameter_is_a_copy() -> None:
    one = engine()
    first = one.parameter("head.weight")
    first[...] = np.nan
    assert np.isfinite(one.parameter("head.weight")).all()


def test_an_engine_without_optimiser() -> None:
    one = engine(optimizer=None)
    assert np.isfinite(one.evaluate(data()).loss)
    with pytest.raises(EngineError, match="without an optimiser"):
        one.step(data(), lr=0.1)


def test_a_communicator_of_ours_stays_the_callers() -> None:
    closed = []

    class Noted(LocalCommunicator):
        def close(self) -> None:
            closed.append(True)

    ops = NumpyOps()
    one = engine(given := Noted(ops))
    assert one.comm is given
    assert one.ops is ops
    one.close()
    assert closed == []


def test_nothing_is_installed_in_the_process() -> None:
    import signal
    import sys

    def state() -> object:
        names = ("SIGINT", "SIGTERM", "SIGUSR1")
        hooks = (sys.excepthook, threading.excepthook, threading.active_count(), np.geterr())
        return hooks, [signal.getsignal(getattr(signal, name)) for name in names]

    before = state()
    one = engine()
    one.step(data(), lr=0.1)
    assert state() == before
    one.close()


class Own:
    """An optimiser of the program's own, with states that it names."""

    decay = 0.1

    def __init__(self, states: object) -> None:
        self.states = states

    def clip(self, norm: float) -> float:
        return 1.0

    def update(self, *arguments: object) -> None:
        """Change nothing."""


WRONG = [
    ({"model": MlpClassifier(5, 3)}, r"^model is a MlpClassifier; give a Model, such as gpt2\(sizes\) returns$"),
    ({"optimizer": AdamW}, r"^optimizer is the class AdamW; give an object of it: AdamW\(\)$"),
    ({"optimizer": "adamw"}, r"^optimizer is a str without states, decay, clip, update; give one such as AdamW\(\)"),
    ({"optimizer": Own(5)}, r"^optimizer is a Own whose states are 5; they must be a tuple of names, such as \("),
    ({"optimizer": Own(("a b",))}, r"^optimizer is a Own whose states are \('a b',\); they must be a tuple of names"),
    ({"optimizer": Own(("m", "m"))}, r"^optimizer is a Own whose states are .*; each needs a name .*: rename m$"),
    ({"optimizer": Own(("grad",))}, r"^optimizer is a Own whose states are .* are the engine's: rename grad$"),
    ({"device": "cpu"}, r"^device is 'cpu' and comm is a Communicator, which brings its own; leave it out$"),
    ({"transport": "mpi"}, r"^transport is 'mpi' and comm is a Communicator, which brings its own; leave it out$"),
    ({"global_batch": 12.0}, r"^global_batch is 12\.0; it must be a whole number$"),
    ({"global_batch": True}, r"^global_batch is True; it must be a whole number$"),
    ({"global_batch": 0}, r"^global_batch is 0; it must be 1 or more"),
    ({"micro_batch": -1}, r"^micro_batch is -1; it must be 1 or more"),
    ({"seed": -1}, r"^seed is -1; it must be 0 or more"),
    ({"seed": 2**63}, r"^seed is 9223372036854775808; it must be 0 or more, and below 2\*\*63$"),
    ({"prefetch": -1}, r"^prefetch is -1; it must be 0 or more"),
    ({"strategy": "zero"}, r"^strategy is 'zero'; it must be one of full_shard, .*hybrid_shard, or zero3, zero2"),
    ({"strategy": np.array(["zero1", "zero2"])}, r"^strategy is array\(\['zero1', 'zero2'\].*; it must be one of full"),
    ({"dtype": ["bf16"]}, r"^dtype is \['bf16'\]; it must be one of float32"),
    ({"reduce_dtype": {}}, r"^reduce_dtype is \{\}; it must be one of float32"),
    ({"strategy": 3}, r"^strategy is 3; it must be one of full_shard"),
    ({"group": -1}, r"^group is -1; it must be 0 or more"),
    ({"group": 2}, r"^group is 2 and strategy is 'full_shard'; only hybrid_shard has groups: leave it out, or take"),
    ({"strategy": "hybrid_shard", "group": 2}, r"^group is 2 and does not divide 3 ranks; use 1 or 3$"),
    ({"recompute_every": 0}, r"^recompute_every is 0; it must be 1 or more"),
    ({"recompute_every": 2}, r"^recompute_every is 2 and recompute is 'none'; it chooses among stages: leave it out"),
    (
        {"strategy": "zero1", "reshard_after_forward": False},
        r"^reshard_after_forward is False and strategy is 'shard_optimizer', which gathers nothing for a forward;",
    ),
    ({"reshard_after_forward": 0}, r"^reshard_after_forward is 0; it must be True or False$"),
    ({"accumulate": "sum"}, r"^accumulate is 'sum'; it must be one of reduce, no_sync$"),
    ({"offload": "disk"}, r"^offload is 'disk'; it must be one of none, optimizer$"),
    ({"offload": "optimizer"}, r"^offload is 'optimizer' and the device is the CPU, .*; leave it out$"),
    ({"reduce_dtype": "int8"}, r"^reduce_dtype is 'int8'; it must be one of float32, float64, bfloat16, float16$"),
    ({"dtype": "float64", "reduce_dtype": "bfloat16"}, r"^gradients of float64 travel in float64 alone"),
    ({"loss_scale": 1024.0}, r"^loss_scale is 1024\.0; it must be 'dynamic', a LossScale such as LossScale\(65536,"),
    ({"loss_scale": "fixed"}, r"^loss_scale is 'fixed'; it must be 'dynamic', a LossScale, or None for no scaling$"),
    ({"loss_scale": LossScale()}, r"^loss_scale is a LossScale and there is no float16 in dtype and reduce_dtype;"),
    ({"recompute": "all"}, r"^recompute is 'all'; it must be one of none, block"),
    ({"dtype": "int64"}, r"^dtype is 'int64'; it must be one of float32, float64, bfloat16, float16$"),
    ({"micro_batch": 5}, r"^micro_batch 5 does not divide global_batch 12; use 1, 2, 3, 4, 6 or 12$"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[f"{n}-{next(iter(w[0]))}" for n, w in enumerate(WRONG)])
def test_wrong_arguments_on_every_rank_or_on_one(changes: dict, message: str) -> None:
    """Also where one rank alone is wrong, every rank raises the same."""
    for wrong in ((0, 1, 2), (1,)):

        def main(comm: Communicator, wrong: tuple[int, ...] = wrong) -> str:
            with pytest.raises(ConfigError, match=message) as caught:
                engine(comm, **(changes if comm.rank in wrong else {}))
            assert len(comm.exchange(b"on")) == comm.size
            return str(caught.value)

        assert len(set(run_threads(3, main, deadline=10))) == 1


def test_strategies_by_other_names_give_the_same_bits() -> None:
    def main(comm: Communicator) -> list[str]:
        found = []
        for strategy in ("full_shard", "zero3", "zero2", "zero1", "ddp"):
            one = engine(comm, model=WIDE, strategy=strategy)
            one.step(data(), lr=0.05)
            found.append((one.settings.strategy, one.checksum()))
        assert len({checksum for _, checksum in found}) == 1
        return [strategy for strategy, _ in found]

    names = ["full_shard", "full_shard", "shard_grad_op", "shard_optimizer", "no_shard"]
    assert run_threads(3, main) == [names] * 3


def test_more_settings_reach_the_engine() -> None:
    def main(comm: Communicator) -> None:
        one = engine(
            comm, strategy="hybrid_shard", group=1, reshard_after_forward=False, recompute="block", recompute_every=2,
            accumulate="no_sync", dtype="bf16", reduce_dtype="fp32",
        )  # fmt: skip
        settings = one.settings
        assert (settings.group, settings.reshard_after_forward, settings.recompute_every) == (1, False, 2)
        assert (settings.accumulate, one.types.kind.name, one.types.wire.name) == ("no_sync", "bfloat16", "float32")
        assert np.isfinite(one.step(data(), lr=0.05).loss)

    run_threads(3, main)


def test_float16_has_a_loss_scale_unless_it_is_not_wanted() -> None:
    one = engine(dtype="float16")
    assert one.loss_scale is not None
    assert one.loss_scale.state() == LossScale().state()
    assert one.step(data(), lr=0.05).loss_scale == 65536.0
    assert engine(reduce_dtype="float16").loss_scale is not None
    assert engine(dtype="float16", loss_scale=None).loss_scale is None
    assert engine(dtype="bfloat16").loss_scale is None
    mine = LossScale(2.0**60, every=2)
    one = engine(dtype="float16", loss_scale=mine)
    assert one.loss_scale is mine
    result = one.step(data(), lr=0.05)
    assert not result.updated
    assert (result.loss_scale, mine.scale) == (2.0**60, 2.0**59)


def test_ranks_that_differ() -> None:
    def main(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=r"^rank 2 has seed = 1, rank 0 has seed = 0; start all ranks"):
            engine(comm, seed=comm.rank // 2)
        with pytest.raises(
            ConfigError, match=r"^rank 2 has loss_scale = LossScale\(2\.0, .*, rank 0 has loss_scale = Lo"
        ):
            engine(comm, dtype="float16", loss_scale=LossScale(2.0 if comm.rank == 2 else 4.0))
        one = engine(comm)
        with pytest.raises(ConfigError, match=r"^rank 1 has parameter head\.bias, rank 0 has parameter head\.weight;"):
            one.parameter("head.bias" if comm.rank == 1 else "head.weight")
        with pytest.raises(ConfigError, match=r"^rank 2 gives another batch than rank 0; .*shuffle seeded alike"):
            one.step(data(seed=comm.rank // 2), lr=0.1)
        with pytest.raises(ConfigError, match=r"^targets of the batch have shape \(11,\)"):
            one.evaluate(mpishard.batch(np.zeros((12, 5)), np.zeros(12 - comm.rank // 2, np.int64)))
        assert np.isfinite(one.step(data(), lr=0.1).loss)  # all is well again

    run_threads(3, main, deadline=10)


def test_a_parameter_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"^the model has no parameter 'weight'; it has hidden\.0\.weight, .*bias$"):
        engine().parameter("weight")
    with pytest.raises(ConfigError, match=r"it has wte\.weight, wpe\.weight, .* and 20 more$"):
        engine(model=TEXT).parameter("x")


def batches() -> list[tuple[object, object, str]]:
    x, y = np.zeros((12, 5)), np.zeros(12, np.int64)
    return [
        (x[:10], y, r"^inputs of the batch have shape \(10, 5\); a step of this engine takes \(12, 5\), its global"),
        (x[:, :3], y, r"^inputs of the batch have shape \(12, 3\)"),
        (x, y[:3], r"^targets of the batch have shape \(3,\); a step of this engine takes \(12,\)"),
        (x, y[:, None], r"^targets of the batch have shape \(12, 1\)"),
        (x, y.astype(float), r"^targets of the batch are float64; they must be whole numbers"),
        (x, y + 3, r"^a target of the batch is 3; it must be 0 to 2, or -100 \(not counted\)$"),
        (x, y - 1, r"^a target of the batch is -1;"),
        (x.astype(complex), y, r"^inputs of the batch are complex128; the model takes float32"),
    ]


@pytest.mark.parametrize(("inputs", "targets", "message"), batches())
def test_a_batch_that_does_not_fit(inputs, targets, message) -> None:
    one = engine()
    for call in (lambda feed: one.step(feed, lr=0.1), one.evaluate):
        with pytest.raises(ConfigError, match=message):
            call(mpishard.batch(inputs, targets))


def test_tokens_that_there_are_not() -> None:
    one, good = engine(model=TEXT), np.zeros((12, 4), np.int64)
    for inputs, message in (
        (good + 7, r"^an input of the batch is 7; the model knows the tokens 0 to 6$"),
        (good - 1, r"^an input of the batch is -1; "),
        (good + 0.5, r"^inputs of the batch are float64; the model takes tokens, such as int64$"),
    ):
        with pytest.raises(ConfigError, match=message):
            one.step(mpishard.batch(inputs, good), lr=0.1)
    one.step(mpishard.batch(good.astype(np.uint8), good.astype(np.uint16)), lr=0.1)


def test_lists_other_types_and_strides() -> None:
    one, (x, y) = engine(), (data().inputs, data().targets)
    expected = one.evaluate(mpishard.batch(x.astype(np.float32), y))
    for inputs, targets in ((x.tolist(), y.tolist()), (np.asfortranarray(x), y.astype(np.int8)), (x[::-1][::-1], y)):
        assert one.evaluate(mpishard.batch(inputs, targets)) == expected


@pytest.mark.parametrize("comm", ["COMM_WORLD", 3, object()])
def test_what_is_no_communicator(comm) -> None:
    with pytest.raises(ConfigError, match=r"^comm is a (str|int|object); give an intracommunicator of mpi4py"):
        engine(comm)


@pytest.mark.parametrize(("size", "rank", "told"), [("4", "0", "4"), ("", "2", "several")])
def test_no_communicator_in_one_of_several_processes(monkeypatch, size, rank, told) -> None:
    monkeypatch.setenv("PMI_RANK", rank)
    monkeypatch.setenv("PMI_SIZE", size)
    message = rf"^comm is None, one rank alone, .* started {told} processes; give MPI\.COMM_WORLD, or MPI\.COMM_SELF"
    with pytest.raises(ConfigError, match=message):
        communicator(None, NumpyOps())


def test_the_package_lists_and_loads_its_names() -> None:
    assert {"batch", "full_shard", "install_abort_hook"} <= set(dir(mpishard))
    assert mpishard.batch is mpishard.batch
    with pytest.raises(AttributeError, match="no attribute 'full_shards'"):
        _ = mpishard.full_shards
