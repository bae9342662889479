"""The error function for NumPy arrays, to full double precision.

Rational Chebyshev approximations of W. J. Cody, "Rational Chebyshev approximations for the error function",
Mathematics of Computation 23 (1969) 631-637: erf for |x| <= 0.46875, erfc above.
"""

from __future__ import annotations

import numpy as np

from mpishard.array.dtypes import Array

__all__ = ["erf"]

_SMALL = 0.46875
_NEAR = (
    (
        1.85777706184603153e-1,
        3.16112374387056560e0,
        1.13864154151050156e2,
        3.77485237685302021e2,
        3.20937758913846947e3,
    ),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
_MIDDLE = (
    (
        2.15311535474403846e-8,
        5.64188496988670089e-1,
        8.88314979438837594e0,
        6.61191906371416295e1,
        2.98635138197400131e2,
        8.81952221241769090e2,
        1.71204761263407058e3,
        2.05107837782607147e3,
        1.23033935479799725e3,
    ),
    (
        1.0,
        1.57449261107098347e1,
        1.17693950891312499e2,
        5.37181101862009858e2,
        1.62138957456669019e3,
        3.29079923573345963e3,
        4.36261909014324716e3,
        3.43936767414372164e3,
        1.23033935480374942e3,
    ),
)
_FAR = (
    (
        1.63153871373020978e-2,
        3.05326634961232344e-1,
        3.60344899949804439e-1,
        1.25781726111229246e-1,
        1.60837851487422766e-2,
        6.58749161529837803e-4,
    ),
    (
        1.0,
        2.56852019228982242e0,
        1.87295284992346047e0,
        5.27905102951428412e-1,
        6.05183413124413191e-2,
        2.33520497626869185e-3,
    ),
)


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    top, bottom = coefficients
    p = np.full_like(x, top[0])
    q = np.full_like(x, bottom[0])
    for a, b in zip(top[1:], bottom[1:], strict=True):
        p = p * x + a
        q = q * x + b
    return p / q


def erf(x: Array) -> Array:
    """Return erf(x) in float64 for x of any shape; made for tiles of a few thousand elements."""
    magnitude = np.abs(np.asarray(x, dtype=np.float64))
    near = magnitude <= _SMALL
    middle = ~near & (magnitude <= 4.0)
    result = np.empty_like(magnitude)
    y = magnitude[near]
    result[near] = y * _ratio(_NEAR, y * y)
    y = magnitude[middle]
    result[middle] = 1.0 - np.exp(-y * y) * _ratio(_MIDDLE, y)
    y = np.minimum(magnitude[~near & ~middle], 30.0)
    inverse = 1.0 / (y * y)
    result[~near & ~middle] = 1.0 - np.exp(-y * y) / y * (1.0 / np.sqrt(np.pi) - inverse * _ratio(_FAR, inverse))
    np.copysign(result, x, out=result)
    return np.where(np.isnan(x), np.nan, result)
