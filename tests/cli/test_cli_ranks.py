"""Ranks that are told different things, or leave: the others never wait for them, and nothing is lost."""

import pytest

from tests.cli.processes import fresh, mpiexec

pytestmark = pytest.mark.jobs


def test_a_mistake_under_mpiexec_is_told_once_and_ends_all_ranks():
    done = mpiexec("-m", "mpishard", "train", "--set", "train.steps=x")
    assert done.returncode == 2
    assert done.stderr.count("mpishard: train.steps is") == 1
    assert "Traceback" not in done.stderr


def test_a_file_that_one_rank_cannot_read_ends_all_ranks(tmp_path):
    (tmp_path / "0.toml").write_text("[model]\nlayers = 1\n")
    code = (
        "from mpishard.cli import main\n"
        "from mpishard.comm.launch import environment_rank\n"
        f"main(['train', '--config', f'{tmp_path}/{{environment_rank()}}.toml'])"
    )
    done = mpiexec("-c", code)
    assert done.returncode == 2
    assert done.stderr.count("1.toml: cannot be read") == 1


BY_RANK = """
import sys
from mpishard.cli import main
from mpishard.comm.launch import environment_rank
arguments = sys.argv[1:]
if environment_rank() == 1:
    arguments += {extra!r}
main(arguments)
"""


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--memory-report"], "rank 1 has --memory-report given, rank 0 has --memory-report not given"),
        ("train.steps=4", "rank 1 has train.steps = 4, rank 0 has train.steps = 3"),
        ("train.global_batch=4", "rank 1 has train.global_batch = 4, rank 0 has train.global_batch = 12"),
        ("optim.lr=0.5", "rank 1 has optim.lr = 0.5, rank 0 has optim.lr = "),
        ("comm.transport=local", "rank 1 has comm.transport = local, rank 0 has comm.transport = auto"),
    ],
)
def test_a_rank_with_another_setting_is_named_and_nothing_is_written(tmp_path, extra, told):
    script = tmp_path / "by_rank.py"
    script.write_text(BY_RANK.format(extra=extra if isinstance(extra, list) else ["--set", extra]))
    done = mpiexec(
        str(script), "train", "--preset", "tiny", "--set", "train.steps=3", "--run-dir", str(tmp_path / "run")
    )
    assert done.returncode == 2
    assert done.stderr.count(told) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


LEAVES = """
import sys
from mpishard.cli import main
from mpishard.comm.launch import environment_rank
from mpishard.data.loader import Batches
read = Batches.read
def leaves(self, step, micro, *arrays):
    if step == 2 and environment_rank() == 1:
        raise {error}
    return read(self, step, micro, *arrays)
Batches.read = leaves
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "error", ["KeyboardInterrupt", "EOFError", "BrokenPipeError", "SystemExit(3)", "ValueError('x')", "MemoryError"]
)
def test_a_rank_that_leaves_ends_all(tmp_path, error):
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES.format(error=error))
    done = mpiexec(str(script), "train", "--preset", "tiny", "--run-dir", str(tmp_path / "run"))  # has its time limit
    assert done.returncode != 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_that_cannot_hold_the_text_loses_nothing(tmp_path, encoding):
    options = ["--preset", "tiny", "--set", "train.steps=2", "--set", "train.sample=30"]
    options += ["--run-dir", str(tmp_path / "r")]
    done = fresh("-m", "mpishard", "train", *options, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert "checksum" in done.stdout
    assert (tmp_path / "r" / "report.json").exists()


def test_a_closed_output_loses_nothing(tmp_path):
    options = ["train", "--preset", "tiny", "--set", "train.steps=2", "--run-dir", str(tmp_path / "r")]
    code = f"import os, sys; sys.stdout = None\nfrom mpishard.cli import main\nmain({options!r})"
    assert fresh("-c", code).returncode == 0
    assert (tmp_path / "r" / "report.json").exists()
