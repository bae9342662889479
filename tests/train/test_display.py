import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from mpishard.shard.results import StepResult
from mpishard.train.display import curve_table, duration, memory_table, progress_line, size
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


def test_a_skipped_update_is_told():
    result = StepResult(4, math.nan, 8, math.nan, 0.1, False, True, False, {})
    assert "update skipped: the gradient is not finite" in progress_line(result, 9, 10.0, 1000, 5.0)
    assert "skipped" not in progress_line(StepResult(4, 1.0, 8, 1.0, 0.1, True, True, False, {}), 9, 10.0, 1000, 5.0)


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
