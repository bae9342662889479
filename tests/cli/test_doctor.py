"""The program examines the machine it runs on, on one rank and on two, and comes back from what crashes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, fresh, launcher, mpiexec

pytestmark = pytest.mark.jobs

FINE = ("ok", "impossible")
#: what a machine of any size has no problem with
CALM = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

#: The child job, in which rank 1 does something of its own in the place of a call.
SPOILED = """
import os, signal, sys, time
from mpishard.comm import attempts
real = attempts.attempts
def spoiled(world, device, local_rank):
    found = real(world, device, local_rank)
    one = found[3]
    def run():
        if world.Get_rank() == 1:
            {action}
        return one.run()
    found[3] = one._replace(run=run)
    return found
attempts.attempts = spoiled
from mpishard.doctor.child import main
sys.exit(main(sys.argv[1:]))
"""


def through(folder: Path, text: str, ranks: int = 2) -> str:
    """The words that start a child job in which ``text`` runs in the place of the doctor's child."""
    (folder / "child.py").write_text(text)
    script = folder / "child"
    script.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {folder / "child.py"} "$@"\n')
    script.chmod(0o755)
    return " ".join([*launcher(ranks), str(script)])


def doctor(*arguments: str, ranks: int = 2, **variables: str):
    environment = dict(os.environ) | CALM | variables
    if ranks == 1:
        return fresh("-m", "mpishard", "doctor", *arguments, env=environment)
    return mpiexec("-m", "mpishard", "doctor", *arguments, ranks=ranks, env=environment, seconds=120)


def report(*arguments: str, ranks: int = 2, **variables: str) -> tuple[int, dict]:
    done = doctor(*arguments, "--json", ranks=ranks, **variables)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def named(found: dict) -> set[str]:
    return {one["name"] for one in found["problems"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_machine_is_examined(ranks: int, tmp_path: Path) -> None:
    code, found = report("--device", "cpu", "--run-dir", str(tmp_path / "run"), ranks=ranks)
    allowed = {"oversubscribed"} if ranks > (os.cpu_count() or 1) else set()
    assert named(found) - allowed == set(), found["problems"]
    assert code == (1 if found["problems"] else 0)
    assert [one["rank"] for one in found["ranks"]] == list(range(ranks))
    assert {one["mpi"]["thread_provided"] for one in found["ranks"]} == {"multiple"}
    assert found["tried"]["ranks"] == 2
    assert {one["outcome"] for one in found["tried"]["tries"]} == {"ok"}
    assert found["run_directory"] == {
        "path": str(tmp_path),
        "problem": "",
        "unseen": [],
        "free": found["run_directory"]["free"],
    }
    assert list(tmp_path.iterdir()) == []
    if ranks == 1:
        assert found["chosen"]["transport"] == "local"
        assert (found["peers"], found["progress"]) == ([], None)
        return
    assert found["chosen"]["describe"].startswith(found["chosen"]["transport"])
    (pair,) = found["peers"]
    assert (pair["ranks"], pair["same_node"]) == ([0, 1], True)
    assert pair["latency"] > 0
    assert list(pair["mpi"]) == ["65536", "1048576", "16777216"]
    assert found["progress"]["communication"] > 0


def test_people_are_told(tmp_path: Path) -> None:
    done = doctor("--device", "cpu", "--transport", "mpi", "--run-dir", str(tmp_path))
    told = ("MPI: ", "MPI_THREAD_MULTIPLE given", "launcher: mpiexec of ", "all-gather in place", "0 - 1")
    told += ("no GPU here: nothing to try on one", "a training would use: mpi, ", "progress: an all-gather")
    for words in told:
        assert done.stdout.count(words) == 1, done.stdout
    assert "found" in done.stdout.splitlines()[-1] or done.stdout.splitlines()[-1].startswith("problem: ")


def test_a_call_that_crashes_is_a_finding_and_not_the_end(tmp_path: Path) -> None:
    words = through(tmp_path, SPOILED.format(action="os.kill(os.getpid(), signal.SIGSEGV)"))
    code, found = report("--device", "cpu", "--launcher", words)
    assert code == 1
    tries = found["tried"]["tries"]
    assert [number for number, one in enumerate(tries) if one["outcome"] not in FINE] == [3]
    assert tries[3]["outcome"] == "crash"
    assert "Segmentation fault" in tries[3]["text"]
    assert "host-crash" in named(found)
    assert found["peers"] == []
    assert "not-measured" in {one["name"] for one in found["notes"]}


def test_a_call_that_hangs_is_a_finding(tmp_path: Path) -> None:
    words = through(tmp_path, SPOILED.format(action="time.sleep(100)"))
    code, found = report("--device", "cpu", "--launcher", words, "--limit", "3", ranks=1)
    assert code == 1
    assert [one["outcome"] for one in found["tried"]["tries"] if one["outcome"] not in FINE] == ["hang"]
    assert "host-hang" in named(found)


@pytest.mark.parametrize(("action", "outcome"), [("return 'bytes are wrong'", "wrong"), ("raise OSError(5)", "failed")])
def test_a_call_with_wrong_data_or_an_error_is_a_finding(action: str, outcome: str, tmp_path: Path) -> None:
    words = through(tmp_path, SPOILED.format(action=f"one.run(); {action}"))
    code, found = report("--device", "cpu", "--launcher", words, ranks=1)
    assert code == 1
    bad = [one for one in found["tried"]["tries"] if one["outcome"] not in FINE]
    assert [one["outcome"] for one in bad] == [outcome]
    assert bad[0]["text"].startswith("on rank 1, ")
    assert f"host-{outcome}" in named(found)


def test_a_launcher_of_another_mpi(tmp_path: Path) -> None:
    done = fresh(
        "-m", "mpishard", "doctor", "--json", "--run-dir", str(tmp_path), env=dict(os.environ) | CALM, PMI_SIZE="2",
        MPI4PY_RC_INITIALIZE="1", **({} if _is_open_mpi() else {"OMPI_COMM_WORLD_SIZE": "2"}),
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert named(found) == {"launch"}
    assert "is a world of 1 for" in found["problems"][0]["text"]
    assert found["problems"][0]["remedy"].startswith("use the mpiexec of ")


def _is_open_mpi() -> bool:
    return fresh("-c", "from mpi4py import MPI; print(MPI.get_vendor()[0])").stdout.strip() == "Open MPI"


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_mpi(ranks: int, tmp_path: Path) -> None:
    done = doctor("--json", "--run-dir", str(tmp_path), ranks=ranks, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    found = json.loads(done.stdout)
    assert done.returncode != 0
    assert [one["name"] for one in found["problems"]] == ["no-mpi"]
    assert "install one with: pip install mpich" in found["problems"][0]["remedy"]
    assert (found["tried"], found["chosen"]) == (None, None)


def test_what_ranks_are_told_must_be_the_same(tmp_path: Path) -> None:
    script = tmp_path / "by_rank.py"
    script.write_text(
        "from mpishard.cli import main\nfrom mpishard.launched import environment_rank\n"
        "main(['doctor', '--no-try', '--limit', str(10 + environment_rank())])\n"
    )
    done = mpiexec(str(script))
    assert done.returncode == 2
    assert done.stderr.count("mpishard: rank 1 has --limit 11.0, rank 0 has --limit 10.0; start all ranks") == 1


def test_too_little_of_a_thread_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    code, found = report(
        "--device", "cpu", "--no-try", "--no-measure", "--run-dir", "/proc/nowhere", MPI4PY_RC_THREAD_LEVEL="single",
        OPENBLAS_NUM_THREADS="64",
    )  # fmt: skip
    assert code == 1
    assert {"thread-level", "threads", "run-directory"} <= named(found)
    assert found["tried"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--transport", "carrier"], "transport 'carrier' is not known; choose one of "),
        (["--launcher", "no-such-mpiexec -n 2"], "--launcher begins with 'no-such-mpiexec', which is no program here"),
        (["--launcher", "mpiexec '"], '--launcher is "mpiexec \'" (No closing quotation); write it as in a shell'),
        (["--limit", "0"], "Invalid value for '--limit'"),
        (["--device", "tpu"], "Invalid value for '--device'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], told: str) -> None:
    done = doctor(*arguments, ranks=1)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"mpishard: {told}")
    assert done.stderr.count("\n") == 1


def test_a_mistake_under_mpiexec_is_told_once() -> None:
    done = doctor("--transport", "carrier")
    assert done.returncode == 2
    assert done.stderr.count("mpishard: transport 'carrier' is not known") == 1


def test_gpus_on_the_stand_in(tmp_path: Path) -> None:
    text = "import sys\nsys.argv = ['run', '-m', 'mpishard.doctor.child', *sys.argv[1:]]\nfrom tests.standin.run import main\nmain()\n"  # noqa: E501
    (tmp_path / "child.py").write_text(text)
    words = through(tmp_path, text)
    arguments = ["-m", "mpishard", "doctor", "--json", "--device", "cuda", "--launcher", words]
    for devices, problems in (("2", set()), ("1", {"gpu-shared"})):
        environment = dict(os.environ) | CALM | {"STANDIN_DEVICES": devices, "PYTHONPATH": str(ROOT)}
        done = mpiexec("-m", "tests.standin.run", *arguments, env=environment, seconds=120)
        found = json.loads(done.stdout)
        assert named(found) - {"oversubscribed"} == problems, done.stderr
        outcomes = {(one["what"], one["memory"]): one["outcome"] for one in found["tried"]["tries"]}
        assert outcomes["all-gather in place", "GPU"] == "ok"
        assert outcomes["transport staged", "GPU"] == "ok"
        assert outcomes["transport nccl", "GPU"] == ("ok" if devices == "2" else "impossible")
        if devices == "2":
            assert found["chosen"]["transport"] == "staged"
            assert list(found["peers"][0]["transport"]) == ["65536", "1048576", "16777216"]
