"""One rank of a job that is not there: its memory and its time, measured on this machine before anybody queues.

What runs is the rank's own code on its own shards; collectives are answered here, as if every rank had sent what this
one has (:mod:`mpishard.comm.alone`). So bytes and seconds are real, and losses are not.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from mpishard.comm.base import Communicator
from mpishard.data.loader import Batches
from mpishard.errors import ConfigError
from mpishard.optim.rate import WarmupCosine
from mpishard.shard.engine import Engine
from mpishard.shard.results import StepResult
from mpishard.shard.runner import Feed
from mpishard.train.batches import open_training
from mpishard.train.directory import RunDirectory
from mpishard.train.display import compared_table, console, size
from mpishard.train.loop import Reporter
from mpishard.train.prepare import introduce, make_engine, prepare
from mpishard.train.room import check_room
from mpishard.train.sections import Config

__all__ = ["MOST_STEPS", "measure"]

#: Steps that are run at most; the first one also touches memory for the first time.
MOST_STEPS = 3
_NOTE = "collectives were answered by one process: losses mean nothing, and there is no checkpoint"


def measure(config: Config, run_dir: Path, comm: Communicator, *, reporter: Reporter | None = None) -> None:
    """Run a few steps of the rank that ``comm`` plays; print and write what it held and how long it took.

    Nothing is written that could be taken for a run: ``as-rank.json``, and the default corpus where no data are named.

    Args:
        reporter: reports on the memory that was in use at each instruction.

    Raises:
        ConfigError: the settings do not fit the ranks or this machine, or ``run_dir`` holds a run.
    """
    RunDirectory.refuse(run_dir)
    if config.shard.strategy == "hybrid_shard" and not config.shard.group:
        raise ConfigError("shard.group is 0, the ranks of a node, and --as-rank knows no nodes; set shard.group")
    prepared = prepare(config, comm, alone=True)
    check_room(prepared.held, 1, comm.ops, prepared.forecast.host)
    training = open_training(config, run_dir)
    print(
        f"mpishard: rank {comm.rank} of {comm.size}, alone, with the buffers of transport "
        f"{comm.scratch_rule.transport}\n"
        "collectives are answered in this process, as if every rank had sent what this one has, so losses mean "
        "nothing; no checkpoint is written",
        flush=True,
    )
    introduce(config, comm, prepared, f"{len(training.file):,} training tokens")
    before = _resident(anew=True)
    engine = make_engine(config, comm, prepared, ledger=reporter is not None)
    results = _steps(config, engine, training)
    planned, held, peak = prepared.forecast.held, engine.memory(), _resident("VmHWM")
    out = console(launched=False)
    if reporter is None:
        out.print(compared_table(planned, held, f"rank {comm.rank} of {comm.size}"))
    else:
        for part in reporter(run_dir, engine, prepared.forecast):
            out.print(part)
    last = results[1:] or results  # the first step finds memory that nobody has touched yet
    each = sum(result.seconds["total"] for result in last) / len(last)
    answering = sum(result.seconds["communicating"] for result in last) / len(last)
    print(f"{each:.3f} s a step, {answering:.3f} s of them for answering collectives (mean of {len(last)})", flush=True)
    if comm.ops.device == "cpu":
        print(
            f"this process held {size(peak)} at its peak, {size(peak - before)} more than before it took its memory; "
            f"{size(prepared.held)} were planned",
            flush=True,
        )
    record = {
        "note": _NOTE,
        "rank": comm.rank,
        "ranks": comm.size,
        "seconds": [result.seconds for result in results],
        "bytes": held,
        "bytes_planned": planned,
        "resident_before": before,
        "resident_peak": peak,
    }
    (run_dir / "as-rank.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _steps(config: Config, engine: Engine, training: Batches) -> list[StepResult]:
    """Train a few steps, and say how long each took."""
    train, optim = config.train, config.optim
    rate = WarmupCosine(optim.lr, optim.lr_min, optim.warmup, train.steps)
    results: list[StepResult] = []
    steps = min(train.steps, MOST_STEPS)
    for step in range(steps):
        if not training.sampler.has_step(step):
            break
        result = engine.step(_feed(training, step), lr=rate(step))
        skipped = "" if result.updated else "; the update was skipped, and its time is not in"
        print(f"step {step + 1}/{steps}  {result.seconds['total']:.3f} s{skipped}", flush=True)
        results.append(result)
    return results


def _feed(batches: Batches, step: int) -> Feed:
    return lambda micro, inputs, targets: batches.read(step, micro, inputs, targets)


def _resident(field: str = "VmRSS", *, anew: bool = False) -> int:
    """Bytes of this process in memory now, or at most so far (``VmHWM``); ``anew`` forgets what was most."""
    if anew:
        with contextlib.suppress(OSError):  # not every system offers it
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
