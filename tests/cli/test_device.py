"""The program on GPUs: what is said where there is none, and whole runs on the stand-in for CuPy."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.processes import fresh, mpiexec
from tests.cli.small_runs import finished, snapshot, training

#: the program where no package CuPy can be imported
WITHOUT_CUPY = ("-c", "import sys; sys.modules['cupy'] = None; from mpishard.cli import main; main()")
STANDIN = ("-m", "tests.standin.run", "-m", "mpishard")


def on_the_standin(*arguments: str, ranks: int = 1, **variables: str):
    environment = dict(os.environ) | variables
    return mpiexec(*STANDIN, *arguments, ranks=ranks, env=environment, seconds=120)


def checksum(folder: Path) -> str:
    return json.loads((folder / "report.json").read_text())["checksum"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.jobs
def test_without_cupy_one_line_says_what_is_missing(ranks: int, tmp_path: Path) -> None:
    arguments = training(tmp_path, "device.kind=cuda")
    before = snapshot(tmp_path)
    start = fresh if ranks == 1 else mpiexec
    for options in (arguments, [*training(tmp_path), "--device", "cuda"]):
        done = start(*WITHOUT_CUPY, *options)
        assert done.returncode == 2
        lines = [line for line in done.stderr.splitlines() if line.startswith("mpishard")]
        assert len(lines) == 1, done.stderr
        assert re.fullmatch(
            r"mpishard: device cuda cannot be used: the package CuPy is not installed; "
            r"pip install 'cupy-cuda12x>=14' \(cupy-cuda13x, if nvidia-smi names CUDA 13\); "
            r"or compute on the CPU \(device cpu\)",
            lines[0],
        )
        assert snapshot(tmp_path) == before
        assert not (tmp_path / "run").exists()


def test_auto_says_why_it_is_the_cpu(tmp_path: Path) -> None:
    done = fresh(*WITHOUT_CUPY, *training(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "device: cpu (no GPU can be used: the package CuPy is not installed" in done.stdout


def test_the_device_transports_are_refused_on_a_cpu(tmp_path: Path) -> None:
    for transport in ("staged", "nccl"):
        arguments = training(tmp_path, f"comm.transport={transport}", "device.kind=cpu")
        done = mpiexec("-m", "mpishard", *arguments)
        assert done.returncode == 2
        lines = [line for line in done.stderr.splitlines() if line.startswith("mpishard")]
        assert len(lines) == 1, done.stderr
        assert f"transport {transport!r}" in lines[0]
        assert not (tmp_path / "run").exists()


@pytest.mark.jobs
def test_a_run_goes_on_over_another_transport_and_on_the_cpu(tmp_path: Path) -> None:
    """NCCL on 2 ranks, then staged on 4, has the bits of one that never stopped; and a CPU takes over."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    options = ("train.steps=4", "device.kind=cuda")
    done = on_the_standin(*training(whole, *options))
    assert done.returncode == 0, done.stderr
    assert "device: cuda:0" in done.stdout
    done = on_the_standin(*training(parts, *options, "comm.transport=nccl", "train.steps=2"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert "2 ranks (nccl)" in done.stdout
    more = ("train", "--resume", str(parts / "run"), "--set", "train.steps=4")
    done = on_the_standin(*more, "--set", "comm.transport=staged", ranks=4)
    assert done.returncode == 0, done.stderr
    assert checksum(parts / "run") == checksum(whole / "run")
    done = fresh("-m", "mpishard", "train", "--resume", str(parts / "run"), "--set", "train.steps=5",
                 "--set", "comm.transport=auto", "--device", "cpu")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'changed: device.kind = "cpu" (was "cuda")' in done.stdout
    generated = [
        start("generate", "--from", str(parts / "run"), "--prompt-tokens", "3 1", "--tokens", "5", "--device", device)
        for start, device in ((on_the_standin, "cuda"), (lambda *a: fresh("-m", "mpishard", *a), "cpu"))
    ]
    assert generated[0].stdout == generated[1].stdout != ""


@pytest.mark.jobs
def test_weights_of_a_cpu_run_begin_one_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    source = finished(tmp_path / "cpu") / "checkpoints/step-00000002"
    first = []
    for start in (on_the_standin, lambda *arguments: fresh("-m", "mpishard", *arguments)):
        folder = tmp_path / f"run-{len(first)}"
        folder.mkdir()
        done = start(*training(folder, "precision.compute=bf16"), "--init-from", str(source))
        assert done.returncode == 0, done.stderr
        first.append(json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert first[0] == pytest.approx(first[1], rel=2e-3)


@pytest.mark.jobs
def test_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    arguments = training(tmp_path, "device.kind=cuda", "comm.transport=staged")
    before = snapshot(tmp_path)
    done = on_the_standin(*arguments, ranks=2, STANDIN_DEVICES="1")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("mpishard")]
    assert len(lines) == 1, done.stderr
    assert "ranks 0 and 1 use one GPU" in lines[0]
    assert "device.share" in lines[0]
    assert snapshot(tmp_path) == before
    done = on_the_standin(*arguments, "--set", "device.share=true", ranks=2, STANDIN_DEVICES="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.jobs
def test_mpi_that_does_not_take_gpu_memory(tmp_path: Path) -> None:
    """It is refused by name, and auto goes through host memory instead and says why."""
    arguments = training(tmp_path, "device.kind=cuda", "comm.transport=mpi")
    done = on_the_standin(*arguments, ranks=2, MPISHARD_GPU_AWARE="0")
    assert done.returncode == 2
    assert "transport 'mpi' hands GPU memory to MPI, and MPISHARD_GPU_AWARE is 0" in done.stderr
    done = on_the_standin(*training(tmp_path, "device.kind=cuda"), ranks=2, MPISHARD_GPU_AWARE="0")
    assert done.returncode == 0, done.stderr
    assert "transport: staged" in done.stdout
    assert "MPISHARD_GPU_AWARE is 0" in done.stdout


SPLIT = """
from mpi4py import MPI
import mpishard
from mpishard.array.device import identity
from mpishard.models.mlp import MlpClassifier, mlp_classifier

world = MPI.COMM_WORLD
half = world.Split(world.rank // 2, world.rank)
model = mlp_classifier(MlpClassifier(features=4, classes=3))
engine = mpishard.full_shard(model, None, half, global_batch=4, device="cuda", transport="staged")
found = world.gather(identity(engine.ops))
engine.close()
if world.rank == 0:
    print("GPUs", len(set(found)))
"""


@pytest.mark.jobs
def test_halves_of_a_job_share_no_gpu(tmp_path: Path) -> None:
    """Each rank has the GPU of its number on the machine, not of its number in the half."""
    (tmp_path / "split.py").write_text(SPLIT)
    command = ("-m", "tests.standin.run", str(tmp_path / "split.py"))
    done = mpiexec(*command, ranks=4, env=dict(os.environ), seconds=120)
    assert done.returncode == 0, done.stderr
    assert "GPUs 4" in done.stdout


def test_a_token_that_there_is_not_ends_the_run_on_a_gpu_too() -> None:
    from mpishard.comm.local import LocalCommunicator
    from mpishard.errors import DataError
    from tests.shard.training import Job
    from tests.standin import installed

    with installed():
        from mpishard.array.cupy_ops import CupyOps

        job = Job()

        def feed(micro, inputs, targets):
            job.feed(0)(micro, inputs, targets)
            inputs[0, 0] = job.sizes.vocabulary

        engine = job.engine(LocalCommunicator(CupyOps()))
        with pytest.raises(DataError, match=f"an input of the data is {job.sizes.vocabulary}; the model knows"):
            engine.step(feed, lr=0.0)


@pytest.mark.jobs
def test_the_optimiser_in_host_memory_changes_no_bit(tmp_path: Path) -> None:
    """Offloaded on GPUs, saved, and resumed without a GPU: the run that did neither."""
    found = {}
    for name, offload in (("plain", "none"), ("offloaded", "optimizer")):
        folder = tmp_path / name
        folder.mkdir()
        options = ("precision.compute=bf16", "device.kind=cuda", "train.steps=3", f"shard.offload={offload}")
        done = on_the_standin(*training(folder, *options), ranks=2)
        assert done.returncode == 0, done.stderr
        assert ("optimizer in host memory" in done.stdout) == (" of host memory a rank" in done.stdout) == (
            offload == "optimizer"
        )
        found[name] = json.loads((folder / "run/report.json").read_text())
    assert found["plain"]["checksum"] == found["offloaded"]["checksum"]
    held = found["offloaded"]["bytes"][0]
    assert held["masters"] == held["optimizer"] == 0
    go_on = ("train", "--resume", str(tmp_path / "offloaded" / "run"), "--set", "train.steps=4")
    before = snapshot(tmp_path)
    done = fresh("-m", "mpishard", *go_on, "--device", "cpu")
    assert done.returncode == 2
    assert "shard.offload is optimizer and device.kind is cpu" in done.stderr
    assert snapshot(tmp_path) == before
    done = fresh("-m", "mpishard", *go_on, "--device", "cpu", "--set", "shard.offload=none")
    assert done.returncode == 0, done.stderr
    assert 'changed: shard.offload = "none" (was "optimizer")' in done.stdout


def test_offload_where_auto_finds_no_gpu(tmp_path: Path) -> None:
    arguments = training(tmp_path, "shard.offload=optimizer")
    before = snapshot(tmp_path)
    done = mpiexec(*WITHOUT_CUPY, *arguments)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mpishard")]
    assert "shard.offload is optimizer and the device is the CPU" in line
    assert "--device cuda says what is missing" in line
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_a_rank_of_many_on_a_gpu(tmp_path: Path, transport: str) -> None:
    arguments = training(tmp_path, "train.global_batch=16", "device.kind=cuda", f"comm.transport={transport}")
    done = on_the_standin(*arguments, "--as-rank", "3/16", ranks=1)
    assert done.returncode == 0, done.stderr
    assert f"with the buffers of transport {'staged' if transport == 'auto' else transport}" in done.stdout
    assert "this process held" not in done.stdout  # the host's memory says nothing of the GPU's
    found = json.loads((tmp_path / "run" / "as-rank.json").read_text())
    assert found["bytes"] == found["bytes_planned"]
