"""Whole arrays as a feed: each rank cuts its micro-batches out of one global batch.

[Note: every rank sees the same batch]
A batch is given whole, and alike, on every rank. Before a step the ranks compare digests of it, so a shuffle that was
not seeded alike is an error on all of them and no silent mix of two batches; what does not fit is an error on all
of them too, where one rank alone would leave the others waiting in a collective.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike

from mpishard.array.constants import IGNORE
from mpishard.array.dtypes import Array, dtype
from mpishard.nn.embedding import Embedding
from mpishard.nn.layer import LossLayer
from mpishard.nn.model import Model

__all__ = ["DIGEST_BYTES", "Batch", "batch", "numbers_problem", "sample_problem"]

DIGEST_BYTES = 16


class Batch:
    """A feed of one global batch; :func:`batch` makes it."""

    def __init__(self, inputs: Array, targets: Array) -> None:
        self.inputs, self.targets = inputs, targets

    def __call__(self, micro: int, inputs: Array, targets: Array) -> None:
        """Copy the rows of global micro-batch ``micro``."""
        rows = slice(micro * inputs.shape[0], (micro + 1) * inputs.shape[0])
        inputs[...] = self.inputs[rows]
        targets[...] = self.targets[rows]

    def problem(self, model: Model, samples: int) -> str:
        """Say what keeps the batch from being ``samples`` samples of the model; empty where nothing does."""
        due = (("inputs", self.inputs, model.sample_shape), ("targets", self.targets, model.target_shape))
        for name, array, shape in due:
            if array.shape != (samples, *shape):
                return (
                    f"{name} of the batch have shape {array.shape}; a step of this engine takes {(samples, *shape)}, "
                    "its global batch first"
                )
        head = model.stages[-1].layer
        if self.targets.dtype.kind not in "iu":
            return f"targets of the batch are {self.targets.dtype}; they must be whole numbers, such as int64"
        if isinstance(head, LossLayer):
            counted = self.targets[self.targets != IGNORE]
            most = head.outputs() - 1
            if found := _outside(counted, most):
                return f"a target of the batch is {found}; it must be 0 to {most}, or {IGNORE} (not counted)"
        return _input_problem(self.inputs, model, "inputs of the batch are", "an input of the batch is")

    def digest(self) -> bytes:
        """Name the values of the whole batch."""
        found = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for array in (self.inputs, self.targets):
            found.update(f"{array.dtype.str}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return found.digest()


def batch(inputs: ArrayLike, targets: ArrayLike) -> Batch:
    """Return the feed of one global batch, for ``step`` or ``evaluate`` of an engine.

    Args:
        inputs: (global_batch, ...) samples: tokens, or features of any type that a float can hold.
        targets: (global_batch, ...) whole numbers; those of -100 have no loss and are not counted.

    Every rank gives the whole batch, the same on all; it computes on its own rows. Ranks compare a digest of it, which
    reads the whole batch: where that, or holding it, is too much, give a function instead that fills the
    arrays of one micro-batch (``Feed`` in mpishard.shard.runner).

    The engine's methods raise ConfigError, on every rank, when shapes, types or values do not fit the model, or when
    the ranks give different batches.
    """
    return Batch(np.asarray(inputs), np.asarray(targets))


def numbers_problem(inputs: Array, targets: Array, model: Model) -> str:
    """Say which token or target of a micro-batch there is none; empty where all are."""
    head = model.stages[-1].layer
    if isinstance(head, LossLayer) and (found := _outside(targets[targets != IGNORE], head.outputs() - 1)):
        return f"the data hold the target {found}; the model takes 0 to {head.outputs() - 1}, or {IGNORE}"
    return _input_problem(inputs, model, "inputs of the data are", "an input of the data is")


def sample_problem(sample: Array, model: Model) -> str:
    """Say what keeps an array from being one sample of the model; empty where nothing does."""
    if sample.shape != model.sample_shape:
        return f"the sample has shape {sample.shape}; the model takes {model.sample_shape}"
    return _input_problem(sample, model, "the sample is", "an input of the sample is")


def _input_problem(values: Array, model: Model, all_are: str, one_is: str) -> str:
    kind = values.dtype.kind
    if dtype(model.sample_dtype).kind != "i":
        return "" if kind in "fiu" else f"{all_are} {values.dtype}; the model takes {model.sample_dtype}"
    if kind not in "iu":
        return f"{all_are} {values.dtype}; the model takes tokens, such as int64"
    first = model.stages[0].layer
    most = first.vocabulary - 1 if isinstance(first, Embedding) else 2**63 - 1
    found = _outside(values, most)
    return found and f"{one_is} {found}; the model knows the tokens 0 to {most}"


def _outside(values: Array, most: int) -> str:
    """Return a value below 0 or above ``most``; empty where there is none."""
    found = (int(values.min()), int(values.max())) if values.size else ()
    return next((str(value) for value in found if not 0 <= value <= most), "")
