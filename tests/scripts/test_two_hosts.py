"""scripts/two_hosts and what measures with it: on paper, and on hosts where the machine permits them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import fresh
from tests.cli.small_runs import training
from tests.scripts.measuring import LIBRARY, ROOT


def module(name: str) -> Any:
    """A module of scripts/lib/two_hosts."""
    sys.path.insert(0, str(LIBRARY))
    try:
        return importlib.import_module(f"two_hosts.{name}")
    finally:
        sys.path.remove(str(LIBRARY))


names = ("units", "launching", "outside", "inside", "paper", "wire", "overlap", "program")
units, launching, outside, inside, paper, wire, overlap, program = map(module, names)

SCRIPTS = ROOT / "scripts"


# --- on paper


@pytest.mark.parametrize(
    ("rate", "bits"), [("1gbit", 10**9), ("200mbit", 2 * 10**8), ("2.5Mbit", 2_500_000), ("8kbit", 8000)]
)
def test_a_rate_is_read(rate: str, bits: int) -> None:
    assert units.bits(rate) == bits


@pytest.mark.parametrize("rate", ["1gb", "fast", "0.5kbit", "-1gbit", "1 gbit", "1g"])
def test_a_wrong_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=f"the rate is '{rate}'; give bits a second such as 1gbit"):
        units.bits(rate)


def test_a_delay_is_read() -> None:
    assert [units.microseconds(text) for text in ("1ms", "250us", "0.1s")] == [1000, 250, 100_000]
    with pytest.raises(ValueError, match="the delay is '1'; give a time such as 1ms"):
        units.microseconds("1")


def test_a_link_takes_the_largest_packets_whole() -> None:
    """A token bucket cuts what is larger than itself into small packets, which costs many times the processor."""
    assert min(units.burst(rate) for rate in (1000, 10**9, 10**11)) > 1.5 * 2**16


def test_each_launcher_is_told_hosts_ranks_and_agent() -> None:
    mpich = launching.words(launching.Installed("mpich", "mpiexec"), ["n1", "n2"], 2, "/ssh")
    assert " ".join(mpich) == "mpiexec -launcher ssh -launcher-exec /ssh -hosts n1,n2 -ppn 2 -n 4"
    openmpi = " ".join(launching.words(launching.Installed("openmpi", "mpiexec"), ["n1", "n2"], 2, "/ssh"))
    assert "--host n1:2,n2:2 -n 4" in openmpi
    assert "--bind-to none" in openmpi
    assert "plm_ssh_agent /ssh" in openmpi


def test_an_mpi_is_known_by_what_its_launcher_says() -> None:
    said = {"mpiexec (Open MPI) 5.0.11": "openmpi", "HYDRA build details:": "mpich", "srun 22.05": ""}
    assert {text: launching.kind_of(text) for text in said} == said


def test_variables_that_are_set_stay() -> None:
    mpich = launching.Installed("mpich", "mpiexec", "/own/bin")
    found = launching.environment(mpich, {"PATH": "/a", "OMP_NUM_THREADS": "3"}, 2)
    assert (found["PATH"], found["OMP_NUM_THREADS"], found["OPENBLAS_NUM_THREADS"]) == ("/own/bin:/a", "3", "1")


def test_ranks_yield_where_they_outnumber_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = [launching.environment(launching.Installed("openmpi", "mpiexec"), {}, ranks) for ranks in (2, 3)]
    assert [one["OMPI_MCA_mpi_yield_when_idle"] for one in found] == ["0", "1"]


def test_the_agent_takes_the_place_of_ssh(tmp_path: Path) -> None:
    agent, nsenter = tmp_path / "ssh", tmp_path / "nsenter"
    agent.write_text(inside.agent_script({"n1": 11, "n2": 22}))
    nsenter.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    for path in (agent, nsenter):
        path.chmod(0o755)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [agent, *words], env={"PATH": path}, capture_output=True, text=True, check=False, timeout=30
        )

    words = run("-x", "-o", "BatchMode=yes", "root@n2", "A=1; exec", "prted").stdout.splitlines()
    assert words[0] == "--target=22"
    assert words[-3:] == ["sh", "-c", "A=1; exec prted"]
    wrong = run("n3", "true")
    assert (wrong.returncode, wrong.stderr) == (255, "two_hosts: there is no host n3; there are n1 n2\n")


def test_the_ceiling_is_what_the_first_gather_and_the_last_reduction_leave() -> None:
    """Ten transfers of 1 s each beside computations of 2 s: only the first and the last are waited for."""
    Event = paper.Event
    events = [Event("start", 1, "g0")]
    for i in range(10):
        events += [Event("wait", name=f"g{i}"), Event("start", 1, f"g{i + 1}"), Event("compute", 2)]
    events += [Event("wait", name="g10"), Event("start", 1, "r"), Event("wait", name="r")]
    found = paper.on_paper(events)
    assert found.seconds == 22
    assert list(found.waits.values()) == [1, 1]
    assert paper.ceiling(events) == pytest.approx(1 - 2 / 12)
    assert paper.ceiling([Event("compute", 1)]) == 1


def test_transfers_follow_one_another_on_paper() -> None:
    Event = paper.Event
    events = [Event("start", 3, "a"), Event("start", 1, "b"), Event("wait", name="b"), Event("wait", name="a")]
    assert paper.on_paper(events).seconds == 4
    assert paper.on_paper([Event("meet", 2, "c"), Event("meet", 2, "c")]).seconds == 4


@pytest.mark.parametrize(
    ("op", "transport", "least", "most"),
    [
        ("reduce_scatter", "mpi", 1000, 1000),
        ("all_gather", "mpi", 500, 1000),
        ("reduce_scatter", "hierarchical", 500, 500),
        ("all_gather", "hierarchical", 500, 500),
    ],
)
def test_what_is_due(op: str, transport: str, least: float, most: float) -> None:
    assert wire.due(op, transport, 1000, size=4, local=2) == (least, most)
    row = {"op": op, "transport": transport, "bytes": 1000, "ranks": 4, "ranks_per_host": 2, "correct": True}
    assert wire.verdict({**row, "sent": [least, most * 1.02]}) == "as due"
    assert wire.verdict({**row, "sent": [least - 1, most]}) == "LESS THAN DUE"
    assert wire.verdict({**row, "sent": [least, most * 1.04]}) == "MORE THAN DUE"
    assert wire.verdict({**row, "sent": [least, most], "correct": False}) == "WRONG RESULT"


def test_what_is_to_be_hidden() -> None:
    row = {"prefetch": 1, "root": 0.04, "ceiling": 0.8}
    assert overlap.bar(row, 8) == 0.85
    assert overlap.bar(row, 7) == overlap.bar({**row, "root": 0.06}, 8) == pytest.approx(0.76)
    assert overlap.bar({**row, "prefetch": 0}, 8) < -1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast", "--", "true"], "argument --rate: the rate is 'fast'; give bits a second such as 1gbit"),
        (["--hosts", "0", "--", "true"], "argument --hosts: 0 is not from 1 to 250"),
        (["--limit", "0", "--", "true"], "--limit is 0; give seconds above 0"),
        (["--hosts", "2"], "there is no command; give it after --"),
        (["--programs", "/none", "--", "true"], "there is no mpiexec of MPICH or Open MPI in /none; name the folder"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "problem", lambda rate, delay: "")
    with pytest.raises(SystemExit, match="2"):
        program.main(arguments)
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_machine_that_does_not_permit_it_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("unshare", "nsenter", "mount", "tc"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(outside, "_PATH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program.main(["--", "true"]) == 77
    assert capsys.readouterr().err == (
        "two_hosts: hosts cannot be made here: there is no program ip; install the package iproute2\n"
    )
    (tmp_path / "ip").write_text("")
    (tmp_path / "ip").chmod(0o755)
    assert program.main(["--", "true"]) == 77
    said = capsys.readouterr().err
    assert said.endswith(" make namespaces (unshare failed: Operation not permitted)\n")
    assert said.count("\n") == 1


# --- on hosts


@pytest.fixture(scope="module")
def hosts() -> Any:
    """The MPI to start ranks with."""
    if why := outside.problem(rate=10**9):
        pytest.skip(f"hosts cannot be made here: {why}")
    try:
        return launching.find()
    except ValueError as error:
        pytest.skip(str(error))


def script(name: str, *arguments: object, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPTS / name, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


WHERE = """
import socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
local = world.Split_type(MPI.COMM_TYPE_SHARED)
found = world.allgather((socket.gethostname(), local.rank, local.size))
world.Allreduce(bytearray(1 << 22), bytearray(1 << 22), MPI.BOR)
if world.rank == 0:
    print(found)
sys.exit(5)
"""

on_hosts = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.usefixtures("hosts")]


class TestOnHosts:
    pytestmark = on_hosts

    def test_ranks_run_on_both_hosts_and_bytes_and_exit_code_are_told(self, tmp_path: Path) -> None:
        result = tmp_path / "result"
        options = ["--ranks-per-host", 2, "--rate", "1gbit", "--limit", 120, "--json", result]
        ended = script("two_hosts", *options, "--", "{python}", "-c", WHERE)
        assert "[('n1', 0, 2), ('n1', 1, 2), ('n2', 0, 2), ('n2', 1, 2)]" in ended.stdout, ended.stderr
        told = json.loads(result.read_text())
        assert ended.returncode == told["exit_code"] == 5
        assert list(told["sent"]) == ["n1", "n2"]
        assert min(told["sent"].values()) > 1 << 21
        assert "two_hosts: bytes sent over the link, headers included: n1 " in ended.stderr

    def test_it_ends_with_its_limit(self) -> None:
        assert script("two_hosts", "--limit", 1, "--", "sleep", "1000").returncode == 124

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_nothing_remains_after_a_signal(self, number: signal.Signals) -> None:
        seconds = f"{1000 + os.getpid() / 1e7:.7f}"  # nobody else's
        command = [sys.executable, SCRIPTS / "two_hosts", "--limit", "100", "--", "sleep", seconds]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        assert until(lambda: len(running(seconds, "sleep")) == 2, 60)
        process.send_signal(number)
        assert process.wait(60) != 0
        assert until(lambda: not running(seconds), 10), running(seconds)

    @pytest.mark.parametrize("transport", ["mpi", "hierarchical"], ids=["flat", "by host"])
    def test_collectives_send_what_is_due(self, transport: str, tmp_path: Path) -> None:
        ended = script("check_link_bytes", "--transports", transport, "--json", tmp_path / "found")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = json.loads((tmp_path / "found").read_text())
        assert [(row["op"], row["transport"]) for row in found] == [
            ("reduce_scatter", transport),
            ("all_gather", transport),
        ]

    def test_overlap_is_measured(self, tmp_path: Path) -> None:
        """Tiny, so the figures mean nothing."""
        sizes = ["--layers", 2, "--width", 32, "--sequence", 16, "--micro-batch", 2, "--repetitions", 2]
        ended = script("measure_overlap", *sizes, "--prefetch", 0, 1, "--json", tmp_path / "found")
        assert ended.returncode in (0, 1), ended.stderr
        rows = json.loads((tmp_path / "found").read_text())["rows"]
        assert [row["prefetch"] for row in rows] == [0, 1]
        for row in rows:
            assert 0 <= row["ceiling"] < 1
            assert row["rate"] > 0
            assert row["bytes"] > 0
        assert rows[0]["ceiling"] <= rows[1]["ceiling"]

    def test_training_gives_the_numbers_of_one_host(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        ended = script("two_hosts", "--limit", 120, "--", "{python}", "-m", "mpishard", *training(tmp_path / "two"))
        assert ended.returncode == 0, ended.stderr
        alone = fresh("-m", "mpishard", *training(tmp_path / "one"))
        assert alone.returncode == 0, alone.stderr
        two, one = (json.loads((tmp_path / name / "run" / "report.json").read_text()) for name in ("two", "one"))
        assert two["checksum"] == one["checksum"]
        assert (len(two["bytes"]), len(one["bytes"])) == (2, 1)


def until(condition: Any, seconds: float) -> bool:
    """Return whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def running(word: str, name: str = "") -> list[int]:
    """The processes with a word in their command line, and of a name where one is given."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if any(word in one for one in map(os.fsdecode, words)) and os.fsdecode(words[0]).endswith(name):
            found.append(int(path.parent.name))
    return found
