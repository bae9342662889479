"""Fifty steps on the GPU beside the same steps on the CPU, and the same bits in a second run."""

from __future__ import annotations

from gpu_check import tiny
from gpu_check.report import Report, Task
from mpishard.array.cupy_ops import CupyOps
from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator

__all__ = ["check"]

#: Relative, of the losses of every step
BOUND = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}


def check(task: Task, report: Report) -> None:
    steps, sizes = task.size(50, 3), tiny.sizes_of(task.small)
    table = report.table(
        f"{steps} steps of a GPT-2 of {sizes.layers} blocks and {sizes.width} features beside the CPU's",
        *("type", "first loss", "last loss", "CPU's last loss", "largest difference", "bound", "same bits again"),
        note="Difference: relative, the largest of all steps. Same bits: losses, parameters and AdamW's states of a "
        "second run.",
    )
    for kind, bound in BOUND.items():
        backends = (CupyOps(task.device), CupyOps(task.device), NumpyOps())
        first, again, host = (tiny.run(ops, LocalCommunicator(ops), kind, steps, task.small) for ops in backends)
        apart = max(abs(a - b) / abs(b) for a, b in zip(first.losses, host.losses))
        same = first == again
        table.row(kind, first.losses[0], first.losses[-1], host.losses[-1], apart, bound, same)
        learned = first.losses[-1] < first.losses[0] or task.small
        report.require(learned, f"{kind}: the loss went from {first.losses[0]:.4g} to {first.losses[-1]:.4g}")
        report.require(apart <= bound, f"{kind}: a loss is {apart:.2e} from the CPU's, more than {bound:g}")
        report.require(same, f"{kind}: two runs end with the checksums {first.checksum} and {again.checksum}")
        report.figures[kind] = {"largest difference": apart, "checksum": first.checksum}
