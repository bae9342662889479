"""The training run, from a configuration to its report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from mpishard.array.arena import CATEGORIES
from mpishard.array.dtypes import Array
from mpishard.data.loader import Batches
from mpishard.data.tokenizer import ByteTokenizer
from mpishard.optim.rate import WarmupCosine
from mpishard.shard.engine import Engine
from mpishard.shard.forecast import Forecast
from mpishard.shard.results import Evaluation, StepResult
from mpishard.shard.runner import Feed
from mpishard.train.curve import Curve
from mpishard.train.directory import RunDirectory
from mpishard.train.display import console, curve_table, memory_table, power, progress_line, size
from mpishard.train.keeper import Keeper
from mpishard.train.overlap import Overlap
from mpishard.train.prepare import Prepared
from mpishard.train.sample import sample
from mpishard.train.sections import Config

__all__ = ["Reporter", "Run", "Stopper"]

#: says why the run should end at the next step boundary, or ""
Stopper = Callable[[], str]
#: writes a memory report into a folder (rank 0's; None on the others) and returns what is to be printed; collective
Reporter = Callable[["Path | None", Engine, Forecast], "Sequence[Table | str]"]


@dataclass
class Run:
    """One run: everything it needs, made and agreed by all ranks.

    Attributes:
        prepared: what it is made of, and the memory plan.
        reporter: makes the memory report, where one was asked for.
        directory: rank 0's; None on the others.
        stopper: this rank's wish to end.
    """

    config: Config
    engine: Engine
    training: Batches
    heldout: Batches
    prepared: Prepared
    directory: RunDirectory | None
    keeper: Keeper
    stopper: Stopper
    at_step: Callable[[int], None]
    reporter: Reporter | None = None

    def __post_init__(self) -> None:
        self.comm = self.engine.comm
        self.curve = Curve(max(1, self.config.train.steps // 12))
        self.overlap = Overlap.of(self.engine)
        #: updates that were skipped before this run, which goes on; for a loss scale that it may not have
        self._skipped = self.engine.steps - self.engine.updates

    def train(self) -> None:
        """Step until the steps or the data end, or some rank is told to stop; then save and report. Collective.

        Raises:
            CheckpointError: on all ranks, when a checkpoint cannot be written.
        """
        train, first = self.config.train, self.engine.steps
        rate = WarmupCosine(self.config.optim.lr, self.config.optim.lr_min, self.config.optim.warmup, train.steps)
        if self.directory:
            print(f"run directory: {self.directory.path}", flush=True)
        self._look_back()
        last_line = began = time.perf_counter()
        heldout: Evaluation | None = None
        tokens = spent = 0.0
        for step in range(first, train.steps):
            self.at_step(step)
            more = step + 1 < train.steps and self.training.sampler.has_step(step + 1)
            result = self.engine.step(
                self._feed(self.training, step), lr=rate(step), more=more, stop=lambda: bool(self.stopper())
            )
            tokens += result.tokens
            spent += result.seconds["total"]
            self.overlap.add(result.seconds)
            ended = not result.more
            stopped = result.stop and not ended
            heldout = None
            # A run that is told to stop may have little time left: it saves, and measures nothing.
            if ended or (self._measures(step + 1) and not stopped):
                heldout = self.evaluate()
            self.curve.add(step + 1, result.loss, heldout.loss if heldout else None, last=ended)
            self._record(result, heldout)
            now = time.perf_counter()
            ends = stopped or ended
            if self.directory and (ends or step == first or (step + 1) % train.log_every == 0 or now - last_line > 10):
                left = (now - began) / (step + 1 - first) * (train.steps - step - 1)
                held = sum(self.engine.memory().values())
                hidden = result.hidden if self.comm.size > 1 else None
                print(progress_line(result, train.steps, tokens / spent, held, left, self._scale(), hidden), flush=True)
                last_line = now
            if self.keeper.due(step + 1, stopped=stopped, ended=ended):
                self._save()
            if stopped:
                self._stop()
                return
            if ended:
                break
        if self.directory and self.engine.steps < train.steps:
            print(f"the training data ended after {self.engine.steps} of {train.steps} steps", flush=True)
        self._finish(heldout, time.perf_counter() - began, tokens / spent)

    def _measures(self, steps: int) -> bool:
        every = self.config.train.heldout_every
        return every > 0 and steps % every == 0

    def _look_back(self) -> None:
        """Take up the curve where the run was stopped; measure what it had no time to measure. Collective."""
        past = list(self.directory.history()) if self.directory is not None else []
        due = bool(past) and self._measures(self.engine.steps) and "heldout_loss" not in past[-1]
        if any(record[0] for record in self.comm.exchange(bytes([due]), "what a run owes")):
            loss = self.evaluate().loss
            if self.directory is not None:
                self.directory.amend("heldout_loss", loss)
                past = list(self.directory.history())
        for record in past:
            self.curve.replay(record)

    def evaluate(self) -> Evaluation:
        """Held-out loss over the same batches each time."""
        steps = self.heldout.sampler.steps or 0
        parts = [
            self.engine.evaluate(self._feed(self.heldout, step))
            for step in range(min(self.config.train.heldout_batches, steps))
        ]
        return Evaluation(sum(part.total for part in parts), sum(part.tokens for part in parts))

    @staticmethod
    def _feed(batches: Batches, step: int) -> Feed:
        def feed(micro: int, inputs: Array, targets: Array) -> None:
            batches.read(step, micro, inputs, targets)

        return feed

    def _record(self, result: StepResult, heldout: Evaluation | None) -> None:
        if self.directory is None:
            return
        seconds = result.seconds
        record: dict[str, Any] = {
            "step": result.step,
            "loss": result.loss,
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / seconds["total"],
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "updated": result.updated,
            "bytes": self.engine.memory(),
            "seconds": seconds,
        }
        if self.comm.size > 1:
            record["hidden"] = result.hidden
        if self.engine.loss_scale is not None:
            record["loss_scale"] = result.loss_scale
        if heldout is not None:
            record["heldout_loss"] = heldout.loss
        self.directory.write(record)

    def _scale(self) -> float | None:
        """The loss scale of the next step, where the loss is scaled."""
        return self.engine.loss_scale.scale if self.engine.loss_scale is not None else None

    def _save(self) -> None:
        path = self.keeper.save()
        if self.directory:
            held = sum(file.stat().st_size for file in path.iterdir())
            print(f"checkpoint: {path} ({size(held)} in {self.keeper.seconds:.1f} s)", flush=True)

    def _stop(self) -> None:
        """Say, on rank 0, which rank was told to stop and how to go on. Collective."""
        records = self.comm.exchange(self.stopper().encode().ljust(32, b"\0"), "the reason to stop")
        told = [record.rstrip(b"\0").decode() for record in records]
        if self.directory is None:
            return
        rank = next(rank for rank, name in enumerate(told) if name)
        text = (
            f"stopped by {told[rank]} (rank {rank}) after step {self.engine.steps} of {self.config.train.steps}; "
            f"go on with: mpishard train --resume {self.directory.path}"
        )
        self.directory.stopped(text)
        print(text, flush=True)

    def _finish(self, heldout: Evaluation | None, seconds: float, rate: float) -> None:
        """Report: curve, held-out loss, memory, text, checksum. Collective."""
        held = self.engine.memory()
        mine = b"".join(held[name].to_bytes(8, "little") for name in CATEGORIES)
        ranks = [
            {name: int.from_bytes(record[8 * i : 8 * i + 8], "little") for i, name in enumerate(CATEGORIES)}
            for record in self.comm.exchange(mine, "memory of each rank")
        ]
        checksum = self.engine.checksum()
        text = self._sample()
        loss = heldout.loss if heldout else float("nan")
        if self.directory is not None:
            self.directory.report(
                {
                    "steps": self.engine.steps,
                    "updates": self.engine.updates,
                    "heldout_loss": loss,
                    "checksum": checksum,
                    "tokens_per_s": rate,
                    "seconds": seconds,
                    "curve": self.curve.points,
                    "communication": self.overlap.record() if self.comm.size > 1 else None,
                    "bytes": ranks,
                    "bytes_unsharded": self.prepared.unsharded,
                    "checkpoint": str(self.keeper.last) if self.keeper.last else None,
                    "sample": text,
                }
            )
        folder = self.directory.path if self.directory is not None else None
        # After the run's own report, which is there also where this one cannot be written.
        memory = self.reporter(folder, self.engine, self.prepared.forecast) if self.reporter is not None else ()
        if self.directory is None:
            return
        out = console(launched=self.comm.size > 1)
        out.print()
        out.print(curve_table(self.curve.points))
        out.print(memory_table(ranks, self.prepared.unsharded, self.config.shard.strategy))
        for part in memory:
            out.print(part)
        if text is not None:
            out.rule("sample", align="left")
            out.print(text, markup=False)
            out.rule()
        if self.comm.size > 1:
            print(self.overlap.told(), flush=True)
        print(
            f"steps {self.engine.steps}, {rate:.0f} tokens/s, {seconds:.1f} s\n"
            f"held-out loss {loss:.4f} nats a token over {heldout.tokens if heldout else 0} tokens\n"
            f"checksum {checksum} (parameters and moments)",
            flush=True,
        )
        self._tell_skipped(loss)

    def _tell_skipped(self, loss: float) -> None:
        """Say what updates that were skipped mean: where the loss is scaled some belong to it."""
        skipped, scale = self.engine.steps - self.engine.updates, self.engine.loss_scale
        if not math.isfinite(loss) or (skipped > self._skipped and scale is None):
            print(f"the run diverged ({skipped} updates skipped); try a lower optim.lr or a longer optim.warmup")
        elif skipped and scale is not None:
            advice = ""
            if not scale.dynamic:
                advice = '; try precision.loss_scale = "dynamic", or a smaller precision.scale'
            elif skipped > self.engine.steps / 2:
                advice = "; begin with a smaller precision.scale"
            print(f"{skipped} updates were skipped for the loss scale, which is {power(scale.scale)} now{advice}")

    def _sample(self) -> str | None:
        """Text after a line break, where tokens are bytes and some were asked for."""
        count = self.config.train.sample
        if not count or self.config.model.vocabulary != 256:
            return None
        tokenizer = ByteTokenizer()
        prompt = tokenizer.encode("\ndef ").tolist()
        return tokenizer.decode(np.array(sample(self.engine, prompt, count, seed=self.config.train.seed)))
