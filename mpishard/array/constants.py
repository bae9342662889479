"""Numbers that rooms without arrays need too."""

__all__ = ["ALIGN", "CHUNK", "EXACT_WORDS", "IGNORE"]

#: Elements of a flat buffer that are summed together first; shards are whole multiples of it, so the
#: partial sums of a norm do not depend on the number of ranks.
CHUNK = 512

#: Parameters begin at multiples of this many elements of their flat buffer (64 bytes in fp32).
ALIGN = 16

#: A target with this value has no loss and no gradient (PyTorch's default ignore index).
IGNORE = -100

#: Words of a sum without rounding: 20 limbs, and a count of values that are not finite.
EXACT_WORDS = 21
