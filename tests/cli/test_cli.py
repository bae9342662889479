import os
import re
import sys
import types
from pathlib import Path

import pytest

import mpishard.cli
import mpishard.launched
import mpishard.plan.memory_report
from mpishard.cli import main, program
from mpishard.cli.options import setting_rows
from mpishard.cli.train import agree_run_dir
from mpishard.comm.local import LocalCommunicator
from mpishard.errors import ConfigError, DataError, EngineError
from mpishard.plan.memory_report import write_report
from mpishard.train.config import dump_toml, load, presets, sections
from tests.cli.processes import fresh


class Job:
    """What stands in for the launch and the loop: one rank, which notes what it was given."""

    def __init__(self):
        self.rank = None
        self.transport = None
        self.comm = None
        self.config = None
        self.run_dir = None
        self.outcome = 0

    def world(self, make_ops, transport="auto", *, share_device=False, algorithm="auto"):
        self.transport = transport
        self.comm = LocalCommunicator(make_ops(None))
        return self.comm

    def run(self, config, run_dir, comm, *, resumed, stopper, reporter):
        self.config, self.run_dir, self.reporter = config, run_dir, reporter
        assert (resumed, stopper()) == (None, "")
        assert comm is self.comm
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def job(monkeypatch, tmp_path):
    job = Job()
    launch = types.ModuleType("mpishard.comm.launch")
    launch.world = job.world
    launch.install_abort_hook = launch.leave_together = lambda comm: None
    launch.abort_world = lambda message, code: None
    begin = types.ModuleType("mpishard.train.start")
    begin.run = job.run
    monkeypatch.setitem(sys.modules, "mpishard.comm.launch", launch)
    for module in (mpishard.launched, mpishard.cli):
        monkeypatch.setattr(module, "environment_rank", lambda: job.rank)
        monkeypatch.setattr(module, "environment_size", lambda: None)
    monkeypatch.setitem(sys.modules, "mpishard.train.start", begin)
    monkeypatch.chdir(tmp_path)
    return job


@pytest.fixture
def call(job, capsys):
    """Run the program; return its exit code, its output and its errors."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


# --- options and help


def test_the_commands_and_their_options_are_pinned():
    found = {
        f"{group} {name}".strip(): [option for parameter in command.params for option in parameter.opts]
        for group, commands in (("", program.commands), *((g, program.commands[g].commands) for g in ("data", "bench")))
        for name, command in commands.items()
    }
    assert found == {
        "train": [
            "--config", "--preset", "--set", "--init-from", "--resume", "--run-dir", "--device", "--as-rank",
            "--memory-report", "--trace", "--print-config",
        ],
        "timeline": ["run", "--step", "--plot", "--perfetto"],
        "doctor": [
            "--device", "--transport", "--launcher", "--limit", "--no-try", "--no-measure", "--run-dir", "--json"
        ],
        "generate": [
            "--from", "--prompt", "--prompt-tokens", "--tokens", "--temperature", "--top-k", "--seed", "--device"
        ],
        "schedule": ["--config", "--preset", "--set", "--ranks", "--kind", "--all"],
        "plan": [
            "--config", "--preset", "--set", "--params", "--ranks", "--strategy", "--device", "--device-memory",
            "--ranks-per-node", "--json", "--plot",
        ],
        "bench": [],
        "bench collectives": [
            "--transports", "--ops", "--algorithms", "--dtypes", "--min", "--max", "--factor", "--baseline",
            "--seconds", "--json", "--plot", "--device", "--share-device",
        ],
        "bench step": [
            "--config", "--preset", "--set", "--transports", "--steps", "--json", "--device", "--share-device"
        ],
        "data": [],
        "data build": ["--source", "--out", "--heldout-fraction"],
        "data inspect": ["file"],
    }


def test_help_lists_every_setting_and_every_preset(call):
    code, out, err = call("train", "--help")
    assert (code, err) == (0, "")
    listed = re.findall(r"^  (\w+\.\w+)\s", out, flags=re.MULTILINE)
    assert listed == [f"{name}.{key}" for name, section in sections().items() for key in section.model_fields]
    for name in presets():
        assert re.search(rf"^  {re.escape(name)} ", out, flags=re.MULTILINE)
    assert "Traceback" not in out


def test_a_row_of_the_help_says_what_it_is_what_it_takes_and_the_default():
    assert dict(setting_rows("train"))["train.steps"] == (
        "steps of the optimizer (a whole number, at least 1) [default: 200]"
    )
    assert dict(setting_rows("shard"))["shard.accumulate"].endswith('(reduce or no_sync) [default: "reduce"]')


def test_help_starts_nothing():
    code = (
        "import sys\nfrom mpishard.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n"
        "    print([n for n in ('numpy', 'mpi4py', 'pydantic', 'rich') if n in sys.modules])"
    )
    assert fresh("-c", code).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["data", "--help"], ["data", "build", "--help"]])
def test_help_and_version_exit_with_0(call, arguments):
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert out


# --- train


def test_train_gives_the_loop_what_was_asked(call, job, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 7\n")
    code, _, err = call(
        "train", "--preset", "tiny", "--config", file, "--set", "train.seed=5", "--set", "comm.transport=local",
        "--run-dir", tmp_path / "a" / "b",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert job.config == load(file, "tiny", ["train.seed=5", "comm.transport=local"])
    assert job.transport == "local"
    assert job.run_dir == tmp_path / "a" / "b"
    assert job.run_dir.is_dir()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [([], "train"), (["--preset", "tiny"], "tiny"), (["--preset", "tiny", "--config", "my run.toml"], "my run")],
)
def test_the_run_directory_is_new_and_named_after_the_run(call, job, arguments, name):
    Path("my run.toml").write_text("")
    seen = set()
    for _ in range(3):
        assert call("train", *arguments)[0] == 0
        assert re.fullmatch(rf"runs/{name}-\d{{8}}-\d{{6}}(-\d)?", str(job.run_dir))
        assert job.run_dir.is_dir()
        seen.add(job.run_dir)
    assert len(seen) == 3


def test_a_memory_report_is_asked_for(call, job, monkeypatch):
    assert call("train")[0] == 0
    assert job.reporter is None
    assert call("train", "--memory-report")[0] == 0
    assert job.reporter is write_report
    monkeypatch.setattr(mpishard.plan.memory_report, "find_spec", lambda name: None)
    code, _, err = call("train", "--memory-report")
    assert (code, err.count("\n")) == (2, 1)
    assert "--memory-report needs matplotlib" in err


def test_the_exit_code_is_the_loops(call, job):
    job.outcome = 75
    assert call("train")[0] == 75


def test_print_config_prints_and_starts_nothing(call, job):
    code, out, err = call("train", "--preset", "tiny", "--set", "train.seed=5", "--print-config")
    assert (code, err) == (0, "")
    assert out == dump_toml(load(None, "tiny", ["train.seed=5"]))
    assert job.comm is None
    assert not Path("runs").exists()
    job.rank = 1
    assert call("train", "--print-config") == (0, "", "")


# --- mistakes

MISTAKES = [
    (["train", "--as-rank", "x/4"], "--as-rank is 'x/4'; it must be a rank and a number of ranks, as in 5/1024"),
    (["train", "--as-rank", "-1/4"], "as in 5/1024"),
    (["train", "--as-rank", "1/4/2"], "as in 5/1024"),
    (["train", "--as-rank", "²/4"], "as in 5/1024"),
    (["train", "--as-rank", "1/1000001"], "the number of ranks must be at least 1 and at most 1000000"),
    (["train", "--set", "train.steps=x"], 'train.steps is "x" in --set; it must be a whole number, at least 1'),
    (["train", "--preset", "none"], "there is no preset 'none'"),
    (["train", "--config", "none.toml"], "none.toml: cannot be read"),
    (["train", "--sett", "x"], "No such option"),
    (["train", "--set"], "'--set' requires an argument"),
    (["train", "extra"], "extra"),
    (["trian"], "No such command 'trian'"),
    ([], "Missing command; see 'mpishard --help'"),
    (["data"], "see 'mpishard data --help'"),
    (["data", "build"], "--out"),
    (["data", "build", "--out", "x", "--source", "nowhere"], "nowhere: there is no such file or folder"),
    (["data", "build", "--out", "x", "--heldout-fraction", "2"], "the held-out fraction is 2.0"),
    (["data", "inspect", "none.tokens"], "none.tokens: cannot be read"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(call, job, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("mpishard: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert message in err
    assert job.comm is None


@pytest.mark.parametrize(("arguments", "message"), MISTAKES[:6])
def test_only_rank_0_speaks_and_all_exit_with_2(call, job, arguments, message):
    job.rank = 0
    assert message in call(*arguments)[2]
    job.rank = 3
    assert call(*arguments) == (2, "", "")


def test_ranks_that_do_not_fit_are_refused_before_the_loop(call, job, monkeypatch):
    def world(make_ops, transport="auto", *, share_device=False, algorithm="auto"):
        comm = LocalCommunicator(make_ops(None))
        comm.size = 3
        return comm

    monkeypatch.setattr(sys.modules["mpishard.comm.launch"], "world", world)
    code, _, err = call("train", "--set", "train.global_batch=8", "--set", "train.micro_batch=2")
    assert code == 2
    assert "4 micro-batches a step" in err
    assert job.config is None
    assert not Path("runs").exists()


def test_a_mistake_found_by_the_loop_is_told_alike(call, job):
    job.outcome = DataError("t.tokens: is damaged")
    assert call("train") == (2, "", "mpishard: t.tokens: is damaged\n")


def test_a_bug_passes_through(job):
    job.outcome = EngineError("a bug")
    with pytest.raises(EngineError):
        main(["train"])


def test_an_interrupt_is_exit_code_130(call, job, monkeypatch):
    def interrupted(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "run", interrupted)
    monkeypatch.setattr(sys.modules["mpishard.train.start"], "run", interrupted)
    assert call("train")[0] == 130


# --- the run directory of several ranks


class Ranks:
    """As much of a communicator as agreeing on the directory needs; ``first`` is rank 0's record."""

    def __init__(self, rank, first=None):
        self.rank, self.first, self.sent = rank, first, None

    def exchange(self, record, what):
        self.sent = record
        return [record if self.rank == 0 else self.first, record]


@pytest.mark.parametrize("asked", [None, Path("given/ü"), Path(os.fsdecode(b"raw\xff"))])
def test_all_ranks_take_rank_0s_directory(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    zero = Ranks(0)
    path = agree_run_dir(zero, "demo", asked)
    one = Ranks(1, zero.sent)
    assert agree_run_dir(one, "demo", asked) == path
    assert len(one.sent) == len(zero.sent)
    assert list(Path("runs").glob("*")) == ([path] if asked is None else [])
    assert path.is_dir()


def test_a_directory_that_cannot_be_made_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "file").touch()
    zero = Ranks(0)
    with pytest.raises(ConfigError, match=r"file/run: cannot be made .* choose another with --run-dir"):
        agree_run_dir(zero, "demo", tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="cannot be made"):
        agree_run_dir(Ranks(1, zero.sent), "demo", tmp_path / "file" / "run")


# --- data


def test_data_build_and_inspect(call, tmp_path):
    (tmp_path / "book.txt").write_bytes(b"0123456789" * 10)
    code, out, err = call("data", "build", "--source", "book.txt", "--out", "made", "--heldout-fraction", "0.2")
    assert (code, err) == (0, "")
    assert out == "made/train.tokens: 80 tokens\nmade/heldout.tokens: 20 tokens, 20.0%\n"
    code, out, err = call("data", "inspect", "made/heldout.tokens")
    assert (code, err) == (0, "")
    assert re.fullmatch(
        r"tokens      20\nvocabulary  256\ntype        uint8\nchecksum    [0-9a-f]{32} \(verified\)\n"
        r"begins      '01234567890123456789'\n",
        out,
    )


def test_data_build_tells_what_it_left_out_and_what_it_could_not_split(call, tmp_path):
    (tmp_path / "texts").mkdir()
    for name, content in (("a.txt", b"a" * 10), ("b.txt", b"b" * 90), ("c.bin", b"\xff\xfe")):
        (tmp_path / "texts" / name).write_bytes(content)
    code, out, _ = call("data", "build", "--source", "texts", "--out", "made", "--heldout-fraction", "0.01")
    assert code == 0
    assert "left out: 1 files that are not UTF-8 text" in out
    assert "note: 1.0% was to be held out, and files are held out whole" in out


def test_inspect_verifies(call, tmp_path):
    (tmp_path / "book.txt").write_bytes(b"0123456789" * 10)
    call("data", "build", "--source", "book.txt", "--out", "made")
    path = tmp_path / "made" / "train.tokens"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, out, err = call("data", "inspect", path)
    assert (code, out) == (2, "")
    assert "the file is damaged" in err
