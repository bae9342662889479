"""Tokens and targets that there are not: refused, and never taken as an index that counts from the end."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.array.constants import IGNORE
from mpishard.array.numpy_ops import NumpyOps
from mpishard.errors import DataError

ROWS, WIDTH = 6, 3
LOW, HIGH = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def embedding(numbers):
    NumpyOps().embedding(np.zeros((ROWS, WIDTH)), numbers, np.zeros((numbers.size, WIDTH)))


def embedding_backward(numbers):
    NumpyOps().embedding_backward(numbers, np.zeros((numbers.size, WIDTH)), np.zeros((ROWS, WIDTH)))


def cross_entropy(numbers):
    NumpyOps().cross_entropy(np.zeros((numbers.size, ROWS)), numbers, np.zeros(numbers.size), 1.0, True)


OPERATIONS = [(embedding, "token"), (embedding_backward, "token"), (cross_entropy, "target")]


@pytest.mark.parametrize(("operation", "name"), OPERATIONS)
@pytest.mark.parametrize("wrong", [-1, ROWS, LOW, HIGH, IGNORE - 1, IGNORE + 1])
@pytest.mark.parametrize("place", [0, 2, 2500])
def test_a_number_that_there_is_not(operation, name, wrong, place):
    numbers = np.arange(2501) % ROWS
    operation(numbers)
    numbers[place] = wrong
    with pytest.raises(DataError, match=rf"^the data hold the {name} {wrong}; the model takes 0 to 5[,;].* mend"):
        operation(numbers)


def test_only_targets_may_be_ignored():
    numbers = np.full(3, IGNORE)
    cross_entropy(numbers)
    for operation in (embedding, embedding_backward):
        with pytest.raises(DataError, match=r"^the data hold the token -100; the model takes 0 to 5; mend the data"):
            operation(numbers)
    with pytest.raises(DataError, match=r"the target 6; the model takes 0 to 5, or -100 where there is none; mend"):
        cross_entropy(np.full(1, 6))


@pytest.mark.parametrize(("operation", "name"), OPERATIONS)
def test_no_numbers_at_all(operation, name):
    operation(np.zeros(0, np.int64))
