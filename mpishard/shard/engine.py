"""The engine: one rank's share of a model, and the steps that train it.

It lays units out, builds and checks the schedules, plans memory by running the step on shapes, takes the
memory, binds the collectives, and then runs the same list again and again.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from mpishard.array.arena import POOLED, REGION, Arena
from mpishard.array.constants import CHUNK
from mpishard.array.dtypes import Array
from mpishard.array.ops import Ops
from mpishard.array.shape_ops import ShapeOps
from mpishard.comm.base import Communicator
from mpishard.comm.pool import Pool
from mpishard.errors import EngineError
from mpishard.nn.model import Model
from mpishard.shard.control import Agreement, Report, agree, describe, same_schedules
from mpishard.shard.dealing import deal
from mpishard.shard.entry import Entry, feed_problem, memory_together, name_problem, prediction_problem, rate_problem
from mpishard.shard.exact import ExactSum
from mpishard.shard.forecast import forecast
from mpishard.shard.instructions import Instruction
from mpishard.shard.layout import layout
from mpishard.shard.ledger import Ledger, most_taken
from mpishard.shard.loss_scale import LossScale
from mpishard.shard.memory import pool_of, reserve
from mpishard.shard.offload import Updates, pinned_for, take_together
from mpishard.shard.outline import outline_of, separated
from mpishard.shard.precision import precision
from mpishard.shard.program import Action, Compiler
from mpishard.shard.results import Evaluation, Optimizer, StepResult, spent
from mpishard.shard.runner import Feed
from mpishard.shard.running import Trace, Traced, run
from mpishard.shard.schedule import Settings
from mpishard.shard.state import fingerprint, initialise, refresh
from mpishard.shard.steps import steps_of
from mpishard.shard.strategy import group_of
from mpishard.shard.whole import whole_parameter
from mpishard.shard.world import World

__all__ = ["Engine", "Evaluation", "Optimizer", "StepResult", "Stop", "outline_of"]

Stop: TypeAlias = "bool | Callable[[], bool]"


class Engine:
    """Trains a model over a communicator.

    Args:
        optimizer: None for an engine that only evaluates and predicts, and holds the parameters alone.
        settings: strategy, prefetch, recomputation; ``micros`` is set from the batch.
        micro_batch, global_batch: samples; a step has ``global_batch / micro_batch`` micro-batches, dealt to
            the ranks in turn.
        dtype_name: element type to compute in; with 16 bits masters, gradient shards and moments are fp32
            (:mod:`mpishard.shard.precision`).
        reduce_dtype: element type in which gradients travel; empty for ``dtype_name``.
        loss_scale: by which the loss is multiplied, for float16; None for none. Its state is the engine's from here on.
        poison: fill released and not yet arrived memory with NaN (slow; finds what reads it).
        ledger: note the memory in use at each instruction of a training step, in :attr:`ledger`.
        offload: ``optimizer`` keeps masters and optimiser states in pinned host memory (:mod:`mpishard.shard.offload`);
            for operations on a device.
        schedule: run this step instead of the one that ``settings`` make (to study or break it).

    Raises:
        ConfigError: the ranks do not divide the micro-batches, or a group the ranks; nothing can be offloaded; a rank
            cannot have its memory.
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
        reduce_dtype: str = "",
        loss_scale: LossScale | None = None,
        poison: bool = False,
        ledger: bool = False,
        offload: str = "none",
        schedule: tuple[Instruction, ...] | None = None,
    ) -> None:
        micros = deal(global_batch, micro_batch, comm.size)
        #: where masters and optimiser states are, where they are offloaded
        self.pinned = pinned_for(offload, ops)
        self.model, self.comm, self.ops, self.optimizer = model, comm, ops, optimizer
        #: everything that all ranks do with the engine begins with its ``meet``
        self.entry = Entry(comm)
        self.settings = settings = replace(settings, micros=micros)
        self.global_batch, self.loss_scale = global_batch, loss_scale
        parted = separated(model)
        self.outline = outline_of(parted)
        self.layouts = {unit.name: layout(unit.specs, comm.size) for unit in parted.units}
        #: element types of parameters, activations, gradients and sums
        self.types = types = precision(dtype_name, reduce_dtype)
        ops.prepare(types.kind)
        ops.prepare(types.wire)
        if self.pinned is not None:
            self.pinned.ops.prepare(types.kind)
        #: names of what the optimiser keeps for each element
        self.states = optimizer.states if optimizer is not None else ()
        layers = {id(stage.layer): stage.layer for stage in model.stages}.values()
        facts = describe([*layers, optimizer, global_batch, micro_batch, seed, dtype_name, reduce_dtype, settings])
        self._parts = self._split(comm, settings)
        self.world = world = World.of(comm, settings, self._parts, shares=not poison)
        facts += describe(loss_scale) + describe(offload) + str(self.layouts) + str(world.sharers)
        steps = steps_of(
            self.outline, self.layouts, settings, types, world, trained=optimizer is not None, schedule=schedule
        )
        self.schedule = steps.schedules[0]
        # Before ranks bind what others do not.
        self._digests = same_schedules(comm, steps.schedules, facts)

        trained = optimizer.states if optimizer is not None else None
        pool: Pool | None = None
        if isinstance(ops, ShapeOps):
            self.arena = Arena(ops, None, poison)
        else:
            plan = forecast(
                model, trained, settings, types, world, micro_batch=micro_batch, ops_bytes=ops.own_bytes,
                offload=offload, steps=steps,
            )  # fmt: skip
            pool = pool_of(self._parts or (comm,), steps)
            self.arena = memory_together(
                comm, lambda: Arena(ops, plan.peaks, poison, plan.reserved, comm.allocate, pool and pool.bytes)
            )
            if self.pinned is not None:
                take_together(comm, self.pinned, plan.host)
        memory = reserve(
            parted, self.layouts, self.arena, ops, types, trained, settings=settings, world=world, steps=steps,
            micro_batch=micro_batch, seed=seed, lowest=self.outline.lowest, pinned=self.pinned,
        )  # fmt: skip
        self.state, self._runner = memory.state, memory.runner
        self._logits, self._squares = memory.logits, memory.squares
        self._updates = None if optimizer is None else Updates(self.state, memory.slots, self.pinned, ops, optimizer)
        self._compiler = Compiler(
            parted, self.outline, self.layouts, memory, self._parts or (comm, None), ops, self.arena,
            types=types, steps=steps, settings=settings, pool=pool,
        )  # fmt: skip
        hooks = (self._agree, self._update, self._predict)
        self._train, self._eval, self._pred = (
            self._compiler.compile(one, placed, *hooks)
            for one, placed in zip(steps.schedules, steps.placements, strict=True)
        )
        self._taken = most_taken((self._train, self._eval, self._pred), pooled=pool is not None)
        initialise(self.state, ops, seed)
        self._compiler.share()
        #: the memory in use at each instruction of the last training step, where that was asked for
        self.ledger = Ledger(self.arena, self._train, self._beside()) if ledger else None
        nominal = global_batch * math.prod(model.target_shape)
        #: a power of two near 1 / targets, so that gradients stay near one in size before they are divided
        self._nominal = 2.0 ** -round(math.log2(max(1, nominal)))
        self._scale = self._nominal
        self.steps = 0
        self.updates = 0
        #: whether :meth:`close` closes the communicator
        self.owns_comm = False
        self._lr = 0.0
        self._more = False
        self._stop: Stop = False
        #: told the name of each instruction before it runs
        self.note: Callable[[bytes], None] | None = None
        #: notes when the instructions of some training steps run
        self.trace: Trace | None = None
        self._position = 0
        self._agreement: Agreement | None = None
        self._factor = 0.0
        self._running = hashlib.blake2b(digest_size=8)

    @staticmethod
    def _split(comm: Communicator, settings: Settings) -> tuple[Communicator, Communicator] | None:
        """Return this rank's group, and the ranks with the same shard, where there are several groups."""
        group = group_of(settings, comm.size, comm.node.local_size)
        if group == comm.size:
            return None
        inside, across = World(comm.rank, comm.size, group).partners()
        return comm.split(inside), comm.split(across)

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
        traced = self.trace.begin(self.steps) if self.trace is not None else None
        self.entry.meet(what, rate_problem(lr) or feed_problem(feed, self.model, self.global_batch), feed)
        self._lr, self._more, self._stop = float(lr), bool(more), stop
        self._scale = self._nominal * (self.loss_scale.scale if self.loss_scale is not None else 1.0)
        self._running.update(struct.pack("<dd", self._lr, self._scale))
        self._runner.begin(self.steps, feed, self._scale, training=True)
        before = self._spent()
        seconds = self._run(self._train, what, self.ledger, traced)
        seconds |= self._spent(before)
        known = self._agreement
        if known is None:
            raise EngineError("the step has no Agree")
        updated = known.finite and known.tokens > 0
        self.steps += 1
        self.updates += updated
        loss = known.loss / known.tokens if known.tokens else float("nan")
        norm = self._norm(known)
        used = self._scale / self._nominal
        if self.loss_scale is not None:
            self.loss_scale.update(known.finite)
        return StepResult(
            self.steps - 1, loss, known.tokens, norm, self._lr, updated, known.more, known.stop, used, seconds
        )

    @property
    def actions(self) -> Sequence[Action]:
        """The training step, ready to run."""
        return self._train

    def _spent(self, before: Mapping[str, float] | None = None) -> dict[str, float]:
        return spent([self.comm, *(self._parts or ())], before)

    def evaluate(self, feed: Feed | None) -> Evaluation:
        """Loss of one global batch without training. Collective."""
        what = f"an evaluation before step {self.steps}"
        self.entry.meet(what, feed_problem(feed, self.model, self.global_batch), feed)
        self._runner.begin(self.steps, feed, 1.0, training=False)
        self._run(self._eval, what)
        return self._combine_evaluation()

    def _combine_evaluation(self) -> Evaluation:
        report = self._report(self._digests[1], ExactSum(), stop=False)
        known = agree(self.comm, report, "the loss of an evaluation", self._ran)
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

    def _run(
        self, program: list[Action], what: str, ledger: Ledger | None = None, traced: Traced | None = None
    ) -> dict[str, float]:
        with self.entry.until_done(what):
            return run(
                program, note=self.note, running=self._running, ledger=ledger, traced=traced,
                arrival=lambda: self._compiler.arrival,
            )  # fmt: skip

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
            if not part.trained:
                continue
            own = part.slice_of("grad")
            with self.arena.workspace.frame():
                partial = self.arena.workspace.push((own.size // CHUNK,), np.dtype(np.float64))
                self.ops.square_sums(own, part.layout.silent_within(part.own.start, part.own.stop), partial)
                self.ops.exact_sum(partial, self._squares)
        squares = ExactSum()
        squares.add_words(self.ops.fetch(self._squares))
        stop = bool(self._stop() if callable(self._stop) else self._stop)
        report = self._report(self._digests[0], squares, stop=stop)
        self._agreement = known = agree(self.comm, report, "the end of a step", self._ran)
        if known.finite and known.tokens and self.optimizer is not None:
            self._factor = self.optimizer.clip(self._norm(known)) / (self._scale * known.tokens)

    def _ran(self) -> list[str]:
        """What differs where ranks ran different things: rates, and the collectives of a step."""
        rates = [f"learning rate {self._lr!r}", f"loss scale {self._scale / self._nominal!r}"]
        return rates + [action.mark.decode() for action in self._train if action.mark]

    def _norm(self, known: Agreement) -> float:
        """Global norm of the mean gradient."""
        if not known.finite or not known.tokens:
            return float("nan")
        return math.sqrt(known.squares) / (self._scale * known.tokens)

    def _update(self, unit: str) -> None:
        known = self._agreement
        if known is None or self._updates is None or not (known.finite and known.tokens):
            return  # skipped alike on every rank; the next step's first reduction writes the gradient anew
        self._updates.run(unit, self._factor, self._lr, self.updates + 1)

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

    def _beside(self) -> dict[str, int]:
        """Bytes that backend and transport hold for themselves, and what is reserved for good, by category."""
        found = {name: nbytes for name, nbytes in self.arena.reserved().items() if name != REGION}
        found[POOLED] = 0  # counted as it is used
        found["workspace"] += self.ops.own_bytes
        found["staging"] += self.world.own_bytes
        return found

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds, by category; they add up to all that it holds.

        ``gathered``, ``unreduced`` and ``staging`` share one region, and stand here with what they hold when they are
        most together; gaps between buffers count as ``staging``. Of a pool it is this rank's part that is ``gathered``.
        """
        held = self.arena.held()
        region = held.pop(REGION)
        held["staging"] += self.world.own_bytes + region
        for name, nbytes in self._taken.items():
            held[name] += nbytes
            held["staging"] -= nbytes
        return held

    def host_memory(self) -> int:
        """Return the bytes of pinned host memory that masters and optimiser states are in; 0 without offload."""
        return self.pinned.nbytes if self.pinned is not None else 0

    def refresh(self) -> None:
        """Bring every copy of parameters up to date after this rank's were changed by other than a step. Collective."""
        refresh(self.state, self.ops)
        self._compiler.share()

    def parameter(self, name: str) -> Array:
        """Return a fresh copy of a whole parameter by its public name, on every rank. Collective."""
        self.entry.meet("reading a parameter", name_problem(name))
        return whole_parameter(self.state, self.comm, self.ops, name, self.world)

    def close(self) -> None:
        """Give back the communicator where it was made for this engine alone. Collective; again is free.

        After a failure nothing is sent and nothing given back: the other ranks may be anywhere.
        """
        if not (self.entry.closed or self.entry.unended):
            self.entry.meet("closing the engine")
            for part in self._parts or ():
                part.close()
            if self.owns_comm:
                self.comm.close()
        self.entry.closed = True
