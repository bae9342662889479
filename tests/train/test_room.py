import os

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.alone import AloneCommunicator
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run as run_threads
from mpishard.errors import ConfigError
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings
from mpishard.train.room import check_room, planned, room, thread_warning


def test_what_fits_fits():
    check_room(room() // 4, 3, NumpyOps())


def test_what_does_not_fit_is_refused_with_figures():
    with pytest.raises(ConfigError, match=r"a rank needs .* GB and 3 of them run on this machine, which has .* GB"):
        check_room(room() // 2, 3, NumpyOps())


class Gpu:
    """As much of a GPU's operations as the check asks."""

    device, room, own_bytes = "cuda:0", 10**9, 0


def test_what_a_gpu_and_the_host_beside_it_hold():
    check_room(10**9, 4, Gpu(), room() // 4)
    with pytest.raises(ConfigError, match=r"a rank needs 1\.0 GB and its GPU has 1\.0 GB left \(cuda:0\)"):
        check_room(10**9 + 1, 1, Gpu())
    with pytest.raises(ConfigError, match=r"a rank keeps .* in host memory and 4 .*, or leave shard\.offload at none"):
        check_room(10**6, 4, Gpu(), room() // 3)


@pytest.mark.parametrize(
    ("settings", "types"),
    [
        (Settings(), ("float32", "")),
        (Settings("no_shard", micros=2), ("bfloat16", "")),
        (Settings("shard_grad_op", recompute="block", recompute_every=2, micros=2), ("float16", "float32")),
        (Settings("hybrid_shard", group=2), ("float32", "bfloat16")),
        (Settings("hybrid_shard", group=1, accumulate="no_sync", micros=2), ("float32", "")),
    ],
    ids=lambda value: value.strategy if isinstance(value, Settings) else "-".join(value),
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_plan_is_what_the_engine_holds(settings, types, ranks):
    model = gpt2(Gpt2(3, 12, 3, 9, 29))

    def main(comm):
        found = planned(model, comm, AdamW(), settings, 2, types)
        engine = Engine(
            model, comm, comm.ops, AdamW(), settings, micro_batch=2, global_batch=2 * ranks * settings.micros, seed=0,
            dtype_name=types[0], reduce_dtype=types[1],
        )  # fmt: skip
        assert found.held == engine.memory()
        assert found.total == sum(found.held.values())

    run_threads(ranks, main)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_plan_knows_the_scratch_of_groups(group):
    """Which a transport has for as many ranks as talk to each other."""
    model, comm = gpt2(Gpt2(2, 12, 3, 9, 29)), AloneCommunicator(1, 4, NumpyOps())
    settings = Settings("hybrid_shard", group=group)
    engine = Engine(model, comm, comm.ops, AdamW(), settings, micro_batch=2, global_batch=8, seed=0)
    assert planned(model, comm, AdamW(), settings, 2).held == engine.memory()


def test_a_plan_beyond_the_address_space_is_the_users_mistake():
    model, comm = gpt2(Gpt2(1, 10**7, 1, 8, 300)), LocalCommunicator(NumpyOps())
    with pytest.raises(ConfigError, match=r"does not fit the address space .*; use a smaller model"):
        planned(model, comm, AdamW(), Settings(), 1)


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
