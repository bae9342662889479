"""The engine: one rank's share of a model, and the steps that train it.

It lays units out, builds and checks the schedules, plans memory by running the step on shapes, takes the
memory, binds the collectives, and then runs the same list again and again.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from mpishard.array.arena import Arena
from mpishard.array.constants import CHUNK, EXACT_WORDS
from mpishard.array.dtypes import Array, dtype
from mpishard.array.ops import Ops
from mpishard.array.shape_ops import ShapeOps
from mpishard.comm.base import Communicator
from mpishard.comm.dry import DryCommunicator
from mpishard.errors import EngineError
from mpishard.nn.layer import LossLayer
from mpishard.nn.model import Model
from mpishard.shard.control import Agreement, Report, combine, compare, describe
from mpishard.shard.dealing import deal
from mpishard.shard.entry import Entry, feed_problem, memory_together, name_problem, prediction_problem, rate_problem
from mpishard.shard.exact import ExactSum
from mpishard.shard.instructions import Instruction, digest
from mpishard.shard.layout import layout
from mpishard.shard.outline import outline_of
from mpishard.shard.precision import precision
from mpishard.shard.program import Action, Compiler, Regions
from mpishard.shard.results import Evaluation, Optimizer, StepResult
from mpishard.shard.runner import Feed, Runner
from mpishard.shard.schedule import Settings
from mpishard.shard.state import fingerprint, initialise, make_state
from mpishard.shard.steps import Steps, steps_of
from mpishard.shard.whole import whole_parameter

__all__ = ["Engine", "Evaluation", "Optimizer", "StepResult", "Stop", "outline_of"]


Stop: TypeAlias = "bool | Callable[[], bool]"


class Engine:
    """Trains a model over a communicator.

    Args:
        optimizer: None for an engine that only evaluates and predicts, and holds the parameters alone.
        settings: strategy, prefetch, recomputation; ``micros`` is set from the batch.
        micro_batch, global_batch: samples; a step has ``global_batch / micro_batch`` micro-batches, dealt to
            the ranks in turn.
        dtype_name: element type to compute in; with bfloat16 masters, gradient shards and moments are fp32
            (:mod:`mpishard.shard.precision`).
        poison: fill released and not yet arrived memory with NaN (slow; finds what reads it).
        schedule: run this step instead of the one that ``settings`` make (to study or break it).

    Raises:
        ConfigError: the ranks do not divide the micro-batches.
        ScheduleError: the schedule is not legal.
        CommError: ranks differ.
    """

    def __init__(
        self,
        model: Model,
        comm: Communicator,
        ops: Ops,
        optimizer: Optimizer | None,
        settings: Settings,
        *,
        micro_batch: int,
        global_batch: int,
        seed: int,
        dtype_name: str = "float32",
        poison: bool = False,
        schedule: tuple[Instruction, ...] | None = None,
        planned: Steps | None = None,
    ) -> None:
        micros = deal(global_batch, micro_batch, comm.size)
        self.model, self.comm, self.ops, self.optimizer = model, comm, ops, optimizer
        #: everything that all ranks do with the engine begins with its ``meet``
        self.entry = Entry(comm)
        self.settings = settings = replace(settings, micros=micros)
        self.global_batch = global_batch
        self.outline = outline_of(model)
        self.layouts = {unit.name: layout(unit.specs, comm.size) for unit in model.units}
        sharded = settings.strategy == "full_shard"
        #: element types of parameters, activations, gradients and sums
        self.types = types = precision(dtype_name)
        scratch, trained = comm.scratch_elements, optimizer is not None
        steps = steps_of(self.outline, self.layouts, settings, types, scratch, trained=trained, schedule=schedule)
        self.schedule = steps.schedules[0]
        layers = {id(stage.layer): stage.layer for stage in model.stages}.values()
        facts = describe([*layers, optimizer, global_batch, micro_batch, seed, dtype_name, settings])
        facts += str(self.layouts)
        self._digests = [digest(one, facts) for one in steps.schedules]
        # Before ranks bind what others do not.
        compare(comm.exchange(b"".join(self._digests), "the start of an engine"))

        if planned is not None:
            self.arena = Arena(ops, None, poison)
        else:
            plan = Engine.rehearsed(
                model, comm, ops, optimizer, settings, micro_batch=micro_batch, dtype_name=dtype_name, planned=steps,
                schedule=schedule,
            )  # fmt: skip
            peaks, reserved = plan.arena.peaks(), plan.arena.reserved()
            self.arena = memory_together(comm, lambda: Arena(ops, peaks, poison, reserved, comm.allocate))
        #: names of what the optimiser keeps for each element
        self.states = optimizer.states if optimizer is not None else ()
        self.state = make_state(
            model,
            self.layouts,
            self.arena,
            ops,
            types,
            self.states,
            trained=optimizer is not None,
            sharded=sharded,
            rank=comm.rank,
        )
        initialise(self.state, ops, seed)
        self._runner = Runner(
            model, ops, self.arena, types, micro_batch=micro_batch, seed=seed, rank=comm.rank, size=comm.size
        )
        regions = (planned or steps).regions
        compiler = Compiler(
            model,
            self.outline,
            self.layouts,
            self.state,
            Regions(**{name: self.arena.reserve(name, size, dtype("uint8")) for name, size in regions.items()}),
            comm,
            ops,
            self.arena,
            self._runner,
            types=types,
            gradient_types=steps.gradient_types,
            resident=not sharded,
        )
        hooks = (self._agree, self._update, self._predict)
        self._train, self._eval, self._pred = (
            compiler.compile(one, placed, *hooks) for one, placed in zip(steps.schedules, steps.placements, strict=True)
        )
        nominal = global_batch * math.prod(model.target_shape)
        #: a power of two near 1 / targets, so that gradients stay near one in size before they are divided
        self._scale = 2.0 ** -round(math.log2(max(1, nominal)))
        self._logits = self.arena.reserve("workspace", self._head_outputs(), types.kind).reshape(1, -1)
        self._squares = self.arena.reserve("workspace", EXACT_WORDS, dtype("int64"))
        self.steps = 0
        self.updates = 0
        #: whether :meth:`close` closes the communicator
        self.owns_comm = False
        self._lr = 0.0
        self._more = False
        self._stop: Stop = False
        #: told the name of each instruction before it runs
        self.note: Callable[[bytes], None] | None = None
        self._position = 0
        self._agreement: Agreement | None = None
        self._factor = 0.0
        self._running = hashlib.blake2b(digest_size=8)

    def _head_outputs(self) -> int:
        head = self.model.stages[-1].layer
        if not isinstance(head, LossLayer):
            raise EngineError(f"the last stage, {self.model.stages[-1].name}, is no LossLayer")
        return head.outputs()

    @classmethod
    def rehearsed(
        cls,
        model: Model,
        comm: Communicator,
        ops: Ops,
        optimizer: Optimizer | None,
        settings: Settings,
        *,
        micro_batch: int,
        dtype_name: str = "float32",
        planned: Steps | None = None,
        schedule: tuple[Instruction, ...] | None = None,
    ) -> Engine:
        """Return an engine without memory that has run every kind of step once, on shapes.

        Its :meth:`memory` is, to the byte, that of the engine which ``comm`` and ``ops`` would make. It runs one
        micro-batch, since each uses the same frames, and has room for what ``settings.micros`` of them keep in
        flight, or for what ``planned`` does. A ``schedule`` of one's own is run whole.
        """
        types = precision(dtype_name)
        ops.prepare(types.kind)
        if planned is None:
            layouts = {unit.name: layout(unit.specs, comm.size) for unit in model.units}
            trained, scratch = optimizer is not None, comm.scratch_elements
            planned = steps_of(outline_of(model), layouts, settings, types, scratch, trained=trained)
        shapes = ShapeOps(ops.own_bytes)
        dry = DryCommunicator(comm.rank, comm.size, shapes, comm.scratch_elements)
        dry.own_bytes = comm.own_bytes
        plan = cls(
            model,
            dry,
            shapes,
            optimizer,
            settings,
            micro_batch=micro_batch,
            global_batch=micro_batch * comm.size * (settings.micros if schedule else 1),
            seed=0,
            dtype_name=dtype_name,
            planned=planned,
            schedule=schedule,
        )
        plan.evaluate(None)
        plan._forward_one(0)
        if optimizer is not None:
            plan.step(None, lr=0.0)
        return plan

    # --- steps

    def step(self, feed: Feed | None, *, lr: float, more: bool = True, stop: Stop = False) -> StepResult:
        """Train on one global batch. Collective.

        Args:
            feed: gives this rank's micro-batches; called with global micro-batch numbers of this step.
            lr: learning rate of this step.
            more: this rank has data for the next step.
            stop: whether this rank wants the run to end after this step; a callable is asked when ranks agree.

        Raises:
            ConfigError: on every rank, when ``lr`` or the feed of any of them is wrong.
            DataError: on the rank whose feed gives tokens or targets that there are not.
            CommError: on every rank, when they ran different steps.
            EngineError: the engine has no optimiser, is closed, or failed before.
        """
        if self.optimizer is None:
            raise EngineError("the engine was made without an optimiser; it can evaluate and predict")
        what = f"step {self.steps}"
        self.entry.meet(what, rate_problem(lr) or feed_problem(feed, self.model, self.global_batch), feed)
        self._lr, self._more, self._stop = float(lr), bool(more), stop
        self._running.update(struct.pack("<d", self._lr))
        self._runner.begin(self.steps, feed, self._scale, training=True)
        busy = sum(tally.busy for tally in self.comm.tallies.values())
        seconds = self._run(self._train, what)
        seconds["communicating"] = sum(tally.busy for tally in self.comm.tallies.values()) - busy
        known = self._agreement
        if known is None:
            raise EngineError("the step has no Agree")
        updated = known.finite and known.tokens > 0
        self.steps += 1
        self.updates += updated
        loss = known.loss / known.tokens if known.tokens else float("nan")
        norm = self._norm(known)
        return StepResult(self.steps - 1, loss, known.tokens, norm, self._lr, updated, known.more, known.stop, seconds)

    def evaluate(self, feed: Feed | None) -> Evaluation:
        """Loss of one global batch without training. Collective."""
        what = f"an evaluation before step {self.steps}"
        self.entry.meet(what, feed_problem(feed, self.model, self.global_batch), feed)
        self._runner.begin(self.steps, feed, 1.0, training=False)
        self._run(self._eval, what)
        return self._combine_evaluation()

    def _combine_evaluation(self) -> Evaluation:
        report = self._report(self._digests[1], ExactSum(), stop=False)
        known = combine(self.comm.exchange(report.pack(), "the loss of an evaluation"))
        return Evaluation(known.loss, known.tokens)

    def predict(self, sample: Array, position: int) -> Array:
        """Return the predictions (outputs,) at one position of one sample. Collective: every rank gives the same.

        A host array, which the next call may overwrite; fp32 where the engine computes in 16 bits.

        Raises:
            ConfigError: on every rank, when the sample or the position of any of them does not fit the model.
        """
        self.entry.meet("a prediction", prediction_problem(sample, position, self.model))
        self._runner.give(sample)
        self._forward_one(position)
        return self.ops.fetch(self._logits[0]).astype(self.types.wide, copy=False)

    def _forward_one(self, position: int) -> None:
        self._position = int(position)
        self._runner.begin(self.steps, None, 1.0, training=False)
        self._run(self._pred, "a prediction")

    def _run(self, program: list[Action], what: str) -> dict[str, float]:
        """Run the actions in order; return seconds by kind, starting collectives among computing."""
        times = {"compute": 0.0, "start": 0.0, "wait": 0.0}
        clock = time.perf_counter
        begin = last = clock()
        # Overflow is no warning here: the agreed norm says whether the step is finite, and for all ranks alike.
        with self.entry.until_done(what), np.errstate(all="ignore"):
            for action in program:
                if self.note is not None:
                    self.note(action.name)
                if action.mark:
                    self._running.update(action.mark)
                action.run()
                now = clock()
                times[action.kind] += now - last
                last = now
        return {"computing": times["compute"] + times["start"], "waiting": times["wait"], "total": last - begin}

    # --- what the instructions call

    def _report(self, schedule: bytes, squares: ExactSum, *, stop: bool) -> Report:
        runner = self._runner
        return Report(
            schedule,
            self._running.digest(),
            self.steps,
            squares,
            runner.loss(),
            runner.targets_seen,
            self._more,
            stop,
        )

    def _agree(self) -> None:
        self.ops.fill(self._squares, 0)
        for part in self.state.values():
            own = part.slice_of("grad")
            with self.arena.workspace.frame():
                partial = self.arena.workspace.push((own.size // CHUNK,), np.dtype(np.float64))
                self.ops.square_sums(own, part.layout.silent_within(part.own.start, part.own.stop), partial)
                self.ops.exact_sum(partial, self._squares)
        squares = ExactSum()
        squares.add_words(self.ops.fetch(self._squares))
        stop = bool(self._stop() if callable(self._stop) else self._stop)
        report = self._report(self._digests[0], squares, stop=stop)
        known = combine(self.comm.exchange(report.pack(), "the end of a step"))
        self._agreement = known
        if known.finite and known.tokens and self.optimizer is not None:
            self._factor = self.optimizer.clip(self._norm(known)) / (self._scale * known.tokens)

    def _norm(self, known: Agreement) -> float:
        """Global norm of the mean gradient."""
        if not known.finite or not known.tokens:
            return float("nan")
        return math.sqrt(known.squares) / (self._scale * known.tokens)

    def _update(self, unit: str) -> None:
        known = self._agreement
        if known is None or self.optimizer is None or not (known.finite and known.tokens):
            return  # skipped alike on every rank; the next step's first reduction writes the gradient anew
        part = self.state[unit]
        segments = part.segments(self.optimizer.decay)
        self.optimizer.update(self.ops, part.arrays, segments, self._factor, self._lr, self.updates + 1)
        if not getattr(self.optimizer, "writes_cast", False):
            part.refresh(self.ops)

    def _predict(self, index: int, params: Mapping[str, Array]) -> None:
        self._runner.predict(index, self._position, params, self._logits)

    # --- what others ask

    def checksum(self) -> str:
        """Return 16 hex digits that name the values of parameters and optimiser states. Collective.

        They do not depend on the number of ranks, the strategy or the transport.
        """
        self.entry.check("a checksum")
        mine = fingerprint(self.state, self.ops, self.states)
        shares = self.comm.exchange(mine.to_bytes(8, "little"), "a checksum")
        return f"{sum(int.from_bytes(share, 'little') for share in shares) % 2**64:016x}"

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds, by category."""
        held = self.arena.held()
        held["staging"] += self.comm.own_bytes
        return held

    def parameter(self, name: str) -> Array:
        """Return a fresh copy of a whole parameter by its public name, on every rank. Collective."""
        self.entry.meet("reading a parameter", name_problem(name))
        return whole_parameter(self.state, self.comm, self.ops, name)

    def close(self) -> None:
        """Give back the communicator where it was made for this engine alone. Collective; again is free.

        After a failure nothing is sent and nothing given back: the other ranks may be anywhere.
        """
        if not (self.entry.closed or self.entry.unended):
            self.entry.meet("closing the engine")
            if self.owns_comm:
                self.comm.close()
        self.entry.closed = True
