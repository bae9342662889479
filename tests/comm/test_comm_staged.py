"""Copies of the staged transport between pinned memory and the device."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.array.cupy_ops import CupyOps
from mpishard.comm.lane import Lane
from tests.standin import installed, runtime

pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))

from mpishard.comm import staged


@pytest.mark.parametrize("most", [2**31 - 1, 19])  # rows that lie further apart than CUDA copies at once
def test_rows_far_apart(monkeypatch, most):
    monkeypatch.setattr(runtime, "MAX_PITCH", most)
    monkeypatch.setattr(staged, "_PITCH", most)
    with installed():
        ops = CupyOps()
        stage = staged._Stage(Lane(ops), 64)
        values = np.arange(20, dtype=np.float32).reshape(4, 5)
        x, y = (ops.empty(20, values.dtype).reshape(4, 5) for _ in range(2))
        ops.upload(values, x)
        ops.upload(-values, y)
        ops.stream.synchronize()
        send = stage._slots[0].send
        stage.to_host(send, x, [(0, 1, 1), (2, 1, 2)], 3)
        stage.down.synchronize()
        found = send[:48].view(np.float32).reshape(4, 3)
        assert found[[0, 2, 3]].tolist() == values[[0, 2, 3], 1:4].tolist()
        stage.to_device(send, y, [(0, 2, 1), (2, 2, 2)], 3)
        stage._up.synchronize()
        expected = -values
        expected[[0, 2, 3], 2:] = values[[0, 2, 3], 1:4]
        assert ops.fetch(y).tolist() == expected.tolist()
