import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpishard
from mpishard.data.sampler import Sampler, permute, window_count
from mpishard.errors import ConfigError, EngineError


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 12, 97, 1000, 1023, 1024, 1025])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_the_permutation_is_a_bijection(count, key):
    assert sorted(permute(index, count, key) for index in range(count)) == list(range(count))


def test_the_permutation_mixes():
    count = 1000
    order = [permute(index, count, 5) for index in range(count)]
    fixed = sum(index == place for index, place in enumerate(order))
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
    # of a random permutation 1 element is fixed and 2 neighbours stay together, in the mean
    assert fixed < 10
    assert neighbours < 15
    # each quarter of the order holds about a quarter of each quarter of the numbers
    for start in range(0, count, 250):
        for low in range(0, count, 250):
            assert 30 < sum(low <= place < low + 250 for place in order[start : start + 250]) < 95


def test_every_order_of_a_few_windows_occurs():
    seen = {tuple(permute(index, 3, key * 0x9E3779B97F4A7C15 % 2**64) for index in range(3)) for key in range(200)}
    assert len(seen) == 6


def test_the_order_is_pinned():
    # a change here changes the data order of every run that is resumed
    sampler = Sampler(windows=10, global_batch=2, micro_batch=1, seed=7, epochs=2)
    order = [sampler.window_of(index) for index in range(20)]
    assert order == [2, 5, 8, 7, 3, 6, 1, 9, 4, 0] + [3, 7, 4, 5, 1, 6, 2, 9, 8, 0]


@pytest.mark.parametrize("windows", [1, 2, 3, 7, 1000])
def test_each_epoch_reads_every_window_once(windows):
    sampler = Sampler(windows, global_batch=1, micro_batch=1, seed=3, epochs=3)
    epochs = [[sampler.window_of(epoch * windows + i) for i in range(windows)] for epoch in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(windows))
    if windows == 1000:
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_the_seed_changes_the_order():
    orders = {tuple(Sampler(50, 1, 1, seed).window_of(i) for i in range(50)) for seed in range(20)}
    assert len(orders) == 20


@pytest.mark.parametrize(
    ("windows", "global_batch", "epochs"), [(10, 4, 1), (10, 4, 3), (7, 7, 1), (3, 12, 5), (5, 6, 1)]
)
def test_the_last_step_that_does_not_fit_does_not_exist(windows, global_batch, epochs):
    sampler = Sampler(windows, global_batch, 1, seed=1, epochs=epochs)
    steps = windows * epochs // global_batch
    assert sampler.steps == steps
    assert [sampler.has_step(step) for step in range(steps + 2)] == [True] * steps + [False] * 2
    assert not sampler.has_step(-1)
    with pytest.raises(EngineError, match=f"step {steps} was read"):
        sampler.samples(steps, 0)


def test_data_that_repeat_have_no_end():
    sampler = Sampler(3, global_batch=8, micro_batch=2, seed=1, epochs=0)
    assert sampler.steps is None
    assert sampler.has_step(10**12)
    assert all(0 <= window < 3 for window in sampler.samples(10**12, 3))


def test_a_step_reads_the_global_samples_in_order():
    sampler = Sampler(windows=37, global_batch=12, micro_batch=3, seed=2)
    for step in (0, 2, 3, 50):
        read = [window for micro in range(4) for window in sampler.samples(step, micro)]
        assert read == [sampler.window_of(step * 12 + i) for i in range(12)]
    with pytest.raises(EngineError, match="micro-batch 4 was read"):
        sampler.samples(0, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_what_a_step_reads_does_not_depend_on_the_ranks(size):
    sampler = Sampler(windows=37, global_batch=24, micro_batch=2, seed=2)
    owned = [sampler.rank_micro_batches(rank, size) for rank in range(size)]
    rounds = [micro for turn in zip(*owned) for micro in turn]
    # round after round, in rank order, the ranks run through the global micro-batches in order
    assert rounds == list(range(12))
    assert all(micro % size == rank for rank, micros in enumerate(owned) for micro in micros)


def test_ranks_that_do_not_divide_the_micro_batches_are_refused():
    with pytest.raises(ConfigError, match="12 micro-batches a step cannot be dealt evenly to 5 ranks"):
        Sampler(windows=37, global_batch=24, micro_batch=2, seed=2).rank_micro_batches(0, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 2, 1), "windows 0"),
        ((5, 0, 2, 1), "global_batch 0"),
        ((5, 4, 0, 1), "micro_batch 0"),
        ((5, 4, 2, 1, -1), "epochs -1"),
        ((5, 4, 3, 1), "micro-batches of 3 sequences do not fill a global batch of 4"),
    ],
)
def test_numbers_that_make_no_order_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Sampler(*arguments)


@pytest.mark.parametrize(("tokens", "windows"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (81, 10)])
def test_windows_share_the_token_between_them(tokens, windows):
    assert window_count(tokens, 8) == windows


def test_no_array_library_is_imported():
    code = "import sys, mpishard.data.sampler; print([n for n in ('numpy', 'mpi4py', 'pydantic') if n in sys.modules])"
    root = Path(mpishard.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
