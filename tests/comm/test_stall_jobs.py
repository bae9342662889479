"""Real jobs that train, and a rank of which stops, hangs or raises: the others end and say which, where and when."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpishard.comm.watch import EXIT_STALLED
from tests.comm.test_watch_jobs import end_of, job, lives, pytestmark, wait_for_step

__all__ = ["pytestmark"]

#: Rank 1 comes to a misfortune in step 3, while it computes its micro-batch.
PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm import world
from mpishard.comm.launch import install_abort_hook
from mpishard.comm.watch import Watch
from mpishard.shard.entry import WAITS
from tests.shard.training import Job

folder, what = Path(sys.argv[1]), sys.argv[2]
comm = world(NumpyOps(), "mpi")
install_abort_hook(comm)
job = Job(micros=6)
engine = job.engine(comm)

def feed(step):
    def fill(micro, inputs, targets):
        job.feed(step)(micro, inputs, targets)
        if (comm.rank, step) == (1, 3):
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif what == "hang":
                threading.Event().wait()
            elif what == "long":
                until = time.monotonic() + 7
                while time.monotonic() < until:
                    sum(range(10000))
            elif what == "raise":
                raise ValueError("broken")
    return fill

with Watch(comm, folder, silence=0, stall=4 if what == "long" else 2, waits=WAITS) as watch:
    engine.note = engine.entry.note = watch.note
    for step in range(5):
        watch.at_step(step)
        engine.step(feed(step), lr=job.lr)
comm.close()
"""


@pytest.mark.parametrize("what", ["stop", "hang"])
def test_a_rank_that_moves_no_more_is_named_and_ends_the_job(what: str, tmp_path: Path) -> None:
    with job(tmp_path, what, program=PROGRAM) as started:
        pids = [wait_for_step(tmp_path, rank, 0).pid for rank in range(3)]
        printed, _ = end_of(started, 40)
    # MPICH's launcher may report the SIGKILL by which it ends the other ranks instead.
    assert started.returncode in (EXIT_STALLED, 9), printed
    how = "its process is stopped" if what == "stop" else r"it is \d+ operations? behind the furthest"
    first = r"mpishard: no rank has made progress for 2 s; rank 1 is late: in step 3, in Forward\(embed\), "
    first += r"for (at least )?\d+ s; "
    assert len(re.findall(first + how, printed)) == 1, printed
    for rank, pid in enumerate(pids):
        assert re.search(rf"rank {rank} \(host \S+, pid {pid}\): (stopped )?in step 3, in \w+\(", printed), printed
    told = printed[printed.index("  rank 1 (host") :].splitlines()
    assert told[1].startswith("    before it: ")
    assert ("does not answer" in told[2]) == (what == "stop")
    if what == "hang":
        assert "fill (" in told[2]
    assert printed.count("stack: ") == 3
    assert "exit code 4; look at rank 1 first" in printed
    why = (tmp_path / "why").read_text(encoding="utf-8")
    assert why in printed
    until = time.monotonic() + 10  # a launcher that was asked to end them does not wait
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_long_computation_is_no_standstill(tmp_path: Path) -> None:
    with job(tmp_path, "long", program=PROGRAM) as started:
        printed, _ = end_of(started, 40)
    assert (started.returncode, printed) == (0, "")


def test_a_rank_that_raises_says_where_it_was(tmp_path: Path) -> None:
    with job(tmp_path, "raise", program=PROGRAM) as started:
        printed, _ = end_of(started, 40)
    assert started.returncode != 0
    where = r"rank 1 \(host \S+, pid \d+, in step 3, last operation Forward\(embed\)\) has failed: ValueError: "
    assert len(re.findall(where + "broken", printed)) == 1, printed
    assert "[rank 1] ValueError: broken" in printed


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_a_run_of_the_program_whose_rank_is_stopped_or_killed_ends(fate: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["comm.stall=2", "train.steps=1000000", "train.global_batch=6", "train.micro_batch=1"]
    command = ["train", "--preset", "tiny", "--run-dir", str(run)]
    command += [word for setting in settings for word in ("--set", setting)]
    with job(run / "ranks", *command, program=None) as started:
        victim = wait_for_step(run / "ranks", 2, 3)
        subprocess.run(["kill", f"-{fate.name.removeprefix('SIG')}", str(victim.pid)], check=True)
        printed, _ = end_of(started, 40)
    assert started.returncode != 0
    if fate == signal.SIGSTOP:
        place = r"rank 2 is late: in step \d+, in \w+(\([\w., ]+\))?, for at least \d+ s; its process is stopped"
        assert re.search(place, printed), printed
    else:
        place = rf"rank 2 \(host \S+, pid {victim.pid}, in step \d+, last operation \w+(\([\w., ]+\))?\) is gone; "
        assert re.search(place, printed), printed
