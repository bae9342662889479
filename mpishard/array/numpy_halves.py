"""float16 to float32 and back, by other ways than NumPy's own casts, with their bits.

NumPy casts float16 one element at a time, and says through the processor's exception flags that a result is below the
smallest normal number or infinite: 65 nanoseconds for each small element on a machine where 2 are usual, and a warning
for an infinite one. In training many are small. Here every element costs 1 to 2 nanoseconds and nothing warns.
"""

from __future__ import annotations

import numpy as np

from mpishard.array.dtypes import Array

__all__ = ["HALF_BYTES", "narrow_halves", "widen_halves"]

#: bytes of scratch for an element that either function takes
HALF_BYTES = 8
#: every float16, in the order of its bits
_ALL: Array = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
_ALL.setflags(write=False)
_LARGEST = 65520.0  # what is not below this in magnitude does not round to a finite number
_EXPONENT = np.uint32(0x7F800000)
_LEAST = np.uint32(113 << 23)  # 2**-14, from which on down the unit of the last place stays
_FAR = np.uint32(13 << 23)
_SHIFT = np.uint32(13)
_BIAS = np.uint32(126 << 10)
_TOP = np.uint32(16)
_SIGN = np.uint32(0x8000)


def widen_halves(x: Array, out: Array, scratch: Array) -> None:
    """``out = x`` for x float16, out float32 and contiguous, of one shape; scratch: uint8, HALF_BYTES an element."""
    # np.take converts other numbers in memory of its own. It has nothing to clip: uint16 numbers them all.
    places = scratch[: HALF_BYTES * x.size].view(np.int64).reshape(x.shape)
    np.copyto(places, x.view(np.uint16))
    np.take(_ALL, places, out=out, mode="wrap")


def narrow_halves(x: Array, out: Array, scratch: Array) -> None:
    """``out = x`` for x float32, out float16, of one shape and any strides; scratch as in :func:`widen_halves`.

    To the nearest, ties to even; infinite from 65520 on.
    """
    if not x.size:
        return
    bits, power = (part.view(np.uint32).reshape(x.shape) for part in scratch[: HALF_BYTES * x.size].reshape(2, -1))
    magnitude = bits.view(np.float32)
    np.abs(x, out=magnitude)
    if not np.maximum.reduce(magnitude, axis=None) < _LARGEST:  # or NaN
        with np.errstate(all="ignore"):
            np.copyto(out, x, casting="same_kind")
        return
    # float32's last place of 2**13 times the power of two below a number is float16's of that number, so adding it
    # rounds. What the sum has beyond it are the number's digits: 1024 to 2048, or fewer below 2**-14.
    np.bitwise_and(bits, _EXPONENT, out=power)
    np.maximum(power, _LEAST, out=power)
    np.add(power, _FAR, out=power)
    np.add(magnitude, power.view(np.float32), out=magnitude)
    np.subtract(bits, power, out=bits)
    # The exponent, less one, is added above the digits: their own 1024 makes it whole.
    np.right_shift(power, _SHIFT, out=power)
    np.add(bits, power, out=bits)
    np.subtract(bits, _BIAS, out=bits)
    np.right_shift(x.view(np.uint32), _TOP, out=power)
    np.bitwise_and(power, _SIGN, out=power)
    np.bitwise_or(bits, power, out=bits)
    np.copyto(out.view(np.uint16), bits, casting="unsafe")
