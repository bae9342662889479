"""NCCL: on one rank its own calls and training over it; on as many ranks as there are GPUs, as threads."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from gpu_check import tiny
from gpu_check.arrays import device_array
from gpu_check.report import Report, Skip, Task
from mpishard.array.cupy_ops import CupyOps
from mpishard.comm.local import LocalCommunicator

__all__ = ["check", "load_nccl"]


def load_nccl() -> tuple[Any, str]:
    """Return (CuPy's module, NCCL's version), or (None, "") where the library is not found."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of what is not there
        try:
            from cupy.cuda import nccl
        except ImportError:
            return None, ""
        if not nccl.available:
            return None, ""
    version = nccl.get_version()
    return nccl, f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def check(task: Task, report: Report) -> None:
    nccl, version = load_nccl()
    if nccl is None:
        raise Skip("CuPy finds no NCCL; pip install nvidia-nccl-cu12 (cu13 for CUDA 13)")
    report.notes.append(f"NCCL {version}")
    ops = CupyOps(task.device)
    _own_calls(nccl, ops, report)
    _training(task, ops, report)


def _own_calls(nccl: Any, ops: Any, report: Report) -> None:
    """The calls that the transport makes, with one rank, each twice; a rank sends to itself inside a group."""
    ops.gpu.use()
    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    count, stream = 1000, ops.stream.ptr
    values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    source = device_array(ops, (count,), np.float32, values)
    ends, kind, sum_ = (source.data.ptr,), 7, 0  # ncclFloat32, ncclSum

    def alone(target: int) -> None:
        nccl.groupStart()
        comm.send(*ends, count, kind, 0, stream)
        comm.recv(target, count, kind, 0, stream)
        nccl.groupEnd()

    calls = {
        "allGather": lambda to: comm.allGather(*ends, to, count, kind, stream),
        "broadcast": lambda to: comm.broadcast(*ends, to, count, kind, 0, stream),
        "reduceScatter": lambda to: comm.reduceScatter(*ends, to, count, kind, sum_, stream),
        "send and recv": alone,
    }
    for name, call in calls.items():
        for _ in range(2):
            target = device_array(ops, (count,), np.float32, np.full(1, np.nan, np.float32))
            call(target.data.ptr)
            report.require(ops.fetch(target).tobytes() == values.tobytes(), f"NCCL's {name} gives other values")
    comm.destroy()


def _training(task: Task, ops: Any, report: Report) -> None:
    from cupy.cuda import runtime

    from mpishard.comm.nccl import NcclCommunicator
    from mpishard.comm.threads import run as run_threads

    steps = task.size(10, 2)
    kinds = ("float32", "bfloat16", "float16")
    wanted = {kind: tiny.run(ops, LocalCommunicator(ops), kind, steps, task.small) for kind in kinds}
    table = report.table(f"{steps} steps over NCCL", "ranks", "type", "last loss", "same bits as one rank without")
    gpus = runtime.getDeviceCount()
    for ranks in [1] + [n for n in (4, 2) if n <= gpus][:1]:

        def main(control: Any, ranks: int = ranks) -> dict[str, tiny.Run]:
            mine = CupyOps((task.device + control.rank) % gpus)
            mine.gpu.use()
            comm = NcclCommunicator(control, mine)
            found = {kind: tiny.run(mine, comm, kind, steps, task.small) for kind in wanted}
            comm.close()
            return found

        results = run_threads(ranks, main)
        for kind, want in wanted.items():
            same = all(result[kind] == want for result in results)
            table.row(ranks, kind, results[0][kind].losses[-1], same)
            report.require(same, f"{ranks} ranks over NCCL, {kind}: other bits than one rank without it")
    if gpus == 1:
        report.notes.append("One GPU is there; NCCL between GPUs was not run.")
