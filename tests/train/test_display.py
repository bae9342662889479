import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from mpishard.shard.results import StepResult
from mpishard.train.display import curve_table, duration, memory_table, power, progress_line, size
from mpishard.train.sample import sample


def shown(table):
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


@pytest.mark.parametrize("losses", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 2.0], [math.nan], [3.0, 1.5]])
def test_a_curve_of_any_losses_is_drawn(losses):
    text = shown(curve_table([(i, loss, None) for i, loss in enumerate(losses)]))
    assert text.count("█") == {(3.0, 1.5): 45, (math.inf, 2.0): 30}.get(tuple(losses), text.count("█"))
    assert "training" in text


def test_units_are_readable():
    assert [size(n) for n in (0, 999, 1000, 999_499, 999_500, 23_040_000, 7e9, 2.8e12)] == [
        "0 B", "999 B", "1.0 kB", "999.5 kB", "1.0 MB", "23.0 MB", "7.0 GB", "2800.0 GB",
    ]  # fmt: skip
    assert [duration(s) for s in (0.4, 59, 60, 3599, 90061)] == ["0s", "59s", "1m00s", "59m59s", "25h01m"]


def result(loss, updated, loss_scale=1.0):
    return StepResult(4, loss, 8, loss, 0.1, updated, True, False, loss_scale, {})


def test_a_skipped_update_is_told():
    line = progress_line(result(math.nan, False), 9, 10.0, 1000, 5.0)
    assert line.endswith("  update skipped: the gradient is not finite")
    assert "skipped" not in progress_line(result(1.0, True), 9, 10.0, 1000, 5.0)


def test_the_loss_scale_is_told_where_there_is_one():
    line = progress_line(result(1.0, True, 65536.0), 9, 10.0, 1000, 5.0, 131072.0)
    assert "  lr 1.00e-01  scale 65536        10 tokens/s" in line
    assert "now" not in line
    line = progress_line(result(math.inf, False, 2.0**-3), 9, 10.0, 1000, 5.0, 2.0**-4)
    assert "scale 2**-3 " in line
    assert line.endswith("  update skipped: the gradient is not finite (loss scale now 2**-4)")
    assert "scale" not in progress_line(result(1.0, True), 9, 10.0, 1000, 5.0)


def test_powers_of_two_are_short():
    found = [power(2.0**exponent) for exponent in (-24, -1, 0, 16, 30, 31, 64)]
    assert found == ["2**-24", "2**-1", "1", "65536", "1073741824", "2**31", "2**64"]


def test_the_memory_table_shows_the_first_ranks_and_the_largest():
    ranks = [{"parameters": 1000 * (r + 1), "saved": 0} for r in range(6)]
    text = shown(memory_table(ranks, {"parameters": 12_000, "saved": 0}, "full_shard"))
    assert "most of 6" in text
    assert "6.0 kB" in text
    assert "0.50" in text
    assert "saved" not in text


class Diverged:
    """A model whose predictions are not finite after some tokens."""

    def __init__(self, good):
        self.model = SimpleNamespace(sample_shape=(4,))
        self.good = good

    def predict(self, window, position):
        self.good -= 1
        return np.full(7, 0.0 if self.good >= 0 else np.nan, np.float32)


def test_sampling_from_a_diverged_model_stops():
    tokens = sample(Diverged(3), [1, 2], 10)
    assert len(tokens) == 5
    assert all(0 <= token < 7 for token in tokens)
