import os

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator
from mpishard.errors import ConfigError
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings
from mpishard.train.room import check_room, planned_memory, room, thread_warning


def test_what_fits_fits():
    check_room(room() // 4, 3, NumpyOps())


def test_what_does_not_fit_is_refused_with_figures():
    with pytest.raises(ConfigError, match=r"a rank needs .* GB and 3 of them run on this machine, which has .* GB"):
        check_room(room() // 2, 3, NumpyOps())


def test_the_plan_is_what_the_engine_holds():
    model, comm = gpt2(Gpt2(2, 12, 3, 9, 29)), LocalCommunicator(NumpyOps())
    engine = Engine(model, comm, comm.ops, AdamW(), Settings(), micro_batch=2, global_batch=4, seed=0)
    assert planned_memory(model, comm, AdamW(), Settings(), 2) == engine.memory()


def test_a_plan_beyond_the_address_space_is_the_users_mistake():
    model, comm = gpt2(Gpt2(1, 10**7, 1, 8, 300)), LocalCommunicator(NumpyOps())
    with pytest.raises(ConfigError, match=r"does not fit the address space .*; use a smaller model"):
        planned_memory(model, comm, AdamW(), Settings(), 1)


@pytest.mark.parametrize(
    ("ranks", "cores", "machine", "variables", "told"),
    [
        (4, 8, 8, {}, "each of 4 ranks on this machine starts 8 BLAS threads and has 2 cores"),
        (4, 8, 8, {"OPENBLAS_NUM_THREADS": "2"}, ""),
        (4, 8, 8, {"OMP_NUM_THREADS": "4"}, "starts 4 BLAS threads and has 2 cores"),
        (16, 8, 8, {}, "has 1 core, which"),
        (16, 8, 8, {"OPENBLAS_NUM_THREADS": "1"}, ""),
        (4, 2, 8, {}, ""),  # bound by the launcher
        (4, 2, 8, {"OMP_NUM_THREADS": "8"}, "starts 8 BLAS threads and has 2 cores"),
        (1, 8, 8, {}, ""),
    ],
)
def test_too_many_threads_are_warned_of(monkeypatch, ranks, cores, machine, variables, told):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = thread_warning(ranks)
    assert told in found
    assert bool(told) == bool(found)
