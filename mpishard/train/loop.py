"""The training run, from a configuration to its report."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.array.arena import CATEGORIES
from mpishard.array.dtypes import Array
from mpishard.comm.base import Communicator
from mpishard.comm.together import on_rank_zero, same_on_all_ranks, together
from mpishard.data.corpus import ensure_default_corpus
from mpishard.data.loader import Batches
from mpishard.data.tokenizer import ByteTokenizer
from mpishard.errors import ConfigError
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.nn.model import Model
from mpishard.optim.adamw import AdamW
from mpishard.optim.rate import WarmupCosine
from mpishard.shard.engine import Engine
from mpishard.shard.results import Evaluation, StepResult
from mpishard.shard.runner import Feed
from mpishard.shard.schedule import Settings
from mpishard.train.config import Config, ModelConfig, check_ranks, dump_toml
from mpishard.train.display import console, curve_table, memory_table, progress_line, size
from mpishard.train.metrics import RunDirectory
from mpishard.train.room import LESS, check_room, planned_memory, thread_warning
from mpishard.train.sample import sample

__all__ = ["build_model", "run"]


def build_model(config: ModelConfig) -> Model:
    """Return the model that a configuration describes."""
    return gpt2(
        Gpt2(
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            sequence=config.sequence,
            vocabulary=config.vocabulary,
            dropout=config.dropout,
            gelu_tanh=config.gelu == "tanh",
            attention_block=config.attention_block,
            head_chunk=config.head_chunk,
            std=config.init_std,
        )
    )


def run(config: Config, run_dir: Path, comm: Communicator) -> int:
    """Train, report, and return the exit code. Collective.

    Raises:
        ConfigError: on all ranks, for what the user can mend; nothing that was there is changed.
    """
    check_ranks(config, comm.size)
    on_rank_zero(comm, lambda: RunDirectory.refuse(run_dir))
    training, heldout = _open_data(config, run_dir, comm)
    optim, train = config.optim, config.train
    model = build_model(config.model)
    optimizer = AdamW(optim.beta1, optim.beta2, optim.eps, optim.decay, optim.clip)
    settings = Settings(config.shard.strategy, config.shard.prefetch, config.shard.recompute)

    def plan(settings: Settings) -> dict[str, int]:
        return planned_memory(model, comm, optimizer, settings, train.micro_batch)

    held = together(comm, lambda: plan(settings))
    together(comm, lambda: check_room(sum(held.values()), comm.node.local_size))
    unsharded = together(comm, lambda: plan(replace(settings, strategy="no_shard")))
    if comm.rank == 0:
        _introduce(config, comm, model, training, heldout, (held, unsharded))
    try:
        engine = Engine(
            model,
            comm,
            comm.ops,
            optimizer,
            settings,
            micro_batch=train.micro_batch,
            global_batch=train.global_batch,
            seed=train.seed,
            poison=config.debug.poison,
        )
    except MemoryError:
        # One rank may fail alone, and the others would wait for it.
        comm.abort(f"mpishard: rank {comm.rank} cannot get the {size(sum(held.values()))} that it needs; {LESS}", 2)
        raise
    # Nothing is written for a run that cannot start.
    directory = on_rank_zero(comm, lambda: RunDirectory(run_dir, dump_toml(config)))
    session = _Run(config, comm, engine, training, heldout, unsharded, directory)
    try:
        if directory is None:
            session.train()
        else:
            with directory:
                session.train()
    except (ConfigError, OSError) as error:
        # One rank has found this, in the middle of a step or while it wrote: the others wait in a collective.
        if isinstance(error, BrokenPipeError):
            raise
        comm.abort(f"mpishard: {_line(error)}", 2)
    return 0


def _line(error: ConfigError | OSError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    where = error.filename or "the run's output"
    return f"{where}: cannot be written ({error.strerror}); make room, or choose another --run-dir"


def _introduce(
    config: Config,
    comm: Communicator,
    model: Model,
    training: Batches,
    heldout: Batches,
    planned: tuple[dict[str, int], dict[str, int]],
) -> None:
    """Say what is about to be trained, before any memory is taken for it."""
    shard, (held, unsharded) = config.shard, planned
    print(
        f"mpishard: {model.parameters:,} parameters, {comm.size} rank{'s' if comm.size > 1 else ''} "
        f"({comm.transport}), {shard.strategy}, prefetch {shard.prefetch}, recompute {shard.recompute}\n"
        f"data: {len(training.file):,} training and {len(heldout.file):,} held-out tokens; "
        f"memory: {size(sum(held.values()))} a rank, {size(sum(unsharded.values()))} unsharded",
        flush=True,
    )
    if warning := thread_warning(comm.node.local_size):
        print(f"mpishard: warning: {warning}", file=sys.stderr, flush=True)


def _open_data(config: Config, run_dir: Path, comm: Communicator) -> tuple[Batches, Batches]:
    """Open and check the token files; make the default corpus where none are named."""
    paths = Path(config.data.train), Path(config.data.heldout)
    if not config.data.train:
        folder = run_dir / "corpus"
        on_rank_zero(comm, lambda: ensure_default_corpus(folder))
        paths = folder / "train.tokens", folder / "heldout.tokens"
    common: dict[str, int] = {"global_batch": config.train.global_batch, "micro_batch": config.train.micro_batch}
    shape = config.model.sequence, config.model.vocabulary

    def open_both() -> tuple[Batches, Batches]:
        seed = config.train.seed
        both = (
            Batches.open(paths[0], *shape, **common, seed=seed, epochs=config.data.epochs),
            Batches.open(paths[1], *shape, **common, seed=0, epochs=1),
        )
        if comm.node.local_rank == 0:  # the file may be another one on each node
            for batches in both:
                batches.file.verify()
        return both

    opened = together(comm, open_both)
    names = ("training", "held-out")
    same_on_all_ranks(comm, [f"{name} file {b.file.identity.hex()}" for name, b in zip(names, opened, strict=True)])
    return opened


@dataclass
class _Run:
    config: Config
    comm: Communicator
    engine: Engine
    training: Batches
    heldout: Batches
    unsharded: dict[str, int]
    #: rank 0's; None on the others
    directory: RunDirectory | None
    #: (step, mean training loss since the last point, held-out loss) of the curve
    points: list[tuple[int, float, float | None]] = field(default_factory=list)

    def train(self) -> None:
        """Step until the steps or the data end, then report."""
        train = self.config.train
        rate = WarmupCosine(self.config.optim.lr, self.config.optim.lr_min, self.config.optim.warmup, train.steps)
        if self.directory:
            print(f"run directory: {self.directory.path}", flush=True)
        began = time.perf_counter()
        spacing = max(1, train.steps // 12)
        recent: list[float] = []
        heldout: Evaluation | None = None
        last_line = began
        tokens = spent = 0.0
        for step in range(train.steps):
            more = step + 1 < train.steps and self.training.sampler.has_step(step + 1)
            result = self.engine.step(self._feed(self.training, step), lr=rate(step), more=more)
            recent.append(result.loss)
            tokens += result.tokens
            spent += result.seconds["total"]
            ends = result.stop or not result.more
            heldout = None
            if ends or (train.heldout_every and (step + 1) % train.heldout_every == 0):
                heldout = self.evaluate()
            if ends or heldout or (step + 1) % spacing == 0:
                self.points.append((step + 1, sum(recent) / len(recent), heldout.loss if heldout else None))
                recent = []
            self._record(result, heldout)
            now = time.perf_counter()
            if self.directory and (ends or step == 0 or (step + 1) % train.log_every == 0 or now - last_line > 10):
                left = (now - began) / (step + 1) * (train.steps - step - 1)
                held = sum(self.engine.memory().values())
                print(progress_line(result, train.steps, tokens / spent, held, left), flush=True)
                last_line = now
            if ends:
                break
        if self.directory and self.engine.steps < train.steps:
            print(f"the training data ended after {self.engine.steps} of {train.steps} steps", flush=True)
        self._finish(heldout, time.perf_counter() - began, tokens / spent)

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
        if heldout is not None:
            record["heldout_loss"] = heldout.loss
        self.directory.write(record)

    def _finish(self, heldout: Evaluation | None, seconds: float, rate: float) -> None:
        """Report: curve, held-out loss, memory, text, checksum. Collective."""
        held = self.engine.memory()
        mine = b"".join(held[name].to_bytes(8, "little") for name in CATEGORIES)
        ranks = [
            {name: int.from_bytes(record[8 * i : 8 * i + 8], "little") for i, name in enumerate(CATEGORIES)}
            for record in self.comm.exchange(mine)
        ]
        checksum = self.engine.checksum()
        text = self._sample()
        if self.directory is None:
            return
        loss = heldout.loss if heldout else float("nan")
        self.directory.report(
            {
                "steps": self.engine.steps,
                "updates": self.engine.updates,
                "heldout_loss": loss,
                "checksum": checksum,
                "tokens_per_s": rate,
                "seconds": seconds,
                "curve": self.points,
                "bytes": ranks,
                "bytes_unsharded": self.unsharded,
                "sample": text,
            }
        )
        out = console(launched=self.comm.size > 1)
        out.print()
        out.print(curve_table(self.points))
        out.print(memory_table(ranks, self.unsharded, self.config.shard.strategy))
        if text is not None:
            out.rule("sample", align="left")
            out.print(text, markup=False)
            out.rule()
        print(
            f"steps {self.engine.steps}, {rate:.0f} tokens/s, {seconds:.1f} s\n"
            f"held-out loss {loss:.4f} nats a token over {heldout.tokens if heldout else 0} tokens\n"
            f"checksum {checksum} (parameters and moments)",
            flush=True,
        )
        if not math.isfinite(loss) or self.engine.updates < self.engine.steps:
            skipped = self.engine.steps - self.engine.updates
            print(f"the run diverged ({skipped} updates skipped); try a lower optim.lr or a longer optim.warmup")

    def _sample(self) -> str | None:
        """Text after a line break, where tokens are bytes and some were asked for."""
        count = self.config.train.sample
        if not count or self.config.model.vocabulary != 256:
            return None
        tokenizer = ByteTokenizer()
        prompt = tokenizer.encode("\ndef ").tolist()
        return tokenizer.decode(np.array(sample(self.engine, prompt, count, seed=self.config.train.seed)))
