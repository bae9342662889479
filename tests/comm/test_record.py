"""The record that a rank leaves for others."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from mpishard.comm.record import RankRecord, State, kernel_identity, process_start, read_record, record_path


@pytest.fixture
def record(tmp_path: Path) -> RankRecord:
    return RankRecord(tmp_path, 3, 7)


def test_a_new_record_says_who_and_where(record: RankRecord) -> None:
    found = read_record(record.path)
    assert found is not None
    assert (found.rank, found.size, found.pid, found.state) == (3, 7, os.getpid(), State.RUNNING)
    assert found.started == process_start(os.getpid())
    assert found.identity == kernel_identity()
    assert found.host == os.uname().nodename
    assert str(found) == "before the first step, no operation noted"


def test_what_happens_is_seen_at_once(record: RankRecord) -> None:
    record.at_step(12)
    record.note(b"Gather(h.3)")
    record.beat()
    record.beat(flush=True)
    found = read_record(record.path)
    assert found is not None
    assert (found.beats, found.step, found.operations) == (2, 12, ((1, "Gather(h.3)"),))
    assert str(found) == "in step 12, last operation Gather(h.3)"


def test_the_last_eight_operations_are_kept_in_order(record: RankRecord) -> None:
    for number in range(1, 20):
        record.note(b"x" * number * 2)
    found = read_record(record.path)
    assert found is not None
    assert found.operations == tuple((number, "x" * min(32, 2 * number)) for number in range(12, 20))


def test_a_closed_record_keeps_what_it_says(record: RankRecord) -> None:
    record.at_step(5)
    record.close(State.FAILED)
    record.close(State.ENDED)
    found = read_record(record.path)
    assert found is not None
    assert (found.state, found.step) == (State.FAILED, 5)


def test_a_new_record_takes_the_place_of_an_old_one(record: RankRecord, tmp_path: Path) -> None:
    record.at_step(5)
    record.note(b"Loss")
    record.close(State.ENDED)
    RankRecord(tmp_path, 3, 7)
    found = read_record(record.path)
    assert found is not None
    assert (found.state, found.step, found.operations) == (State.RUNNING, -1, ())


def test_what_is_no_whole_record_is_none(record: RankRecord, tmp_path: Path) -> None:
    whole = record.path.read_bytes()
    path = tmp_path / "other"
    assert read_record(path) is None
    changed = {8: b"\1", 128: b"\7"}  # version, state
    broken = [whole[:length] for length in (0, 7, 128, 511)] + [bytes(512)]
    broken += [whole[:place] + byte + whole[place + 1 :] for place, byte in changed.items()]
    for data in broken:
        path.write_bytes(data)
        assert read_record(path) is None
    path.write_bytes(whole)
    assert read_record(path) is not None


def test_a_record_that_cannot_be_made_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="rank-00001") as caught:
        RankRecord(tmp_path / "nowhere", 1, 2)
    assert caught.value.filename == str(record_path(tmp_path / "nowhere", 1))


def test_noting_keeps_no_memory(record: RankRecord) -> None:
    names = [b"Forward(h.%d)" % number for number in range(4)]

    def step(times: int) -> None:
        for number in range(times):
            record.note(names[number % 4])
            record.at_step(number)

    step(100)
    tracemalloc.start()
    try:
        step(1000)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 500
    assert peak < 1000


def test_a_killed_process_leaves_its_last_operation(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\nfrom mpishard.comm.record import RankRecord\n"
        "record = RankRecord(pathlib.Path(sys.argv[1]), 0, 1)\nrecord.at_step(3)\nrecord.note(b'Loss(head)')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert str(read_record(record_path(tmp_path, 0))) == "in step 3, last operation Loss(head)"


def test_a_zombie_has_ended_and_a_stopped_process_has_not() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        started = process_start(child.pid)
        assert started is not None
        child.send_signal(19)  # SIGSTOP
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert process_start(child.pid) == started
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # and it stays a zombie
        assert process_start(child.pid) is None
    assert process_start(child.pid) is None


def test_a_name_with_parentheses_does_not_hide_the_start_time(tmp_path: Path) -> None:
    program = tmp_path / "a) Z (b"
    program.symlink_to("/bin/cat")
    with subprocess.Popen([program], stdin=subprocess.PIPE) as child:
        assert process_start(child.pid) not in (None, 0)
        child.kill()


def test_processes_of_one_kernel_know_it() -> None:
    code = "from mpishard.comm.record import kernel_identity; print(kernel_identity().hex())"
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert told.strip() == kernel_identity().hex()
