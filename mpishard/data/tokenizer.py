"""Text as bytes: the tokenizer that needs no file."""

from __future__ import annotations

import numpy as np

from mpishard.array.dtypes import Array
from mpishard.errors import DataError

__all__ = ["ByteTokenizer"]


class ByteTokenizer:
    """Every byte of the UTF-8 text is one token."""

    vocabulary = 256

    def encode(self, text: str | bytes) -> Array:
        """Return the tokens, uint8 of shape (bytes,), of ``text``; text is taken as UTF-8, bytes as they are."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8)

    def decode(self, tokens: Array) -> str:
        """Return the text of ``tokens``; bytes that are no UTF-8, as a model may say, become U+FFFD.

        Raises:
            DataError: a token is not in 0 .. 255.
        """
        bad = tokens[(tokens < 0) | (tokens >= self.vocabulary)]
        if bad.size:
            raise DataError(f"token {bad[0]} is no byte; only tokens 0 .. 255, of a byte-level model, are text")
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")
