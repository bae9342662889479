"""Jobs whose memory is watched: mpishard under the launcher of this Python's MPI, FSDP2 as plain processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check.ranks import OPEN_MPI, launcher

from measure.process import Rank, read_marks
from mpishard.models.gpt2 import Gpt2

__all__ = ["JobError", "environment", "fsdp2", "ours", "run"]

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 900.0  # seconds for one job


class JobError(Exception):
    """A job did not come to its end; the message ends with what it printed last."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a rank: this repository's modules first, one thread, what Open MPI wants to be told."""
    paths = [str(ROOT), str(ROOT / "scripts" / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = {"HOME": tempfile.gettempdir(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **OPEN_MPI}
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def ours(ranks: int, sizes: Gpt2, steps: int, micro_batch: int, options: dict[str, Any]) -> list[Rank]:
    """Train with mpishard; ``options`` are those of ``full_shard``.

    Raises:
        JobError: no launcher is found, or the job failed.
    """
    words = launcher()
    if not words:
        raise JobError("no mpiexec is on the path; set MPISHARD_LAUNCHER to what starts ranks")
    return _run([[*words, "-n", str(ranks)]], [{}], "ours", ranks, sizes, steps, micro_batch, options)


def fsdp2(ranks: int, sizes: Gpt2, steps: int, micro_batch: int) -> list[Rank]:
    """Train with PyTorch's FSDP2.

    Raises:
        JobError: the job failed.
    """
    own = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    return _run([[]] * ranks, own, "fsdp2", ranks, sizes, steps, micro_batch, {})


def _run(
    starts: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    kind: str,
    ranks: int,
    sizes: Gpt2,
    steps: int,
    micro_batch: int,
    options: dict[str, Any],
) -> list[Rank]:
    with tempfile.TemporaryDirectory() as folder:
        task = {"kind": kind, "folder": folder, "sizes": dataclasses.asdict(sizes), "steps": steps}
        task |= {"micro_batch": micro_batch, "options": options}
        python = [sys.executable, "-m", "measure.ranks", json.dumps(task)]
        run([[*start, *python] for start in starts], [environment(**own) for own in environments], Path(folder))
        found = read_marks(Path(folder))
    if len(found) != ranks or any(rank.marks[-1].name != "end" for rank in found):
        hint = f"; is {starts[0][0]} the launcher of its MPI?" if starts[0] else ""
        raise JobError(f"{len(found)} of {ranks} ranks came to their end{hint}")
    return found


def run(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], folder: Path, seconds: float = LIMIT
) -> None:
    """Run processes at once until all have ended; what they print goes to ``folder/log``.

    Raises:
        JobError: one of them failed, or ``seconds`` were over; the others are ended.
    """
    deadline = time.monotonic() + seconds
    log = folder / "log"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("wb") as file:
            for command, env in zip(commands, environments, strict=True):
                processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))
            while True:
                codes = [process.poll() for process in processes]
                if any(codes) or None not in codes:
                    break
                if time.monotonic() > deadline:
                    raise JobError(_told(f"it was not done after {seconds:.0f} s", log))
                time.sleep(0.05)
        if failed := next(filter(None, codes), None):
            raise JobError(_told(f"a process ended with exit code {failed}", log))
    finally:
        for process in processes:
            _end(process)


def _told(problem: str, log: Path) -> str:
    return "\n".join([problem, *log.read_text(errors="replace").strip().splitlines()[-25:]])


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()  # a launcher ends its ranks
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
