"""Collectives of the MPI library, of ``mpi`` and ``node``, and of PyTorch's gloo, in turn in one job of this host."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gpu_check.ranks import launcher

from measure.jobs import environment
from measure.table import rows
from mpishard.array.numpy_ops import NumpyOps
from mpishard.bench.collectives import Ask, Sweep
from mpishard.bench.rows import Row, document
from mpishard.bench.sizes import nbytes, readable, sweep
from mpishard.bench.statistics import OPS
from mpishard.bench.subjects import Message, Subject
from mpishard.bench.variants import Variant
from mpishard.errors import ConfigError

__all__ = ["main"]

GLOO = Variant("gloo")
VARIANTS = (Variant("mpi", "native"), Variant("mpi"), Variant("node"), GLOO)
LIMIT = 1800.0  # seconds for the job


class _Gloo(Message):
    """A collective of torch.distributed on tensors that share the memory of our arrays."""

    def __init__(self, *arguments: Any) -> None:
        import torch

        super().__init__(*arguments, ordered=False)
        self._in, self._out = torch.from_numpy(self.source), torch.from_numpy(self.out)

    def run(self) -> None:
        """Call it, blocking."""
        from torch import distributed

        # PyTorch 2.13 has new names for both
        if self.op == "all_gather":
            getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)(self._out, self._in)
        elif self.op == "reduce_scatter":
            getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)(self._out, self._in)
        else:
            # There is no all-reduce but in place: a copy into it is in the time, as MPI_Allreduce's is.
            np.copyto(self.out, self.source)
            distributed.all_reduce(self._out)


class _Sweep(Sweep):
    def subject(self, op: str, variant: Variant, count: int, dtype: str) -> Subject:
        """Return gloo's, or ours."""
        if variant != GLOO:
            return super().subject(op, variant, count, dtype)
        return _Gloo(op, self.memories["gloo"], self.comms[variant], count, np.dtype(np.float32))


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        sizes = sweep(nbytes("--min", options.min), nbytes("--max", options.max), options.factor)
    except ConfigError as error:
        print(f"compare_gloo: {error}", file=sys.stderr)
        return 2
    if options.folder:
        return _rank(sizes, options)
    if importlib.util.find_spec("torch") is None:
        print("compare_gloo: PyTorch is not installed; pip install 'mpishard[parity]'", file=sys.stderr)
        return 2
    words = launcher()
    if not words:
        print("compare_gloo: no mpiexec is on the path; set MPISHARD_LAUNCHER to what starts ranks", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(__file__).parents[2] / "compare_gloo")
        command = [*words, "-n", str(options.ranks), sys.executable, program, *arguments, "--folder", folder]
        # gloo connects over the address of the host's name, which may have none
        return subprocess.run(command, env=environment(GLOO_SOCKET_IFNAME="lo"), timeout=LIMIT, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare_gloo",
        description="Time fp32 collectives of the MPI library, of mpishard's transports mpi and node, and of PyTorch's "
        "gloo over 127.0.0.1, in turn in one job of this host, and check every result.",
        epilog="Exit code: 0 all results were right, 1 one was wrong, 2 it could not run.",
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the job (2)")
    parser.add_argument("--min", default="1MiB", metavar="SIZE", help="the smallest message (1MiB)")
    parser.add_argument("--max", default="64MiB", metavar="SIZE", help="the largest message (64MiB)")
    parser.add_argument("--factor", type=int, default=4, metavar="N", help="from one size to the next (4)")
    parser.add_argument("--seconds", type=float, default=0.5, metavar="S", help="of samples for each row (0.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all figures, as mpishard bench writes them")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # where the ranks of gloo meet
    return parser


def _rank(sizes: tuple[int, ...], options: argparse.Namespace) -> int:
    """Be one rank."""
    from mpi4py import MPI

    from mpishard.bench.host import described
    from mpishard.comm.launch import install_abort_hook
    from mpishard.comm.library_calls import LibraryCalls

    calls = LibraryCalls()
    comms = {variant: calls.connect(NumpyOps(), variant.transport) for variant in VARIANTS if variant != GLOO}
    comms[GLOO] = comms[Variant("mpi")]
    install_abort_hook(comms[GLOO])
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    store = distributed.FileStore(f"{options.folder}/meeting", calls.size)
    distributed.init_process_group("gloo", store=store, rank=calls.rank, world_size=calls.size)
    ask = Ask(OPS, ("fp32",), sizes, VARIANTS, GLOO, options.seconds)
    found = _Sweep(ask, comms, calls, calls).run()
    host = described(comms[GLOO], calls.name, {variant.name: one for variant, one in comms.items() if variant != GLOO})
    distributed.destroy_process_group()
    if calls.rank == 0:
        print(report(found, f"{calls.name}, PyTorch {torch.__version__} gloo, {calls.size} ranks"))
        if options.json:
            options.json.write_text(json.dumps(document(host, found), indent=1) + "\n", encoding="utf-8")
    MPI.COMM_WORLD.Barrier()
    return int(not all(row.correct for row in found))


def report(found: Sequence[Row], title: str) -> str:
    """Return a line for each operation and size: the medians in ms, and how many times as fast as gloo each is."""
    names = [variant.name for variant in VARIANTS]
    by_size: dict[tuple[str, int], dict[str, Row]] = {}
    for row in found:
        by_size.setdefault((row.op, row.bytes), {})[row.name] = row
    head = ["", "bytes", *(f"{name} ms" for name in names), *(f"{name}/gloo" for name in names[:-1]), "node/native"]
    lines: list[list[object]] = []
    for (op, size), each in by_size.items():
        ratios: list[object] = [each["gloo"].seconds / each[name].seconds for name in names[:-1]]
        ratios.append(each["mpi:native"].seconds / each["node"].seconds)
        wrong = "" if all(row.correct for row in each.values()) else " WRONG"
        lines.append([op + wrong, readable(size), *(each[name].seconds * 1e3 for name in names), *ratios])
    return f"{title}\nmedian ms, and speed relative to gloo (above 1: faster)\n{rows(head, lines)}"
