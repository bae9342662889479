"""A child job that crashes, hangs or is wrong is told, and what is left is tried by another one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mpishard.doctor import trial
from mpishard.doctor.trial import Launch, Try, find_launcher, free_environment, judge_end, start_problem, try_all

#: A child that comes to an end of its own kind at thing 1 of 4, and at those after it that are named.
CHILD = """
import faulthandler, os, signal, sys, time
from mpishard.doctor.child import say
memory, first, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ends = {ends!r}
faulthandler.enable()
print("noise that a library makes", flush=True)
say(ranks=2, library="Some MPI 1.0", things=[["thing", memory, 4 << number] for number in range(4)])
for number in range(first, 4):
    faulthandler.dump_traceback_later(limit, exit=True)
    say(begin=number)
    end = ends.get(number, "ok")
    if end == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if end == "exit":
        print("Abort(15): fatal error in PMPI_Alltoall", file=sys.stderr)
        os._exit(15)
    if end == "hang":
        time.sleep(60)
    if end == "silent":
        faulthandler.cancel_dump_traceback_later()
        time.sleep(60)
    say(end=number, outcome=end, text="" if end == "ok" else "on rank 1, 3 of 4 bytes are wrong, from byte 1 on")
say(over=True)
"""


def run(folder: Path, limit: float = 30.0, **ends: str) -> trial.Trial:
    script = folder / "child.py"
    script.write_text(CHILD.format(ends={int(number.removeprefix("at")): end for number, end in ends.items()}))
    return try_all([], "host", limit, (sys.executable, str(script)))


def outcomes(found: trial.Trial) -> list[str]:
    assert found.problem == ""
    assert [one.nbytes for one in found.tries] == [4, 8, 16, 32]
    return [one.outcome for one in found.tries]


def test_all_is_well(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert outcomes(found) == ["ok"] * 4
    assert (found.ranks, found.problem, found.bad("host")) == (2, "", [])


def test_a_crash_is_told_and_the_rest_is_tried(tmp_path: Path) -> None:
    found = run(tmp_path, at1="crash")
    assert outcomes(found) == ["ok", "crash", "ok", "ok"]
    assert found.bad("host") == [Try("thing", "host", 8, "crash", found.tries[1].text)]
    assert found.bad("GPU") == []
    assert found.tries[1].text.startswith("Segmentation fault (exit code -11")


def test_what_a_library_said_before_it_ended_is_told(tmp_path: Path) -> None:
    found = run(tmp_path, at3="exit")
    assert outcomes(found) == ["ok", "ok", "ok", "crash"]
    assert found.tries[3].text == "Abort(15): fatal error in PMPI_Alltoall (exit code 15)"


def test_several_crashes_end_the_trial_in_the_end(tmp_path: Path) -> None:
    assert outcomes(run(tmp_path, at0="crash", at2="crash")) == ["crash", "ok", "crash", "ok"]
    assert outcomes(run(tmp_path, at0="crash", at1="crash", at2="crash")) == ["crash", "crash", "crash", "untried"]


def test_a_hang_ends_at_the_limit(tmp_path: Path) -> None:
    found = run(tmp_path, 2.0, at1="hang")
    assert outcomes(found) == ["ok", "hang", "ok", "ok"]
    assert found.tries[1].text == "it did not end within 2 s"


def test_a_child_that_does_not_end_itself_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_GRACE", 0.0)
    assert outcomes(run(tmp_path, 2.0, at2="silent")) == ["ok", "ok", "hang", "ok"]


def test_wrong_data_is_told(tmp_path: Path) -> None:
    found = run(tmp_path, at1="wrong", at2="impossible", at3="failed")
    assert outcomes(found) == ["ok", "wrong", "impossible", "failed"]
    assert [one.nbytes for one in found.bad("host")] == [8, 32]
    assert "3 of 4 bytes are wrong" in found.tries[1].text


def test_a_job_that_does_not_start(tmp_path: Path) -> None:
    code = "import sys; sys.exit('There are not enough slots available in the system')"
    found = try_all([], "host", 5.0, (sys.executable, "-c", code))
    assert found.problem == "There are not enough slots available in the system (exit code 1)"
    assert try_all([], "host", 5.0, (sys.executable, "-c", "")).problem == "it said nothing"
    assert try_all([str(tmp_path / "mpiexec")], "host", 5.0).problem == f"{tmp_path}/mpiexec: No such file or directory"


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        ("--> Returned -12\n[n1:7] *** An error occurred in MPI_Init\nended by a signal\n", "--> Returned"),
        ("Sorry!  You were\n    find-available:none found\nfrom the file:\n/a/b.txt: No such file\n", "find-available"),
        ("Abort(1): Fatal error\ninit_local(240): it failed: No such device\n", "init_local(240)"),
        ("----\n", "exit code 14"),
    ],
)
def test_what_a_library_said_is_picked_from_what_it_printed(errors: str, words: str) -> None:
    outcome, told = judge_end(Launch(code=14, errors=errors), 5.0)
    assert outcome == "crash"
    assert told.startswith(words)
    assert told.count("exit code 14") == 1


def test_an_mpi_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(code: str) -> str:
        monkeypatch.setattr(sys, "executable", "/bin/sh")
        monkeypatch.setattr(trial, "_START", code)
        return start_problem(5.0)

    assert ends("exit 0") == ""
    assert ends("echo Traceback >&2; exit 1") == ""  # no MPI to start, which the import tells
    assert ends("echo no transports, it failed >&2; exit 143") == "no transports, it failed (exit code 143)"
    assert ends("kill -SEGV $$") == "exit code -11"


def test_what_ties_a_process_to_its_launcher_is_left_out() -> None:
    kept = {"PATH": "/bin", "OMPI_MCA_osc": "^ucx", "PRTE_MCA_plm": "ssh", "UCX_TLS": "tcp", "PMIX_MCA_gds": "hash"}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "MPIR_CVAR_NOLOCAL": "1"}
    tied = ["PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "HYDI_CONTROL_FD", "MPI_LOCALRANKID"]
    tied += ["MPI_LOCALNRANKS", "PRTE_LAUNCHED", "OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir", "PMIX_SERVER_URI41"]
    assert free_environment(kept | dict.fromkeys(tied, "1")) == kept


def test_the_launcher_beside_the_library_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bin/mpiexec", "path/mpiexec", "path/srun", "venv/python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    beside = str(tmp_path / "bin" / "mpiexec")
    assert find_launcher(f"{tmp_path}/lib/libmpi.so.12", "MPICH 5.0.2", 3) == (beside, "-n", "3")
    assert find_launcher(f"{tmp_path}/lib/x86_64/libmpi.so.40", "Open MPI 5.0.11", 2)[0] == beside
    assert "--bind-to" in find_launcher(f"{tmp_path}/lib/libmpi.so.40", "Open MPI 5.0.11", 2)
    assert find_launcher("/nowhere/at/all/libmpi.so", "MPICH 5.0.2", 2)[0] == str(tmp_path / "path" / "mpiexec")
    srun = str(tmp_path / "path" / "srun")
    assert find_launcher("", "MPICH 5.0.2", 2, "pmi2") == (srun, "--overlap", "--mpi=pmi2", "-n", "2")
    os.remove(tmp_path / "path" / "mpiexec")
    assert find_launcher("", "MPICH 5.0.2", 2) == ()
