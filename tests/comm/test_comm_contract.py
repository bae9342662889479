import pytest

from mpishard.array.dtypes import dtype
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import LocalCommunicator, run_threads
from mpishard.testing import communicator as suite
from mpishard.testing import rounds


@pytest.mark.parametrize("name", suite.CHECKS)
def test_one_rank_alone(name: str) -> None:
    suite.CHECKS[name](LocalCommunicator(NumpyOps()))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", suite.CHECKS)
def test_threads(name: str, size: int) -> None:
    run_threads(size, suite.CHECKS[name], deadline=20)


@pytest.mark.parametrize("name", suite.FLOATS)
def test_the_suites_numbers_tell_one_order_of_sums_from_another(name: str) -> None:
    fulls = [rounds.data(1000, dtype(name), rank) for rank in range(3)]
    forward = rounds.ordered(fulls, 0, 1000, None)
    assert (forward != rounds.ordered(fulls[::-1], 0, 1000, None)).any()
    before = rounds.data(1000, forward.dtype, 9)
    assert (rounds.ordered(fulls, 0, 1000, before) != before + forward).any()
