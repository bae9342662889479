"""What this GPU gives at best: bytes copied and matrix products a second. All other figures are fractions of these."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_check.arrays import Clock, device_array
from gpu_check.report import Report, Task
from mpishard.array.cupy_ops import CupyOps
from mpishard.array.dtypes import DTYPES

__all__ = ["PEAKS", "check", "copy_bandwidth", "matrix_rate", "normal_values", "peak", "rates"]

#: Multiply-adds count as two: (dense bfloat16 or float16 with fp32 sums, fp32 without tensor cores) in 10**12 a second,
#: by the vendor's data sheets. The longest name that begins the device's is taken.
PEAKS = {
    "NVIDIA A100": (312.0, 19.5),
    "NVIDIA B200": (2250.0, 75.0),
    "NVIDIA GH200": (989.4, 66.9),
    "NVIDIA H100": (989.4, 66.9),
    "NVIDIA H100 NVL": (835.5, 60.0),
    "NVIDIA H100 PCIe": (756.0, 51.2),
    "NVIDIA H200": (989.4, 66.9),
    "NVIDIA H200 NVL": (835.5, 60.0),
    "NVIDIA L4": (121.0, 30.3),
    "NVIDIA L40S": (362.0, 91.6),
}
KINDS = ("bfloat16", "float16", "float32")


def peak(name: str, kind: str) -> float | None:
    """Return the vendor's peak in operations a second; None for a device that is not in the table."""
    known = max((n for n in PEAKS if name == n or name.startswith((f"{n} ", f"{n}-"))), key=len, default=None)
    return None if known is None else PEAKS[known][kind == "float32"] * 1e12


def normal_values(count: int = 1 << 16) -> np.ndarray:
    """Return numbers to fill arrays with: of zeros, products take less power and so less time."""
    return np.random.default_rng(3).standard_normal(count).astype(np.float32)


def copy_bandwidth(ops: Any, nbytes: int) -> float:
    """Return bytes a second, read and written, of a copy within the GPU's memory."""
    x, y = (device_array(ops, (nbytes // 4,), np.float32, normal_values()) for _ in range(2))
    return 2 * x.nbytes / Clock(ops).best(lambda: ops.copy(x, y), 10, 5)


def matrix_rate(ops: Any, kind: str, size: int) -> float:
    """Return operations a second of a product of two square matrices."""
    a, b, out = (device_array(ops, (size, size), DTYPES[kind], normal_values(65521)) for _ in range(3))
    return 2 * size**3 / Clock(ops).best(lambda: ops.matmul(a, b, out), 2 if kind == "float32" else 10, 4)


def rates(task: Task, ops: Any) -> dict[str, float]:
    """Return ``copy`` in bytes, and by type the matrix operations a second: those of this run, or measured now."""
    if "copy" in task.known.get("rates", {}):
        return task.known["rates"]
    room = ops.room
    nbytes = task.size(2**30 if room > 6 * 2**30 else room // 8 // 256 * 256, 2**18)
    size = task.size(8192, 64)
    return {"copy": copy_bandwidth(ops, nbytes)} | {kind: matrix_rate(ops, kind, size) for kind in KINDS}


def check(task: Task, report: Report) -> None:
    ops = CupyOps(task.device)
    report.figures.update(found := rates(task, ops))
    table = report.table(
        "What the GPU gives at best",
        *("what", "measured", "unit", "vendor's peak", "fraction"),
        note="A copy of 1 GiB within the GPU's memory, bytes read and written. Products of 8192 x 8192 matrices of "
        "normal numbers by cuBLAS, float32 without TF32. The best of some runs. Peaks: data sheets, dense.",
    )
    table.row("copy", found["copy"] / 1e9, "GB/s", None, None)
    for kind in KINDS:
        most = peak(ops.gpu.name, kind)
        row = (None, None) if most is None else (most / 1e12, found[kind] / most)
        table.row(f"matrix product {kind}", found[kind] / 1e12, "TFLOP/s", *row)
