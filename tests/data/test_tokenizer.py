import numpy as np
import pytest

from mpishard.data.tokenizer import ByteTokenizer
from mpishard.errors import DataError


@pytest.mark.parametrize("text", ["", "abc", "Zürich → 東京 🙂\n"])
def test_text_comes_back(text):
    tokens = ByteTokenizer().encode(text)
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == list(text.encode())
    assert ByteTokenizer().decode(tokens) == text
    assert ByteTokenizer().decode(tokens.astype(np.int64)) == text


def test_bytes_are_taken_as_they_are():
    assert ByteTokenizer().encode(b"\xff\x00").tolist() == [255, 0]


def test_what_is_no_utf8_is_replaced():
    assert ByteTokenizer().decode(np.array([97, 255, 98])) == "a\ufffdb"


@pytest.mark.parametrize("token", [-1, 256])
def test_what_is_no_byte_is_refused(token):
    with pytest.raises(DataError, match=f"token {token} is no byte"):
        ByteTokenizer().decode(np.array([97, token]))
