import tracemalloc

import numpy as np
import pytest

from mpishard.data.loader import Batches
from mpishard.data.sampler import Sampler
from mpishard.data.tokens import TokenFile, write_tokens
from mpishard.errors import DataError, EngineError, ShapeError


def opened(path, count=1000, vocabulary=5000, **changes):
    write_tokens(path, [np.arange(count)], vocabulary)
    settings = {"global_batch": 6, "micro_batch": 3, "seed": 1, "epochs": 0} | changes
    return Batches.open(path, 8, vocabulary, **settings)


def outputs(rows=3, sequence=8):
    return np.full((rows, sequence), -1, dtype=np.int64), np.full((rows, sequence), -1, dtype=np.int64)


def test_rows_are_the_windows_and_targets_the_next_tokens(tmp_path):
    batches = opened(tmp_path / "t.tokens")
    tokens, targets = outputs()
    for step in (0, 1, 30):
        for micro in (0, 1):
            batches.read(step, micro, tokens, targets)
            starts = 8 * np.array(batches.sampler.samples(step, micro))
            assert np.array_equal(tokens, starts[:, None] + np.arange(8))
            assert np.array_equal(targets, tokens + 1)


def test_an_epoch_has_every_token_but_the_first_as_a_target_once(tmp_path):
    batches = opened(tmp_path / "t.tokens", count=8 * 12 + 1, epochs=1)
    tokens, targets = outputs()
    seen = []
    step = 0
    while batches.sampler.has_step(step):
        for micro in range(batches.sampler.micro_batches):
            batches.read(step, micro, tokens, targets)
            seen += targets.ravel().tolist()
        step += 1
    assert sorted(seen) == list(range(1, 97))


def test_outputs_may_be_views(tmp_path):
    batches = opened(tmp_path / "t.tokens")
    both = np.zeros((3, 16), dtype=np.int64)
    batches.read(0, 0, both[:, :8], both[:, 8:])
    assert np.array_equal(both[:, 8:], both[:, :8] + 1)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 8), np.int64), ((3, 9), np.int64), ((3, 8), np.int32), ((24,), np.int64)]
)
def test_outputs_of_another_shape_are_refused(tmp_path, shape, dtype):
    wrong = np.zeros(shape, dtype)
    batches = opened(tmp_path / "t.tokens")
    right = outputs()[0]
    with pytest.raises(ShapeError, match=r"tokens_out is .* int64 \(3, 8\) is needed"):
        batches.read(0, 0, wrong, right)
    with pytest.raises(ShapeError, match="targets_out"):
        batches.read(0, 0, right, wrong)


def test_the_end_of_the_data_is_an_error(tmp_path):
    batches = opened(tmp_path / "t.tokens", count=8 * 6 + 1, epochs=1)
    with pytest.raises(EngineError, match="step 1 was read"):
        batches.read(1, 0, *outputs())


def test_reading_allocates_little(tmp_path):
    path = tmp_path / "t.tokens"
    sequence, rows = 8192, 16
    write_tokens(path, [np.arange(1 << 20) % 50000], 50257)
    batches = Batches.open(path, sequence, 50257, global_batch=32, micro_batch=rows, seed=1, epochs=0)
    tokens, targets = outputs(rows, sequence)
    batches.read(0, 0, tokens, targets)
    tracemalloc.start()
    batches.read(0, 1, tokens, targets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tokens.nbytes == 1 << 20
    assert peak < 1 << 16


def test_a_token_beyond_the_vocabulary_is_named(tmp_path):
    path = tmp_path / "t.tokens"
    write_tokens(path, [np.arange(99)], 100)
    raw = bytearray(path.read_bytes())
    raw[64 + 40] = 200
    path.write_bytes(raw)
    file = TokenFile(path)
    batches = Batches(file, Sampler(12, 12, 12, seed=1), 8)
    with pytest.raises(DataError, match=r"t\.tokens: holds token 200 in window [45], the vocabulary is 0 \.\. 99"):
        batches.read(0, 0, *outputs(12))


def test_a_file_of_a_larger_vocabulary_is_refused_at_once(tmp_path):
    path = tmp_path / "t.tokens"
    write_tokens(path, [np.zeros(99, np.int64)], 300)
    with pytest.raises(DataError, match=r"its vocabulary is 300, the model's is 256; set model\.vocabulary"):
        Batches(TokenFile(path), Sampler(12, 12, 12, seed=1), 8, vocabulary=256)
    Batches(TokenFile(path), Sampler(12, 12, 12, seed=1), 8, vocabulary=300)


def test_a_sampler_of_a_larger_file_is_refused(tmp_path):
    path = tmp_path / "t.tokens"
    write_tokens(path, [np.zeros(99, np.int64)], 256)
    with pytest.raises(DataError, match="holds 12 windows of 8 tokens, 13 were expected"):
        Batches(TokenFile(path), Sampler(13, 1, 1, seed=1), 8)


@pytest.mark.parametrize(("count", "epochs"), [(8, 0), (48, 1), (24, 2)])
def test_too_little_text_for_a_step_is_refused(tmp_path, count, epochs):
    with pytest.raises(DataError, match=rf"holds {count} tokens, one step needs {count + 1} .*use more text"):
        opened(tmp_path / "t.tokens", count=count, epochs=epochs)
    assert opened(tmp_path / "t.tokens", count=count + 1, epochs=epochs).sampler.has_step(0)
