"""scripts/gpu_check: without a GPU, and its parts run with tiny sizes on a stand-in for CuPy."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpishard.array.cupy_ops import CupyOps
from mpishard.nn.layer import Layer, LossLayer
from tests.standin import installed

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check"
#: Begins every process of the check: packages that a machine need not have are not there, and CuPy is played. A part
#: whose name is in DIES ends as after a fault, and one in HANGS does not end.
PLAYED = """
import os, runpy, sys, time

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["ABSENT"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
name = sys.argv[sys.argv.index("--child") + 1] if "--child" in sys.argv else "?"
if name in os.environ.get("DIES", "").split():
    os.kill(os.getpid(), 11)
if name in os.environ.get("HANGS", "").split():
    time.sleep(60)
runpy.run_module("tests.standin.run", run_name="__main__", alter_sys=True)
"""
ABSENT = "click mpi4py pydantic pytest rich tomli torch"


def gpu_check(folder: Path, *arguments: str, played: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a folder, on the stand-in or with what Python finds there as ``cupy``."""
    play = folder / "play.py"
    play.write_text(PLAYED)
    through = {"MPISHARD_GPU_CHECK_THROUGH": str(play), "STANDIN_DEVICES": "2", "ABSENT": ABSENT} if played else {}
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **through, **variables}
    command = [sys.executable, *([str(play)] if played else []), str(SCRIPT), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def parts_of(path: Path) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in json.loads(path.read_text())["parts"]}


def module(name: str) -> Any:
    """A module of scripts/lib/gpu_check."""
    sys.path.insert(0, str(ROOT / "scripts" / "lib"))
    try:
        return importlib.import_module(f"gpu_check.{name}")
    finally:
        sys.path.pop(0)


PARTS = {part.name: part for part in module("parts").PARTS}


# --- without a GPU


@pytest.mark.parametrize(
    ("cupy", "why"),
    [
        ("raise ModuleNotFoundError(\"No module named 'cupy'\", name='cupy')", "the package CuPy is not installed"),
        (
            "class cuda:\n class runtime:\n  driverGetVersion = runtimeGetVersion = lambda: 0\n__version__ = '14.0'",
            "no NVIDIA driver is found",
        ),
    ],
)
def test_without_a_gpu_it_says_why_and_lists_the_parts(tmp_path: Path, cupy: str, why: str) -> None:
    (tmp_path / "cupy.py").write_text(cupy)
    ended = gpu_check(tmp_path, played=False)
    first, second, *listed = ended.stdout.splitlines()
    assert ended.returncode == 3, ended.stderr
    assert first.startswith(f"No GPU can be used: {why}")
    assert second == "This would run:"
    assert [line.split()[0] for line in listed] == list(PARTS)
    assert not list(tmp_path.glob("*.json"))


def test_parts_are_listed_with_what_they_need(tmp_path: Path) -> None:
    ended = gpu_check(tmp_path, "--list", "mpi", "rates", played=False)
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == [
        "  mpi    two MPI ranks sharing the GPU, same bits as one (needs mpi4py, an MPI library, mpiexec)",
        "  rates  copy bandwidth and matrix rate of this GPU",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "there is no part 'speed'; the parts are machine, operations, "),
        (["--device", "2"], "there is no GPU 2; 2 are visible, counted from 0"),
        (["--limit", "0"], "--limit is 0.0; give seconds above 0"),
        (["--json", "none/here.json"], "none/here.json cannot be written (No such file or directory); name another"),
        (["--render", "none.json"], "none.json cannot be read (No such file or directory)"),
        (["--render", "play.py"], "play.py is no file of results of this program"),
        (["--render", "newer.json"], "newer.json has format 99, and this program reads 1; use a newer one"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "newer.json").write_text('{"format": 99}')
    ended = gpu_check(tmp_path, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"gpu_check: {message}")
    assert ended.stderr.count("\n") == 1


# --- the parts on the stand-in


def test_every_part_runs_with_numpy_cupy_and_ml_dtypes_alone(tmp_path: Path) -> None:
    chosen = [name for name in PARTS if not name.endswith("1.5b")]  # the same code as 124m
    ended = gpu_check(tmp_path, "--small", "--json", "found.json", *chosen)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = parts_of(tmp_path / "found.json")
    assert list(found) == chosen
    skipped = {name: part["why"] for name, part in found.items() if part["status"] == "skipped"}
    assert skipped == {
        "mpi": "mpi4py is not installed",
        "torch-124m": "PyTorch is not installed (No module named 'torch')",
    }
    for name, part in found.items():
        assert part["seconds"] >= 0
        assert part["status"] == "skipped" or (part["tables"] and all(t["rows"] for t in part["tables"])), name
    figures = found["gpt2-124m"]["figures"]["bfloat16"]
    assert figures["tokens/s"] > 0
    assert figures["launches"] > 100
    for kind in ("bfloat16", "float16", "float32"):
        assert all(fraction > 0 for fraction in found["kernels"]["figures"][kind].values())

    shown = gpu_check(tmp_path, "--render", "found.json", played=False)
    assert shown.returncode == 0
    assert shown.stdout.startswith("# Stand-in, 2")
    assert "Run with tiny sizes: the figures mean nothing." in shown.stdout
    for part in found.values():
        for table in part.get("tables", []):
            assert f"| {table['columns'][0]} " in shown.stdout
    rows = [line for line in shown.stdout.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


@pytest.mark.jobs
def test_two_mpi_ranks_share_the_gpu(tmp_path: Path) -> None:
    absent = ABSENT.replace("mpi4py ", "")
    # The stand-in's device memory is host memory, which any MPI reads.
    ended = gpu_check(tmp_path, "--small", "--json", "found.json", "mpi", ABSENT=absent, MPISHARD_GPU_AWARE="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    part = parts_of(tmp_path / "found.json")["mpi"]
    assert part["status"] == "passed"
    kinds = ("float32", "bfloat16", "float16")
    assert [row[:2] for row in part["tables"][0]["rows"]] == [[t, kind] for t in ("staged", "mpi") for kind in kinds]


def test_a_part_that_dies_leaves_the_others_alone(tmp_path: Path) -> None:
    ended = gpu_check(tmp_path, "--small", "operations", "rates", DIES="operations")
    assert ended.returncode == 1
    (path,) = tmp_path.glob("gpu_check-*.json")
    found = parts_of(path)
    statuses = {name: part["status"] for name, part in found.items()}
    assert statuses == {"machine": "passed", "operations": "failed", "rates": "passed"}
    assert found["operations"]["why"] == "its process ended with exit code -11"


@pytest.mark.parametrize(
    ("left", "status", "why"),
    [(60.0, "failed", "it was not done after 1 s"), (0.5, "skipped", "the limit of 60 s was reached after 0 s of it")],
)
def test_a_part_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float, status: str, why: str
) -> None:
    (tmp_path / "play.py").write_text(PLAYED)
    for name, value in {"THROUGH": str(tmp_path / "play.py"), "HANGS": "rates", "ABSENT": ""}.items():
        monkeypatch.setenv(f"MPISHARD_GPU_CHECK_{name}" if name == "THROUGH" else name, value)
    part = replace(PARTS["rates"], expected=0.1, most=1.0)
    found = module("driver")._start(part, SimpleNamespace(device=0, small=True, limit=60), [], left)
    assert (found["status"], found["why"]) == (status, why)
    assert found["seconds"] < 30


def test_what_does_not_fit_the_limit_is_skipped(tmp_path: Path) -> None:
    ended = gpu_check(tmp_path, "--small", "--limit", "2", "--json", "found.json", "kernels", "rates")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = parts_of(tmp_path / "found.json")
    assert [found[name]["status"] for name in ("kernels", "rates")] == ["skipped", "skipped"]
    assert found["kernels"]["why"].endswith("of 2 s are left and it takes about 14")


# --- what is wrong is found


@pytest.fixture
def standing_in() -> Iterator[None]:
    with installed(devices=2):
        yield


def run(name: str, **known: Any) -> dict[str, Any]:
    """A part in this process."""
    report = module("report")
    found: dict[str, Any] = module("parts").run(PARTS[name], report.Task(small=True, known=known))
    json.dumps(found, allow_nan=False)
    return found


def slightly_wrong(self: CupyOps, x: Any, dy: Any, dx: Any, tanh: bool) -> None:
    right(self, x, dy, dx, not tanh)


right = CupyOps._gelu_backward


@pytest.mark.usefixtures("standing_in")
@pytest.mark.parametrize(
    ("name", "why"), [("operations", "times the bound from NumPy's result"), ("gradients", "is off by")]
)
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    monkeypatch.setattr(CupyOps, "_gelu_backward", slightly_wrong)
    found = run(name)
    assert found["status"] == "failed"
    assert any(why in problem and "elu" in problem for problem in found["problems"])


@pytest.mark.usefixtures("standing_in")
def test_other_bits_than_numpy_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = CupyOps._multiply

    def twice(self: CupyOps, x: Any, y: Any, out: Any, add: bool) -> None:
        scale(self, x, y, out, add)
        self._fill(out[:1], 1.0 + 2**-23)

    monkeypatch.setattr(CupyOps, "_multiply", twice)
    assert any("other bits than NumPy's" in problem for problem in run("operations")["problems"])


@pytest.mark.usefixtures("standing_in")
def test_another_loss_and_other_bits_of_a_second_run_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add, calls = CupyOps._add, []

    def drifting(self: CupyOps, x: Any, y: Any, out: Any) -> None:
        calls.append(None)
        add(self, x, y, out)
        self._fill(out[:1], len(calls) * 1e-3)

    monkeypatch.setattr(CupyOps, "_add", drifting)
    problems = run("training")["problems"]
    assert any("from the CPU's, more than 0.0001" in problem for problem in problems)
    assert any("two runs end with the checksums" in problem for problem in problems)


@pytest.mark.usefixtures("standing_in")
@pytest.mark.parametrize(
    ("slip", "why"),
    [
        (lambda ops: ops.empty(16, "float32"), "calls take or give back memory"),
        (lambda ops: ops.gpu.cupy.cuda.alloc_pinned_memory(16), "calls take or give back memory"),
        (lambda ops: ops.gpu.cupy.cuda.Device(0).synchronize(), "waits for the whole device"),
    ],
)
def test_memory_and_waits_in_a_step_are_found(monkeypatch: pytest.MonkeyPatch, slip: Any, why: str) -> None:
    entropy = CupyOps._cross_entropy

    def slipping(self: CupyOps, *arguments: Any) -> None:
        slip(self)
        entropy(self, *arguments)

    monkeypatch.setattr(CupyOps, "_cross_entropy", slipping)
    found = run("steps")
    assert found["status"] == "failed"
    assert all(why in problem for problem in found["problems"])
    assert len(found["problems"]) == 6


@pytest.mark.usefixtures("standing_in")
def test_another_order_of_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = CupyOps._ordered_sum
    monkeypatch.setattr(
        CupyOps, "_ordered_sum", lambda self, blocks, *rest: ordered(self, blocks[::-1], *rest)
    )
    # Sums of some bfloat16 numbers are exact in fp32 in any order.
    assert "2 ranks over NCCL, float32: other bits than one rank without it" in run("nccl")["problems"]


@pytest.mark.usefixtures("standing_in")
def test_a_part_that_raises_is_a_failure_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CupyOps, "_matmul", lambda *arguments: 1 / 0)
    found = run("rates")
    assert (found["status"], found["why"]) == ("failed", "ZeroDivisionError: division by zero")
    assert "in matrix_rate" in found["traceback"]


@pytest.mark.usefixtures("standing_in")
def test_torch_beside_ours() -> None:
    if importlib.util.find_spec("torch") is None:
        assert run("torch-124m")["status"] == "skipped"
        return
    ours = {kind: {"micro-batch": 2, "tokens/s": 1e9} for kind in ("bfloat16", "float32")}
    found = run("torch-124m", **{"gpt2-124m": ours})
    assert found["status"] == "passed", found.get("traceback")
    for kind, row in zip(("bfloat16", "float32"), found["tables"][0]["rows"]):
        assert row[:2] == [kind, 2]
        assert row[5] == pytest.approx(1e9 / row[2])


def test_every_layer_has_its_gradients_checked() -> None:
    import mpishard.nn as rooms

    checked = {type(make()) for make, *_ in module("gradients").LAYERS}
    found = set()
    for path in Path(rooms.__path__[0]).glob("*.py"):
        room = importlib.import_module(f"mpishard.nn.{path.stem}")
        found |= {kind for _, kind in inspect.getmembers(room, inspect.isclass) if issubclass(kind, Layer | LossLayer)}
    assert checked == found - {Layer, LossLayer}


def test_the_vendors_peak_of_a_device_is_that_of_its_own_kind() -> None:
    peak = module("rates").peak
    known = {"H200": 989.4, "H200 NVL": 835.5, "H100 80GB HBM3": 989.4, "H100 PCIe": 756.0, "A100-SXM4-80GB": 312.0}
    assert {name: peak(f"NVIDIA {name}", "bfloat16") / 1e12 for name in known} == pytest.approx(known)
    assert peak("NVIDIA H200", "float32") == pytest.approx(66.9e12)
    assert peak("NVIDIA H200", "float16") == peak("NVIDIA H200", "bfloat16")
    assert peak("NVIDIA L40", "bfloat16") is None
    assert peak("NVIDIA GeForce RTX 4090", "float32") is None


def test_the_models_have_the_sizes_that_their_names_say() -> None:
    models = module("models")
    assert models.parameters(models.MODELS["gpt2-124m"][0]) == 124_439_808
    assert models.parameters(models.MODELS["gpt2-1.5b"][0]) == 1_557_611_200
    assert models.flops_a_token(models.MODELS["gpt2-124m"][0]) == 6 * 124_439_808 + 12 * 12 * 768 * 1024
