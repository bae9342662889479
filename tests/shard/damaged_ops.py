"""Operations broken on purpose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard.array.dtypes import Array
from mpishard.array.numpy_ops import NumpyOps


class Burst(NumpyOps):
    """Writes ``bad`` into one gradient, once, when told to."""

    bad: float | None = None

    def _embedding_backward(self, tokens: Array, dy: Array, dtable: Array, add: bool) -> None:
        super()._embedding_backward(tokens, dy, dtable, add)
        if self.bad is not None:
            dtable[3, 2], self.bad = self.bad, None


class Reversed(NumpyOps):
    """Adds the ranks' contributions from the last to the first."""

    def _ordered_sum(self, blocks: Sequence[Array], out: Array, add: bool, bracket: int) -> None:
        super()._ordered_sum(list(reversed(blocks)), out, add, bracket)


class Apart(NumpyOps):
    """Adds the ranks' contributions to each other before they go to the shard."""

    def _ordered_sum(self, blocks: Sequence[Array], out: Array, add: bool, bracket: int) -> None:
        total = np.empty_like(out)
        super()._ordered_sum(blocks, total, False, bracket)
        super()._ordered_sum([total], out, add, 1)


class MeanOfMeans(NumpyOps):
    """Weighs a micro-batch's losses so that every micro-batch counts alike; ``weight`` is set as data is read."""

    weight = 1.0

    def _cross_entropy(self, logits_: Array, targets: Array, losses: Array, scale: float, gradient: bool) -> None:
        super()._cross_entropy(logits_, targets, losses, scale * self.weight, gradient)
        np.multiply(losses, self.weight, out=losses)
