"""The batch scripts for SLURM, read without SLURM: their options, their shape, and what they do around a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TRAIN = ("train_one_node", "train_multi_node")
NAMES = (*TRAIN, "compare_mpi_nccl")
BEGIN, END = re.compile(r"# -+ edit from here \.\.\."), re.compile(r"# -+ \.\.\. to here")

#: The long options of sbatch that may be used, and what their values look like; None for options without one.
COUNT = r"[1-9]\d*"
OPTIONS: dict[str, str | None] = {
    "account": r"\w+",
    "cpus-per-task": COUNT,
    "gpu-bind": r"none",  # anything else hides the GPUs of a node from its other ranks
    "gpus-per-node": COUNT,
    "job-name": r"[\w-]+",
    "nodes": COUNT,
    "ntasks-per-node": COUNT,
    "open-mode": r"append|truncate",
    "output": r"[\w%/.-]+",
    "partition": r"\w+",
    "requeue": None,
    "signal": r"(R|B|RB):?(USR1|USR2|TERM|INT)(@\d+)?",
    "time": r"(\d+-)?\d{1,2}:[0-5]\d:[0-5]\d",
}


def wrong_directives(text: str) -> list[str]:
    """Say which #SBATCH lines, also those that are switched off, sbatch would refuse or not see."""
    problems, seen = [], []
    commands = False
    for line in text.splitlines():
        found = re.fullmatch(r"(#{1,2})SBATCH\s+--([a-z-]+)(?:=(\S+))?", line)
        if "SBATCH" in line and line.startswith("#") and not found:
            if re.match(r"#+\s*SBATCH", line):
                problems.append(f"{line!r} is not of the form #SBATCH --option=value")
        elif found:
            off, option, value = found.groups()
            pattern = OPTIONS.get(option, "unknown")
            if option not in OPTIONS:
                problems.append(f"--{option} is not known")
            elif (pattern is None) != (value is None) or (pattern and not re.fullmatch(pattern, value)):
                problems.append(f"--{option} has the value {value}")
            if commands:
                problems.append(f"--{option} stands after the first command, where sbatch does not read it")
            if off == "#":
                seen.append(option)
        elif line.strip() and not line.startswith("#"):
            commands = True
    problems += [f"--{option} is given twice" for option in sorted(set(seen)) if seen.count(option) > 1]
    return problems


def body(name: str) -> str:
    """What follows the lines that a user edits."""
    lines = (SCRIPTS / f"{name}.sbatch").read_text().splitlines()
    return "\n".join(lines[next(i for i, line in enumerate(lines) if END.fullmatch(line)) + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_bash_can_read_it(name: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / f"{name}.sbatch")], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_directives_are_known_and_stand_before_commands(name: str) -> None:
    assert wrong_directives((SCRIPTS / f"{name}.sbatch").read_text()) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_a_user_edits_stands_on_top(name: str) -> None:
    lines = (SCRIPTS / f"{name}.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    marks = [i for i, line in enumerate(lines) if BEGIN.fullmatch(line) or END.fullmatch(line)]
    assert len(marks) == 2
    begin, end = marks
    assert all(line.startswith("#") or not line for line in lines[:begin])
    assert not [line for line in lines[end:] if "SBATCH" in line]
    assert next(line for line in lines[end + 1 :] if line) == "set -euo pipefail"
    commands = "\n".join(line for line in lines[end:] if not line.startswith("#"))
    for word in ("srun", "--mpi=", "module load", "activate"):
        assert word not in commands
        assert word in "\n".join(lines[begin:end])


@pytest.mark.parametrize("name", NAMES)
def test_what_a_cluster_needs_is_said(name: str) -> None:
    text = (SCRIPTS / f"{name}.sbatch").read_text()
    assert "--kill-on-bad-exit=1" in text
    # srun does not take it from sbatch since SLURM 22.05
    assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in text
    assert 'export "${library}_NUM_THREADS=$SLURM_CPUS_PER_TASK"' in text
    assert "--gpu-bind=none" in text
    assert not re.search(r"SBATCH.*(gpus-per-task|ntasks-per-gpu)", text)


def test_both_training_scripts_do_the_same() -> None:
    assert body(TRAIN[0]) == body(TRAIN[1])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("#SBATCH --cpu-per-task=8", "--cpu-per-task is not known"),
        ("#SBATCH --nodes=0", "--nodes has the value 0"),
        ("#SBATCH --time=4 hours", "'#SBATCH --time=4 hours' is not of the form #SBATCH --option=value"),
        ("#SBATCH --signal=B:USR1@5min", "--signal has the value B:USR1@5min"),
        ("#SBATCH --requeue=yes", "--requeue has the value yes"),
        ("##SBATCH --gpu-bind=closest", "--gpu-bind has the value closest"),
        ("# SBATCH --nodes=2", "'# SBATCH --nodes=2' is not of the form #SBATCH --option=value"),
        ("#SBATCH --nodes=2\n#SBATCH --nodes=3", "--nodes is given twice"),
        ("x=1\n#SBATCH --nodes=2", "--nodes stands after the first command, where sbatch does not read it"),
    ],
)
def test_a_wrong_directive_is_found(line: str, problem: str) -> None:
    assert wrong_directives(f"#!/bin/bash\n{line}\n") == [problem]


# --- what the scripts do, with a program, an srun and a scontrol that are played

#: Plays ``mpishard train``: it lists its arguments and leaves what the test asks for.
TRAINED = r"""#!/bin/bash
printf '%s\n' "$*" >>calls
for name in USR1 TERM; do trap "echo $name >>calls"'; touch "$run/stopped"; exit 0' $name; done
run=${*: -1}
mkdir -p "$run"
case $PLAY in
    finish) touch "$run/report.json" ;;
    fail) exit 7 ;;
    stop) touch "$run/stopped" ;;
    wait) echo $$ >ready; for _ in {1..100}; do sleep 0.1; done ;;
esac
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder in which a script runs as in a job."""
    programs = {"mpishard": TRAINED, "srun": SRUN, "scontrol": '#!/bin/bash\necho "scontrol $*" >>calls\n'}
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    os.mkfifo(tmp_path / "ready")
    return tmp_path


def start(folder: Path, play: str, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment = kept | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURM_CPUS_PER_TASK": "2",
        "PLAY": play,
        **variables,
    }
    command = ["bash", str(SCRIPTS / f"{TRAIN[0]}.sbatch")]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder: Path, play: str, **variables: str) -> tuple[int, list[str], str]:
    """Return the exit code, what was called, and what was printed."""
    with start(folder, play, **variables) as job:
        printed, _ = job.communicate(timeout=30)
    calls = folder / "calls"
    return job.returncode, calls.read_text().splitlines() if calls.exists() else [], printed


def test_a_run_begins_and_finishes(cluster: Path) -> None:
    code, calls, printed = run(cluster, "finish")
    assert (code, calls) == (0, ["train --config my.toml --run-dir runs/42"])
    assert "runs/42 is finished" in printed


def test_a_finished_run_is_left_alone(cluster: Path) -> None:
    run(cluster, "finish")
    code, calls, _ = run(cluster, "finish", SLURM_RESTART_COUNT="1")
    assert (code, len(calls)) == (0, 1)


def test_a_failed_run_keeps_its_exit_code(cluster: Path) -> None:
    code, calls, printed = run(cluster, "fail")
    assert (code, len(calls)) == (7, 1)
    assert "failed with exit code 7" in printed


def test_a_run_that_leaves_nothing_is_a_failure_whatever_its_exit_code(cluster: Path) -> None:
    assert run(cluster, "nothing")[0] == 1


def test_a_stopped_run_goes_back_into_the_queue_and_on_from_there(cluster: Path) -> None:
    code, calls, _ = run(cluster, "stop")
    assert (code, calls[1:]) == (0, ["scontrol requeue 42"])
    (cluster / "runs/42/checkpoints/step-00000003").mkdir(parents=True)
    code, calls, _ = run(cluster, "finish", SLURM_RESTART_COUNT="1")
    assert (code, calls[2:]) == (0, ["train --resume runs/42"])


def test_a_restart_that_fails_does_not_go_back_into_the_queue(cluster: Path) -> None:
    (cluster / "runs/42/checkpoints/step-00000003").mkdir(parents=True)
    (cluster / "runs/42/stopped").touch()
    assert run(cluster, "fail", SLURM_RESTART_COUNT="1")[:2] == (7, ["train --resume runs/42"])


def test_restarts_are_bounded(cluster: Path) -> None:
    code, calls, printed = run(cluster, "stop", SLURM_RESTART_COUNT="50")
    assert (code, len(calls)) == (1, 1)
    assert "no more than 50 restarts" in printed


def test_what_was_never_saved_is_kept_beside_the_new_run(cluster: Path) -> None:
    run(cluster, "fail")
    (cluster / "runs/42/metrics.jsonl").touch()
    run(cluster, "finish")
    kept = [path for path in (cluster / "runs").iterdir() if "unsaved" in path.name]
    assert [path.name for folder in kept for path in folder.iterdir()] == ["metrics.jsonl"]


def test_another_jobs_run_can_be_named(cluster: Path) -> None:
    (cluster / "runs/7/checkpoints/step-00000003").mkdir(parents=True)
    assert run(cluster, "finish", RUN="runs/7")[1] == ["train --resume runs/7"]


def test_the_signal_reaches_the_ranks(cluster: Path) -> None:
    with start(cluster, "wait") as job:
        (cluster / "ready").read_text()
        job.send_signal(signal.SIGUSR1)
        printed, _ = job.communicate(timeout=30)
    assert job.returncode == 0, printed
    assert (cluster / "calls").read_text().splitlines()[1:] == ["USR1", "scontrol requeue 42"], printed


def test_a_cancelled_job_waits_for_its_ranks_and_stays_away(cluster: Path) -> None:
    with start(cluster, "wait") as job:
        ranks = int((cluster / "ready").read_text())
        job.send_signal(signal.SIGTERM)  # SLURM sends it to all
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(0.5)
        os.kill(ranks, signal.SIGTERM)
        printed, _ = job.communicate(timeout=30)
    assert job.returncode == 0, printed
    assert (cluster / "calls").read_text().splitlines()[1:] == ["TERM"], printed
    assert "cancelled; runs/42 is saved" in printed


def test_a_program_that_is_not_there_is_one_line(cluster: Path) -> None:
    (cluster / "mpishard").unlink()
    bash, date = shutil.which("bash"), shutil.which("date")
    assert bash and date
    (cluster / "bash").symlink_to(bash)
    (cluster / "date").symlink_to(date)
    code, _, printed = run(cluster, "finish", PATH=str(cluster))
    assert code == 2
    assert "mpishard is not on PATH; edit the lines that load it" in printed


def compared(folder: Path, checksums: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the comparison of the third script on runs that are played."""
    program = body("compare_mpi_nccl").partition("<<'PYTHON'\n")[2].rpartition("PYTHON")[0]
    for number, (transport, checksum) in enumerate(checksums.items(), 1):
        place = folder / transport
        place.mkdir()
        (place / "report.json").write_text(json.dumps({"checksum": checksum}))
        speeds = [1.0, 1.0, 1.0, *[1000.0 * number] * 5]
        steps = [{"tokens_per_s": speed, "seconds": {"waiting": 0.25}} for speed in speeds]
        lines = [json.dumps(step) for step in [*steps, {"other": 1}]]
        (place / "metrics.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-c", program, str(folder), *checksums]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_transports_stand_side_by_side(tmp_path: Path) -> None:
    ended = compared(tmp_path, {"mpi": "abc", "nccl": "abc"})
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert rows[1:] == [["mpi", "1000", "1.00", "0.2500", "abc"], ["nccl", "2000", "2.00", "0.2500", "abc"]]


def test_other_bits_are_an_error(tmp_path: Path) -> None:
    ended = compared(tmp_path, {"mpi": "abc", "nccl": "abd"})
    assert ended.returncode == 1
    assert "the checksums differ" in ended.stderr
