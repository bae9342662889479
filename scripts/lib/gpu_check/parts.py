"""The parts of the check: what each does, what it needs beside a GPU, and how long it may take."""

from __future__ import annotations

import importlib
import time
import traceback
from dataclasses import dataclass
from typing import Any

from gpu_check.report import Report, Skip, Task

__all__ = ["PARTS", "Part", "run"]


@dataclass(frozen=True)
class Part:
    """One part, run in a process of its own.

    Attributes:
        module, argument: whose ``check`` is called, and with what beside the task and the report.
        expected: seconds that it is given at least; with less left it is left out.
        most: seconds after which it is ended.
    """

    name: str
    about: str
    needs: str
    module: str
    expected: float
    most: float
    argument: str = ""


#: In the order in which they run: results first, then figures. All of them are expected to fit into six minutes.
PARTS = (
    Part("machine", "the GPU, the driver, versions of what is installed", "", "machine", 3, 60),
    Part("operations", "every operation in each element type against NumPy", "", "operations", 20, 120),
    Part("gradients", "gradients of each layer: along directions, and against the CPU's", "", "gradients", 12, 60),
    Part("training", "50 steps in fp32, bf16 and fp16 against the CPU; again, same bits", "", "training", 22, 120),
    Part("steps", "memory taken, waits and launches of a step", "", "steps", 5, 40),
    Part("nccl", "NCCL's calls and training over it, on one rank and on all GPUs", "NCCL", "nccl_check", 8, 60),
    Part("mpi", "two MPI ranks sharing the GPU, same bits as one", "mpi4py, an MPI library, mpiexec", "ranks", 10, 90),
    Part("rates", "copy bandwidth and matrix rate of this GPU", "", "rates", 5, 40),
    Part("kernels", "each kernel's fraction of the copy bandwidth", "", "kernels", 14, 60),
    Part("gpt2-124m", "tokens/s and utilisation of GPT-2 124M, bf16 and fp32", "", "gpt2", 12, 90, "gpt2-124m"),
    Part("torch-124m", "the same model in PyTorch", "PyTorch with CUDA", "torch_gpt2", 12, 60, "gpt2-124m"),
    Part("gpt2-1.5b", "tokens/s and utilisation of GPT-2 1.5B, bf16 and fp32", "", "gpt2", 20, 120, "gpt2-1.5b"),
    Part("torch-1.5b", "the same model in PyTorch", "PyTorch with CUDA", "torch_gpt2", 20, 90, "gpt2-1.5b"),
)


def run(part: Part, task: Task) -> dict[str, Any]:
    """Run a part in this process; what it raises is in what is returned."""
    report, begin = Report(), time.monotonic()
    why = trace = ""
    try:
        check = importlib.import_module(f"gpu_check.{part.module}").check
        check(task, report, *([part.argument] if part.argument else []))
        status = "failed" if report.problems else "passed"
        why = f"{len(report.problems)} problems" if len(report.problems) > 1 else "".join(report.problems)
    except Skip as reason:
        status, why = "skipped", str(reason)
    except Exception as error:
        status, why = "failed", f"{type(error).__name__}: {error}".partition("\n")[0]
        trace = "".join(traceback.format_exception(error)[-12:])
    found = {"name": part.name, "status": status, "why": why, "seconds": time.monotonic() - begin}
    return found | report.as_dict() | ({"traceback": trace} if trace else {})
