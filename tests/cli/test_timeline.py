"""mpishard timeline: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json

import pytest

import mpishard.pictures
from mpishard.cli import main
from tests.timeline.made import write


@pytest.fixture
def call(capsys, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["timeline", *map(str, arguments)])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run")


def test_it_says_who_is_late(call, run):
    code, out, err = call(run)
    assert (code, err) == (0, "")
    assert out.startswith("steps 10 to 11 of 2 ranks over mpi, one clock\nrank 1 is late: it came last to ")
    assert "rank  computing    waiting   hidden     last  waited for it  most waited for (ms a step)\n" in out


def test_it_draws_and_writes(call, run, tmp_path):
    plot, trace = tmp_path / "x.svg", tmp_path / "x.json"
    code, out, err = call(run, "--plot", plot, "--step", 10, "--perfetto", trace)
    assert (code, err) == (0, "")
    assert out.endswith(f"written: {plot}\nwritten: {trace}\n")
    assert "step 10, 2 ranks" in plot.read_text(encoding="utf-8")
    assert {event["ph"] for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]} == {"M", "X"}
    call(run, "--plot", plot)
    assert "step 11, 2 ranks" in plot.read_text(encoding="utf-8")


def test_what_is_wrong_is_one_line(call, run, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    half = write(tmp_path / "half" / "run")
    (half / "trace" / "rank-00001.json").write_text('{"format": "mpish')
    cases = [
        ([tmp_path / "nowhere"], "there is no such run directory; give one that 'mpishard train --trace STEPS' wrote"),
        ([tmp_path / "empty"], "holds no times of steps; run the training again with --trace, as in --trace 10-12"),
        ([half], "is damaged or was not written to its end; run the training again with --trace"),
        ([run, "--plot", "x.gif"], "--plot is x.gif; its name must end in .png, .svg or .pdf"),
        ([run, "--plot", tmp_path / "no" / "x.png"], "there is no folder"),
        ([run, "--step", 10], "--step chooses what --plot draws, and --plot was not given"),
        ([run, "--step", 3, "--plot", tmp_path / "x.png"], "--step is 3; "),
        ([run, "--step", "x"], "'x' is not a valid integer"),
        ([run, "--perfetto", tmp_path / "no" / "x.json"], "choose another with --perfetto"),
        ([], "Missing argument 'RUN'"),
    ]
    for arguments, message in cases:
        code, _, err = call(*arguments)
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith("mpishard: ")
        assert message in err
    monkeypatch.setattr(mpishard.pictures, "find_spec", lambda name: None)
    code, _, err = call(run, "--plot", tmp_path / "x.png")
    assert (code, err) == (
        2, "mpishard: --plot needs matplotlib, which is not installed; pip install 'mpishard[plot]'\n",
    )  # fmt: skip


@pytest.mark.parametrize("steps", ["a", "3-2", "0-500"])
def test_steps_to_time_that_are_none_are_refused(steps, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "--preset", "tiny", "--trace", steps, "--print-config"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"mpishard: debug.trace is {steps!r}; it must be ")
    assert err.count("\n") == 1


def test_a_run_is_timed_and_shown(call, tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as caught:
        main(["train", "--preset", "tiny", "--set", "train.steps=3", "--run-dir", str(run), "--trace", "1-2"])
    assert caught.value.code == 0
    capsys.readouterr()
    code, out, _ = call(run)
    assert code == 0
    assert out.startswith("steps 1 to 2 of 1 rank over local, one clock\n")
