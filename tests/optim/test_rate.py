from itertools import pairwise

import pytest

from mpishard.optim.rate import WarmupCosine


def test_values():
    rate = WarmupCosine(peak=1.0, lowest=0.1, warmup=4, steps=13)
    found = [rate(step) for step in range(13)]
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    # then half a cosine over 8 steps: cos of 0, 22.5, 45, ... degrees
    assert found[4] == 1.0
    assert found[6] == pytest.approx(0.1 + 0.9 * (1 + 2**-0.5) / 2, rel=1e-14)
    assert found[8] == pytest.approx(0.55, rel=1e-14)
    assert found[10] == pytest.approx(0.1 + 0.9 * (1 - 2**-0.5) / 2, rel=1e-14)
    assert found[12] == pytest.approx(0.1, rel=1e-14)
    assert all(a > b for a, b in pairwise(found[4:]))


def test_without_warmup_it_starts_at_the_peak():
    rate = WarmupCosine(peak=3e-4, lowest=0.0, warmup=0, steps=100)
    assert rate(0) == 3e-4
    assert rate(99) == pytest.approx(0.0, abs=1e-19)


def test_after_the_last_step_it_stays():
    rate = WarmupCosine(peak=1.0, lowest=0.25, warmup=2, steps=10)
    assert rate(9) == rate(10) == rate(1000) == 0.25


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (5, 5), (10, 5), (4, 5)])
def test_runs_that_end_with_warmup(warmup, steps):
    rate = WarmupCosine(peak=1.0, lowest=0.1, warmup=warmup, steps=steps)
    found = [rate(step) for step in range(steps)]
    assert all(0 < value <= 1 for value in found)
    assert found == sorted(found)
    assert warmup == 0 or found[0] == 1 / warmup
    assert warmup != steps or found[-1] == 1.0


def test_lowest_of_one_is_constant():
    rate = WarmupCosine(peak=0.5, lowest=1.0, warmup=0, steps=7)
    assert {rate(step) for step in range(7)} == {0.5}
