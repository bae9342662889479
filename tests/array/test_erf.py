import math

import numpy as np

from mpishard.array.erf import erf

POINTS = np.concatenate([
    np.linspace(-7, 7, 28_001), np.linspace(-0.5, 0.5, 2_001), np.logspace(-300, 2, 605), -np.logspace(-300, 2, 605),
    np.nextafter([0.46875, 0.46875, 4.0, 4.0], [0, 1, 0, 9]), [0.0, -0.0, 0.46875, 4.0, 1e308, -1e308, np.inf, -np.inf],
])  # fmt: skip


def test_erf_equals_the_c_library_to_the_last_bits():
    expected = np.array([math.erf(x) for x in POINTS.tolist()])
    found = erf(POINTS)
    spacing = np.spacing(np.maximum(abs(expected), np.finfo(float).tiny))
    assert (abs(found - expected) / spacing).max() <= 4
    assert (np.signbit(found) == np.signbit(POINTS)).all()
    assert (abs(found) <= 1).all()


def test_erf_is_odd():
    assert (erf(-POINTS) == -erf(POINTS)).all()


def test_erf_of_nan_is_nan():
    found = erf(np.array([np.nan, 0.5, np.nan]))
    assert np.isnan(found).tolist() == [True, False, True]
    assert abs(found[1] - math.erf(0.5)) < 1e-15


def test_erf_of_fp32_numbers_and_other_shapes_is_fp64():
    x = np.linspace(-3, 3, 30, dtype=np.float32).reshape(2, 3, 5)
    found = erf(x)
    assert (found.shape, found.dtype) == (x.shape, np.float64)
    assert abs(found - np.vectorize(math.erf)(x.astype(float))).max() < 1e-15
    assert erf(np.empty((0, 3))).shape == (0, 3)
