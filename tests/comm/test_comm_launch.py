from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import launch, world
from mpishard.comm.local import LocalCommunicator
from mpishard.errors import ConfigError

NAMES = [
    *("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, environment: dict[str, object]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))


def fake_mpi(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    """Put an mpi4py in place whose world has this size, or that cannot be loaded."""
    package = types.ModuleType("mpi4py")
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    if size is not None:
        comm = types.SimpleNamespace(Get_size=lambda: size)
        package.MPI = types.SimpleNamespace(  # type: ignore[attr-defined]
            COMM_WORLD=comm, get_vendor=lambda: ("Some MPI", (1,)), Is_initialized=lambda: True
        )


@pytest.mark.parametrize(
    ("environment", "rank", "size"),
    [
        ({}, None, None),
        ({"PMI_RANK": 1, "PMI_SIZE": 4}, 1, 4),
        ({"OMPI_COMM_WORLD_RANK": 2, "OMPI_COMM_WORLD_SIZE": 3, "PMIX_RANK": 2}, 2, 3),
        ({"PMIX_RANK": 1}, 1, None),
        # a batch script's own process
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4}, None, None),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_STEP_ID": 0}, None, None),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 4}, None, None),
        # srun, without and with PMIx
        ({"SLURM_PROCID": 3, "SLURM_NTASKS": 8, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 4}, 3, 4),
        ({"SLURM_PROCID": 3, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 4, "PMIX_RANK": 3}, 3, 4),
        # mpiexec in a job: its proxies are the step's tasks
        ({"SLURM_PROCID": 1, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "PMI_RANK": 3, "PMI_SIZE": 4}, 3, 4),
        ({"PMI_RANK": "", "PMI_SIZE": "many"}, None, None),
    ],
)
def test_what_launchers_say(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, object], rank: int | None, size: int | None
) -> None:
    set_all(monkeypatch, environment)
    assert (launch.environment_rank(), launch.environment_size()) == (rank, size)


STEP = {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 8, "SLURM_PROCID": 5, "SLURM_LOCALID": 1}


@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": 5, "OMPI_COMM_WORLD_SIZE": 8, "OMPI_COMM_WORLD_LOCAL_RANK": 1}, 1),
        ({"PMI_RANK": 5, "PMI_SIZE": 8, "MPI_LOCALRANKID": 1}, 1),
        ({"PMI_RANK": 5, "PMI_SIZE": 8, "PMI_LOCAL_RANK": 3}, 3),
        ({"PMI_RANK": 5, "PMI_SIZE": 8}, None),
        ({"MV2_COMM_WORLD_LOCAL_RANK": 2}, 2),
        (STEP, 1),
        # srun --mpi=pmi2: the rank is PMI's, and SLURM's
        (STEP | {"PMI_RANK": 5, "PMI_SIZE": 8}, 1),
        # a batch script's own process
        ({"SLURM_LOCALID": 0, "SLURM_PROCID": 0, "SLURM_NTASKS": 8}, None),
        # mpiexec in a job: its proxies are the step's tasks
        (STEP | {"SLURM_STEP_NUM_TASKS": 2, "PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 3}, 3),
        (STEP | {"SLURM_STEP_NUM_TASKS": 2, "PMI_RANK": 3, "PMI_SIZE": 4}, None),
    ],
)
def test_what_launchers_say_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, object], local_rank: int | None
) -> None:
    set_all(monkeypatch, environment)
    assert launch.environment_local_rank() == local_rank


def test_operations_are_made_for_the_place_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    places = []

    def make(local_rank: int | None) -> NumpyOps:
        places.append(local_rank)
        return NumpyOps()

    fake_mpi(monkeypatch, None)
    assert world(make).transport == "local"
    set_all(monkeypatch, {"PMI_RANK": 0, "PMI_SIZE": 1, "MPI_LOCALRANKID": 0})
    assert world(make).transport == "local"
    assert places == [None, 0]


@pytest.mark.parametrize("found", [None, 1])
def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch, found: int | None) -> None:
    fake_mpi(monkeypatch, found)
    assert world(NumpyOps()).transport == "local"
    set_all(monkeypatch, {"SLURM_NTASKS": 4, "SLURM_PROCID": 0})
    assert world(NumpyOps()).transport == "local"


def test_local_is_refused_where_more_than_one_process_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {"PMI_RANK": 1, "PMI_SIZE": 2})
    with pytest.raises(ConfigError, match="started 2 processes and transport 'local' is one rank alone"):
        world(NumpyOps(), "local")


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mpl' is not known; choose one of auto, local, node, mpi, hierarchical, "):
        world(NumpyOps(), "mpl")


@pytest.mark.parametrize("transport", ["auto", "mpi"])
@pytest.mark.parametrize(
    "environment",
    [
        {"PMI_RANK": 0, "PMI_SIZE": 2},
        {"PMIX_RANK": 1},
        {"SLURM_PROCID": 0, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2},
    ],
)
def test_another_mpis_launcher_is_refused(
    monkeypatch: pytest.MonkeyPatch, transport: str, environment: dict[str, object]
) -> None:
    set_all(monkeypatch, environment)
    fake_mpi(monkeypatch, 1)
    with pytest.raises(ConfigError, match=r"Some MPI holds 1 process .*use the mpiexec of Some MPI") as caught:
        world(NumpyOps(), transport)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("transport", "environment"), [("auto", {"PMI_RANK": 0, "PMI_SIZE": 2}), ("mpi", {})])
def test_mpi_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, transport: str, environment: dict[str, object]
) -> None:
    set_all(monkeypatch, environment)
    fake_mpi(monkeypatch, None)
    with pytest.raises(ConfigError, match=r"pip install mpich, or load the cluster's MPI module") as caught:
        world(NumpyOps(), transport)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["import mpishard.comm", "import mpishard.comm.dry, mpishard.comm.threads"])
def test_importing_starts_no_mpi(line: str) -> None:
    code = f"import sys; {line}; print([name for name in sys.modules if name.split('.')[0] == 'mpi4py'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


class Aborts(LocalCommunicator):
    def __init__(self) -> None:
        super().__init__(NumpyOps())
        self.rank = 5
        self.said: list[tuple[str, int]] = []

    def abort(self, message: str, code: int = 1) -> None:
        self.said.append((message, code))


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Aborts]:
    comm = Aborts()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    launch.install_abort_hook(comm)
    yield comm


def test_an_uncaught_exception_aborts(hooked: Aborts) -> None:
    try:
        raise ValueError("no such shard")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    ((message, code),) = hooked.said
    assert code == 1
    lines = message.split("\n")
    assert all(line.startswith("[rank 5] ") for line in lines)
    assert lines[0] == "[rank 5] uncaught exception; ending all ranks"
    assert lines[-1] == "[rank 5] ValueError: no such shard"
    assert message.count("ValueError: no such shard") == 1 and "Traceback" in message


def test_an_uncaught_exception_in_a_thread_aborts(hooked: Aborts) -> None:
    def fails() -> None:
        raise ValueError("in the dark")

    thread = threading.Thread(target=fails, name="reader")
    thread.start()
    thread.join()
    ((message, _),) = hooked.said
    assert "uncaught exception in thread 'reader'" in message and "ValueError: in the dark" in message


def test_the_second_failure_is_silent(hooked: Aborts, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("one of two")

    release = threading.Event()

    def slow(message: str, code: int) -> None:
        hooked.said.append((message, code))
        release.wait(5)

    monkeypatch.setattr(hooked, "abort", slow)
    threads = [threading.Thread(target=fails) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    said = len(hooked.said)
    release.set()
    for thread in threads:
        thread.join()
    assert said == 1


def test_a_thread_may_exit(hooked: Aborts) -> None:
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()
    assert hooked.said == []


def test_srun_gets_time_to_drain(
    hooked: Aborts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_all(monkeypatch, {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2})
    naps: list[float] = []
    monkeypatch.setattr(launch, "time", types.SimpleNamespace(sleep=naps.append))
    sys.excepthook(ValueError, ValueError("gone"), None)
    assert "[rank 5] ValueError: gone" in capsys.readouterr().err
    assert hooked.said == [("[rank 5] aborts", 1)] and naps == [1.0]


def test_an_mpi_that_was_not_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, 2)
    monkeypatch.setattr(sys.modules["mpi4py"].MPI, "Is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="mpi4py has not started MPI"):
        world(NumpyOps(), "mpi")
