"""What the child tries: it finds data that are wrong, and says what it does in lines of its own."""

from __future__ import annotations

import faulthandler
import json

import numpy as np
import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import attempts as module
from mpishard.comm.attempts import SIZES, attempts
from mpishard.comm.base import Communicator
from mpishard.doctor.child import MARK, main


def test_each_call_has_the_right_values_alone() -> None:
    found = attempts(MPI.COMM_SELF, False, None)
    assert {one.memory for one in found} == {"host"}
    assert {one.nbytes for one in found} == set(SIZES)
    for one in found:
        assert one.run() == "", one.what


def test_wrong_bytes_are_found() -> None:
    memory = module._Memory(NumpyOps(), False)
    values = np.arange(10, dtype=np.uint8)
    assert memory.differs(memory.of(values), values) == ""
    spoiled = memory.of(values)
    spoiled[[3, 7]] += 1
    assert memory.differs(spoiled, values) == "2 of 10 bytes are wrong, from byte 3 on"


@pytest.mark.parametrize("operation", ["gather", "reduce"])
def test_a_transport_with_wrong_values_is_found(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = getattr(Communicator, f"bind_{'all_gather' if operation == 'gather' else 'reduce_scatter'}")

    def spoiled(self: Communicator, *arrays: np.ndarray):
        bound = bind(self, *arrays)
        start = bound.start

        def wrong(add: bool = False):
            work = start(add)
            work.wait_inputs()
            arrays[1][-1] += 1
            return work

        bound.start = wrong
        return bound

    monkeypatch.setattr(Communicator, bind.__name__, spoiled)
    transport = next(one for one in attempts(MPI.COMM_SELF, False, None) if one.what == "transport mpi")
    assert transport.run() == f"the {'all-gather' if operation == 'gather' else 'reduce-scatter'} has wrong values"


def test_the_child_says_what_it_does(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("enable", "dump_traceback_later"):  # they would be for this process from here on
        monkeypatch.setattr(faulthandler, name, lambda *args, **kwargs: None)
    assert main(["host", "12", "60"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if line]
    said = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    count = len(said[0]["things"])
    assert [sorted(one) for one in said[1:]] == [["begin"], ["end", "outcome", "text"]] * (count - 12) + [["over"]]
    assert [one["begin"] for one in said if "begin" in one] == list(range(12, count))
