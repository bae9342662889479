"""Computes stages: owns activations, their gradients and the micro-batch, never parameters.

[Note: lifetimes of a micro-batch]
Forward pushes each stage's output on ``saved`` and what the stage keeps above it. Backward goes down the same
stack: when a stage's backward has run, everything from its output up is taken back. Recomputation finds
its stage's output on top and writes it again in place. Gradients of activations alternate between two
buffers, and so do outputs where there is no backward: in an evaluation, and below the lowest stage that has a
trainable parameter, where backward ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from mpishard.array.arena import Arena, Stack
from mpishard.array.constants import EXACT_WORDS, IGNORE
from mpishard.array.dtypes import Array, DType, dtype
from mpishard.array.ops import Draw, Ops
from mpishard.array.random import stream
from mpishard.errors import DataError
from mpishard.nn.layer import Frame, Grads, Layer, LossLayer, Params
from mpishard.nn.model import Model
from mpishard.shard.exact import ExactSum
from mpishard.shard.feed import numbers_problem
from mpishard.shard.precision import Precision

__all__ = ["Feed", "Runner", "StepContext"]

#: ``feed(micro, inputs, targets)`` fills the arrays (micro_batch, ...) with global micro-batch ``micro``.
Feed: TypeAlias = Callable[[int, Array, Array], None]


class StepContext:
    """The :class:`~mpishard.nn.layer.Context` of the stage that computes now."""

    def __init__(self, arena: Arena, dtype: DType, seed: int) -> None:
        self.training = True
        self.step = 0
        self.stage = ""
        self.first_row = 0
        self.kept: Stack = arena.saved
        self._arena = arena
        self._dtype = dtype
        self._seed = seed
        self._streams: dict[tuple[str, str], int] = {}

    def keep(self, shape: tuple[int, ...], dtype: DType | None = None) -> Array:
        """Push on ``saved``, or on ``workspace`` where there is no backward."""
        return self.kept.push(shape, dtype or self._dtype)

    def scratch(self, shape: tuple[int, ...], dtype: DType | None = None) -> Array:
        """Push on ``workspace``."""
        return self._arena.workspace.push(shape, dtype or self._dtype)

    def frame(self) -> Frame:
        """A frame of ``workspace``."""
        return self._arena.workspace.frame()

    def draw(self, name: str, features: int) -> Draw:
        """Streams are named by stage and layer, elements by their global row in the step."""
        key = (self.stage, name)
        number = self._streams.get(key)
        if number is None:
            number = self._streams[key] = stream(f"{self.stage}.{name}")
        return Draw(self._seed, number, self.step, self.first_row * features)


class Runner:
    """Runs the computing instructions of a step over arrays that it is given.

    Args:
        micro_batch: samples of a micro-batch.
        rank, size: local micro-batch k is global micro-batch ``k * size + rank``.
        lowest: the first stage with a trainable parameter.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        arena: Arena,
        types: Precision,
        *,
        micro_batch: int,
        seed: int,
        rank: int,
        size: int,
        lowest: int,
    ) -> None:
        self.model, self.ops, self.arena = model, ops, arena
        self.rank, self.size, self.micro_batch = rank, size, micro_batch
        self.lowest = lowest
        self.rows = math.prod(model.target_shape)
        self.context = StepContext(arena, types.kind, seed)
        self.scale = 1.0
        self.feed: Feed | None = None
        self.targets_seen = 0
        self._dtype = types.kind
        samples = (micro_batch, *model.sample_shape)
        goals = (micro_batch, *model.target_shape)
        sample_type = dtype(model.sample_dtype)
        self.inputs = arena.reserve("staging", math.prod(samples), sample_type).reshape(samples)
        self.targets = arena.reserve("staging", math.prod(goals), dtype("int64")).reshape(goals)
        ops.fill(self.inputs, 0)
        ops.fill(self.targets, 0)
        #: where a feed writes: the arrays themselves, or their like in host memory
        self.host_inputs, self.host_targets = ops.host_like(self.inputs), ops.host_like(self.targets)
        self._samples = self.inputs
        if "float" in model.sample_dtype and sample_type != types.kind:
            self._samples = arena.reserve("workspace", math.prod(samples), types.kind).reshape(samples)
        self._losses = arena.reserve("workspace", math.prod(goals), types.wide)
        widest = max(math.prod(shape) for shape in self.shapes(samples))
        self._flow = [arena.reserve("workspace", widest, types.kind) for _ in range(2)]
        self._total = arena.reserve("workspace", 1, dtype("float64"))
        self._loss_words = arena.reserve("workspace", EXACT_WORDS, dtype("int64"))
        #: the newest activation or gradient
        self.newest: Array = self._samples
        self._frames: dict[int, tuple[int, Array, Array, int, Any]] = {}
        self._turn = 0

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes of the inner stages' outputs, for an input of ``shape``."""
        shapes = []
        for stage in self.model.stages[:-1]:
            assert isinstance(stage.layer, Layer)
            shape = stage.layer.output_shape(shape)
            shapes.append(shape)
        return shapes or [shape]

    def begin(self, step: int, feed: Feed | None, scale: float, *, training: bool) -> None:
        """Start a step: nothing is kept, nothing is summed."""
        self.feed, self.scale = feed, scale
        self.context.step, self.context.training = step, training
        self.arena.saved.cut(0)
        self.ops.fill(self._loss_words, 0)
        self.targets_seen = 0

    def loss(self) -> ExactSum:
        """Return the sum of the losses since the step began; waits until they are computed."""
        total = ExactSum()
        total.add_words(self.ops.fetch(self._loss_words))
        return total

    def _enter(self, index: int, micro: int) -> None:
        self.context.stage = self.model.stages[index].name
        self.context.first_row = (micro * self.size + self.rank) * self.micro_batch * self.rows

    def _buffer(self, shape: tuple[int, ...]) -> Array:
        """The flow buffer that does not hold the newest activation or gradient."""
        self._turn = 1 - self._turn
        return self._flow[self._turn][: math.prod(shape)].reshape(shape)

    def forward(self, index: int, micro: int, keep: bool, params: Params) -> None:
        """Compute an inner stage from the newest activation."""
        layer = self.model.stages[index].layer
        assert isinstance(layer, Layer)
        self._enter(index, micro)
        saved, training = self.arena.saved, self.context.training
        if index == 0:
            self.newest = self._read(micro)
        x = self.newest
        bottom = saved.top
        shape = layer.output_shape(x.shape)
        # The input of the lowest stage that learns is kept too.
        y = saved.push(shape, self._dtype) if training and index + 1 >= self.lowest else self._buffer(shape)
        top = saved.top
        learns = training and index >= self.lowest
        self.context.kept = saved if learns else self.arena.workspace
        with self.arena.workspace.frame():
            record = layer.forward(self.ops, self.context, params, x, y)
        if learns:
            if not keep:
                saved.cut(top)
                record = None
            self._frames[index] = (bottom, x, y, top, record)
        self.newest = y

    def _read(self, micro: int) -> Array:
        if self.feed is not None:
            self.feed(micro * self.size + self.rank, self.host_inputs, self.host_targets)
            if self.host_inputs is not self.inputs:
                self._check_numbers()  # a device cannot refuse what it is given
            self.ops.upload(self.host_targets, self.targets)
            self.ops.upload(self.host_inputs, self.inputs)
        if self._samples is not self.inputs:
            self.ops.copy(self.inputs, self._samples)
        return self._samples

    def _check_numbers(self) -> None:
        if problem := numbers_problem(self.host_inputs, self.host_targets, self.model):
            raise DataError(f"{problem}; mend the data, or make a model for them")

    def give(self, sample: Array) -> None:
        """Take one sample, the first of a micro-batch without feed."""
        np.copyto(self.host_inputs[0], sample, casting="same_kind")
        self.ops.upload(self.host_inputs, self.inputs)

    def recompute(self, index: int, micro: int, params: Params) -> None:
        """Forward again; the stage's output is on top of ``saved``."""
        layer = self.model.stages[index].layer
        assert isinstance(layer, Layer)
        self._enter(index, micro)
        bottom, x, y, top, _ = self._frames[index]
        self.context.kept = self.arena.saved
        with self.arena.workspace.frame():
            record = layer.forward(self.ops, self.context, params, x, y)
        self._frames[index] = (bottom, x, y, top, record)

    def head(self, index: int, micro: int, params: Params, grads: Grads | None) -> None:
        """Loss, with gradients unless ``grads`` is None; adds up the loss and counts targets."""
        layer = self.model.stages[index].layer
        assert isinstance(layer, LossLayer)
        self._enter(index, micro)
        if index == 0:
            self.newest = self._read(micro)
        self.context.kept = self.arena.saved if grads is not None else self.arena.workspace
        dx = self._buffer(self.newest.shape) if grads is not None and index > self.lowest else None
        with self.arena.workspace.frame():
            layer.loss(
                self.ops, self.context, params, grads, self.newest, self.targets, self._losses, self.scale, dx
            )
        self.ops.sum64(self._losses, self._total)
        self.ops.exact_sum(self._total, self._loss_words)
        flat = self.host_targets.reshape(-1)
        for start in range(0, flat.size, 32768):
            self.targets_seen += int(np.count_nonzero(flat[start : start + 32768] != IGNORE))
        if dx is not None:
            self.newest = dx
        elif grads is not None:
            self.arena.saved.cut(0)

    def backward(self, index: int, micro: int, params: Params, grads: Grads) -> None:
        """Backward of an inner stage from the newest gradient; takes its memory back."""
        layer = self.model.stages[index].layer
        assert isinstance(layer, Layer)
        self._enter(index, micro)
        bottom, x, _, _, record = self._frames.pop(index)
        dy = self.newest
        dx = self._buffer(x.shape) if index > self.lowest else None
        with self.arena.workspace.frame():
            layer.backward(self.ops, self.context, params, grads, record, dy, dx)
        if dx is not None:
            self.newest = dx
        # This stage's output and all it kept; the input below belongs to the stage before, which may need it.
        self.arena.saved.cut(bottom if index > self.lowest else 0)

    def predict(self, index: int, position: int, params: Params, logits: Array) -> None:
        """Predictions for one position of the first sample: logits (1, outputs)."""
        layer = self.model.stages[index].layer
        assert isinstance(layer, LossLayer)
        self._enter(index, 0)
        if index == 0:
            self.newest = self._read(0)
        self.context.kept = self.arena.workspace
        row = self.newest[0].reshape(self.rows, -1)[position : position + 1]
        with self.arena.workspace.frame():
            layer.predict(self.ops, self.context, params, row, logits)
