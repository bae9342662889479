"""mpishard bench: what it refuses, on all ranks in one line, and real jobs of both commands."""

from __future__ import annotations

import json

import pytest

from mpishard.cli import main
from mpishard.launched import environment_rank
from tests.bench.test_bench_collectives import KEYS
from tests.cli.processes import mpiexec

COLLECTIVES = ("-m", "mpishard", "bench", "collectives")
SMALL = ("--min", "4KiB", "--max", "100kB", "--factor", "8", "--seconds", "0.001", "--device", "cpu")
jobs = pytest.mark.skipif(environment_rank() is not None, reason="an MPI job cannot start another one everywhere")


@pytest.fixture
def refused(capsys, monkeypatch):
    """The one line on standard error, without a launcher."""
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def refused(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["bench", *arguments])
        out, err = capsys.readouterr()
        assert caught.value.code == 2
        assert out == ""
        assert len(err.splitlines()) == 1
        return err

    return refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--transports mpi,tcp", "--transports: transport 'tcp' is not known; choose among mpi, node"),
        ("--ops all_gather,scatter", "--ops: 'scatter' is not known; choose among all_gather, reduce_scatter, all_"),
        ("--algorithms best", "--algorithms: 'best' is not known; choose among auto, alltoall"),
        ("--dtypes int8", "--dtypes: 'int8' is not known; choose among fp32, bf16"),
        ("--min 4", "--min is '4', without a unit; write 4KiB"),
        ("--max 4parsec", "--max is '4parsec'; parsec is no unit of a size"),
        ("--min 2MiB --max 1MiB", "--min is 2 MiB and --max is 1 MiB; --min must not be the larger one"),
        ("--factor 1", "--factor is 1; each size is so many times the one before"),
        ("--seconds 0", "--seconds is 0; it is the time of a row's samples"),
        ("--baseline node:ring", "--baseline: algorithm 'ring' is not one of node"),
        ("--plot a.gif", "--plot is a.gif; its name must end in .png"),
        ("", "bench collectives is for 2 ranks or more, and this is one alone; start it with: mpiexec -n 2 mpishard"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(refused, arguments, message):
    assert message in refused("collectives", *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--preset tiny --steps 0", "--steps is 0; it must be 1 to 10000"),
        ("--preset tiny --transports mpi:native", "--transports: mpi:native claims no bits and trains nothing"),
        ("--preset tiny --transports node:shared", "--transports: node:shared is an all-gather, which training over"),
        ("--preset tiny --transports mpi:ring", "--transports: mpi:ring adds up in an order of its own"),
        ("--preset tiny --transports a", "transport 'a' is not known"),
        ("--preset tiny --transports mpi,hierarchical", "comm.transport is hierarchical, which adds up inside"),
        ("--preset tiny --set comm.transport=node", "comm.transport is node, and bench step has --transports for it"),
        ("--preset tiny --set comm.algorithm=ring --set comm.transport=mpi", "comm.transport is mpi, and bench step"),
        ("--preset none", "none"),
        ("--preset tiny", "bench step is for 2 ranks or more, and this is one alone"),
    ],
)
def test_steps_that_cannot_be_measured_are_refused(refused, arguments, message):
    assert message in refused("step", *arguments.split())


@jobs
@pytest.mark.jobs
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device cpu --transports mpi,nccl", "transport 'nccl' carries arrays of a GPU and these are in host memory"),
        ("--json nowhere/a.json", "nowhere/a.json: cannot be written, there is no folder nowhere; choose another with"),
        ("--dtypes int8", "--dtypes: 'int8' is not known"),
    ],
)
def test_all_ranks_refuse_together_in_one_line(arguments, message, tmp_path):
    done = mpiexec(*COLLECTIVES, *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpishard: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in done.stderr


@jobs
@pytest.mark.jobs
def test_ranks_that_were_asked_for_other_things_are_told(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from mpishard.cli import main\n"
        "from mpishard.launched import environment_rank\n"
        "main(['bench', 'collectives', '--device', 'cpu', '--max', f'{1 + environment_rank()}MiB'])\n"
    )
    done = mpiexec(str(program))
    assert done.returncode == 2
    assert "rank 1 has most = 2MiB, rank 0 has most = 1MiB; start all ranks with the same settings" in done.stderr


@jobs
@pytest.mark.jobs
@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_of_a_job(ranks, tmp_path):
    out = tmp_path / "found.json"
    more = ("--transports", "mpi,mpi:alltoall,mpi:native,node,node:shared", "--json", str(out))
    done = mpiexec(*COLLECTIVES, *SMALL, *more, ranks=ranks, seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert set(found) >= {"host", "rows", "fits"}
    assert found["host"]["ranks"] == ranks
    assert len(found["host"]["places"]) == ranks
    assert all(set(row) >= KEYS and row["correct"] for row in found["rows"])
    kinds = {(row["op"], row["transport"], row["algorithm"], row["dtype"]) for row in found["rows"]}
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        for dtype in ("fp32", "bf16"):
            assert {(op, "mpi", "auto", dtype), (op, "node", "auto", dtype)} <= kinds
        assert (op, "mpi", "native", "fp32") in kinds
        assert ((op, "mpi", "native", "bf16") in kinds) == (op == "all_gather")
    assert ("reduce_scatter", "mpi", "alltoall", "bf16") in kinds
    assert {op for op, _, algorithm, _ in kinds if algorithm == "shared"} == {"all_gather"}
    assert all(row["vs_baseline"] == 1 for row in found["rows"] if row["algorithm"] == "native")
    assert len({row["bytes"] for row in found["rows"] if row["dtype"] == "fp32"}) == 3
    assert "reduce_scatter bf16" in done.stdout
    assert "16-bit numbers are never summed by MPI" in done.stdout


@jobs
@pytest.mark.jobs
def test_a_picture_and_a_baseline_of_ones_own(tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "found.json", tmp_path / "found.png"
    more = ("--transports", "node", "--baseline", "mpi", "--ops", "reduce_scatter", "--json", str(out))
    done = mpiexec(*COLLECTIVES, *SMALL, *more, "--plot", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(out.read_text())["rows"]
    assert {row["transport"] for row in rows} == {"mpi", "node"}
    assert all(row["vs_baseline"] == 1 for row in rows if row["transport"] == "mpi")
    assert all(row["vs_baseline"] > 0 for row in rows)


@jobs
@pytest.mark.jobs
def test_a_wrong_result_ends_with_1(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from mpishard.bench.subjects import Message\n"
        "from mpishard.cli import main\n"
        "right = Message.check\n"
        "def check(self):\n"
        "    if self.op == 'all_gather' and self.comm.rank == 1:\n"
        "        self.out[0] += 1\n"
        "    return right(self)\n"
        "Message.check = check\n"
        f"main(['bench', 'collectives', '--transports', 'mpi:native', *{SMALL!r}])\n"
    )
    done = mpiexec(str(program))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG" in done.stdout
    assert "rows are WRONG: do not trust this transport" in done.stderr


@jobs
@pytest.mark.jobs
@pytest.mark.parametrize("settings", [(), ("--set", "precision.compute=bf16")], ids=["fp32", "bf16"])
def test_steps_of_a_job(settings, tmp_path):
    out = tmp_path / "found.json"
    arguments = ("--preset", "tiny", "--steps", "2", "--transports", "mpi,node", "--device", "cpu", "--json", str(out))
    done = mpiexec("-m", "mpishard", "bench", "step", *arguments, *settings, seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [row["transport"] for row in found["rows"]] == ["mpi", "node"]
    assert all(row["same_bits"] for row in found["rows"])
    assert found["rows"][0]["losses"] == found["rows"][1]["losses"]
    assert len(found["rows"][0]["losses"]) == 4
    assert found["without_communication"]["samples"] == 2
    assert "the first" in done.stdout
