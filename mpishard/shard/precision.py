"""Element types of a step: what it computes in, what is kept between steps, what travels.

[Note: rounding points]
With a 16-bit ``kind``, parameters are rounded to it when they are gathered, activations when they are written, and a
rank's gradient of a micro-batch once, when it is reduced. A gradient that is written more than once in a micro-batch is
gathered in ``wide`` and rounded at its Reduce, on one rank too. Masters, gradient shards, moments, losses
and statistics are ``wide`` (Micikevicius et al. 2018, section 3.1; Kalamkar et al. 2019, section 3, for bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpishard.array.dtypes import DType, accumulator, dtype
from mpishard.shard.instructions import Backward, Instruction, Loss, Outline
from mpishard.shard.layout import Layout
from mpishard.shard.place import Sizes

__all__ = ["Precision", "gradient_types", "precision", "sizes_of"]


@dataclass(frozen=True)
class Precision:
    """The types of one engine.

    Attributes:
        kind: gathered parameters, activations, and gradients on their way between ranks.
        wide: masters, gradient shards, optimiser states and sums.
    """

    kind: DType
    wide: DType

    @property
    def mixed(self) -> bool:
        """Whether parameters are kept in a wider type than they are computed with."""
        return self.kind != self.wide


def precision(name: str) -> Precision:
    """Return the types of an engine that computes in the element type called ``name``.

    Raises:
        ConfigError: the name is not in the table, or is no floating type.
    """
    kind = dtype(name)
    return Precision(kind, accumulator(kind))


def gradient_types(outline: Outline, schedule: Sequence[Instruction], types: Precision) -> dict[str, DType]:
    """Return the type of each unit's gradient buffer: ``wide`` where a micro-batch writes it more than once.

    A loss works in chunks of tokens and adds them up, so its units count as written more than once.
    """
    found = {unit: types.kind for stage in outline.stages for unit in stage.gradient_units}
    for step in schedule:
        if isinstance(step, Loss):
            found |= dict.fromkeys(outline.stage(step.stage).gradient_units, types.wide)
        elif isinstance(step, Backward) and step.adds:
            params = outline.stage(step.stage).params
            found |= {unit: types.wide for unit, name in params if name in step.adds}
    return found


def sizes_of(
    layouts: Mapping[str, Layout], types: Precision, gradients: Mapping[str, DType], scratch: Callable[[int], int]
) -> dict[str, Sizes]:
    """Return the bytes of each unit's buffers; ``scratch`` as the communicator's ``scratch_elements``."""
    found = {}
    width = types.kind.itemsize
    for name, flat in layouts.items():
        gradient = gradients.get(name, types.kind)
        wire = 0 if gradient == types.kind else flat.total * width
        staging = wire + scratch(flat.total) * width
        found[name] = Sizes(flat.total * width, flat.total * gradient.itemsize, staging)
    return found
