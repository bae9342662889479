"""Element types of a step: what it computes in, what is kept between steps, what travels.

[Note: rounding points]
With a 16-bit ``kind``, parameters are rounded to it when they are gathered, activations when they are written, and a
rank's gradient of a micro-batch once, to ``wire``, when it is reduced. A gradient that is written more than once before
its Reduce, or travels in another type than ``kind``, is gathered in ``wide`` and rounded there, on one rank too.
Masters, gradient shards, moments, losses and statistics are ``wide`` (Micikevicius et al. 2018, section 3.1; Kalamkar
et al. 2019, section 3, for bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpishard.array.dtypes import DType, accumulator, dtype, name_of
from mpishard.errors import ConfigError
from mpishard.shard.instructions import Backward, Instruction, Loss, Outline
from mpishard.shard.layout import Layout
from mpishard.shard.place import Sizes

__all__ = ["Precision", "Scratch", "gradient_types", "precision", "sizes_of"]

#: a transport's ``scratch_bytes``: (elements, their type, the type that travels) -> bytes
Scratch = Callable[[int, DType, DType], int]


@dataclass(frozen=True)
class Precision:
    """The types of one engine.

    Attributes:
        kind: gathered parameters and activations.
        wire: gradients on their way between ranks.
        wide: masters, gradient shards, optimiser states and sums.
    """

    kind: DType
    wire: DType
    wide: DType

    @property
    def mixed(self) -> bool:
        """Whether parameters are kept in a wider type than they are computed with."""
        return self.kind != self.wide

    @property
    def overflows(self) -> bool:
        """Whether gradients pass through float16, whose range ends at 65504: they need a loss scale."""
        return dtype("float16") in (self.kind, self.wire)


def precision(name: str, wire: str = "") -> Precision:
    """Return the types of an engine that computes in the element type called ``name``.

    Args:
        wire: element type of gradients on their way; empty for ``name``.

    Raises:
        ConfigError: a name is not in the table or is no floating type, or the two have no common accumulator.
    """
    kind = dtype(name)
    wide = accumulator(kind)
    travels = dtype(wire) if wire else kind
    if accumulator(travels) != wide:
        raise ConfigError(
            f"gradients of {name} cannot travel in {wire}; choose float32, bfloat16 or float16"
            if wide == dtype("float32")
            else f"gradients of {name} travel in {name_of(wide)} alone, not in {wire}; leave the type out"
        )
    return Precision(kind, travels, wide)


def gradient_types(outline: Outline, schedule: Sequence[Instruction], types: Precision) -> dict[str, DType]:
    """Return the type of each unit's gradient buffer: ``wide`` where it is written more than once before its Reduce.

    A loss works in chunks of tokens and adds them up, so its units count as written more than once. So do all units
    where what travels is not what is computed in.
    """
    usual = types.kind if types.kind == types.wire else types.wide
    found = {unit: usual for stage in outline.stages for unit in stage.gradient_units}
    for step in schedule:
        if isinstance(step, Loss):
            found |= dict.fromkeys(outline.stage(step.stage).gradient_units, types.wide)
        elif isinstance(step, Backward) and step.adds:
            params = outline.stage(step.stage).params
            found |= {unit: types.wide for unit, name in params if name in step.adds}
    return found


def sizes_of(
    layouts: Mapping[str, Layout],
    types: Precision,
    gradients: Mapping[str, DType],
    scratch: Scratch,
    across: Scratch | None = None,
    groups: int = 1,
    sharers: int = 1,
) -> dict[str, Sizes]:
    """Return the bytes of each unit's buffers.

    Args:
        scratch: of the transport that gathers and reduces.
        across: of the one that adds up over ``groups`` groups, where there are several.
        sharers: ranks that share what is gathered; each counts its part.
    """
    found: dict[str, Sizes] = {}
    known: dict[tuple[int, DType], Sizes] = {}
    for name, flat in layouts.items():
        gradient = gradients.get(name, types.kind)
        key = (flat.total, gradient)
        if key not in known:
            beside = 0
            if across is not None:
                held = flat.shard * groups
                beside = flat.shard * types.wide.itemsize + across(held, types.wide, types.wide)
            known[key] = Sizes(
                flat.total // sharers * types.kind.itemsize,
                flat.total * gradient.itemsize,
                scratch(flat.total, gradient, types.wire),
                beside,
            )
        found[name] = known[key]
    return found
