"""Loss scaling: multiply the loss by a power of two, so that gradients in 16 bits neither vanish nor overflow.

fp16 holds nothing below 2**-24, and many gradients lie there; multiplied by some thousand they do not, and the update
divides again (Micikevicius et al. 2018, section 3.2). A power of two changes exponents alone, so it rounds nothing.
The rule by which it moves is that of PyTorch's GradScaler: twice as large after ``every`` finite steps in a row, half
as large after each step that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mpishard.errors import ConfigError
from mpishard.shard.entry import number

__all__ = ["HIGHEST", "LOWEST", "LossScale", "scale_problem"]

#: Below it a gradient that still overflows fp16 is larger than 2**40: the run has diverged, and a scale that went on
#: halving would end at 0 and hide it.
LOWEST = 2.0**-24
#: A run whose gradients are all zero would double for ever, and fp32 ends at 2**127. Up to here the smallest number of
#: fp16, 2**-24, divided by the scale is a normal number of fp32 by far.
HIGHEST = 2.0**64
_GROWTH = 2.0


def scale_problem(name: str, value: object) -> str:
    """Say why ``value`` can be no loss scale, and what can; nothing where it can. ``name`` is what it is called."""
    scale = number(value)
    if LOWEST <= scale <= HIGHEST and math.frexp(scale)[0] == 0.5:
        return ""
    return f"{name} is {value!r}; it must be a power of two from 2**-24 to 2**64, such as 65536"


class LossScale:
    """The scale of a run, the same on every rank: it follows from what they have agreed on.

    Args:
        scale: the first one; the only one where ``dynamic`` is False. A power of two from 2**-24 to 2**64.
        dynamic: whether it grows and backs off.
        every: finite steps in a row after which it doubles.

    Raises:
        ConfigError: one of them cannot be.
    """

    def __init__(self, scale: float = 65536.0, *, dynamic: bool = True, every: int = 2000) -> None:
        if problem := scale_problem("LossScale: scale", scale):
            raise ConfigError(problem)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"LossScale: every is {every!r}; it must be a whole number of steps, 1 or more")
        if not isinstance(dynamic, bool):
            raise ConfigError(f"LossScale: dynamic is {dynamic!r}; it must be True, or False for a fixed scale")
        self.dynamic, self.every = dynamic, every
        self.scale = float(scale)
        #: finite steps since the last change
        self.good = 0

    def __repr__(self) -> str:
        return f"LossScale({self.scale}, dynamic={self.dynamic}, every={self.every})"

    def update(self, finite: bool) -> None:
        """Note a step: whether the gradients of all ranks were finite, as they have agreed."""
        if not self.dynamic:
            return
        if not finite:
            self.scale, self.good = max(LOWEST, self.scale / _GROWTH), 0
            return
        self.good += 1
        if self.good >= self.every:
            self.scale, self.good = min(HIGHEST, self.scale * _GROWTH), 0

    def state(self) -> dict[str, float | int]:
        """Return what :meth:`restore` goes on from, as JSON can hold it."""
        return {"scale": self.scale, "good": self.good}

    def restore(self, state: Mapping[str, float | int]) -> None:
        """Go on from another one's :meth:`state`. A fixed scale stays what it is.

        Raises:
            ConfigError: it is no such state.
        """
        if problem := scale_problem("scale", state.get("scale")):
            raise ConfigError(f"the loss scale's state cannot be restored: {problem}")
        good = state.get("good")
        if isinstance(good, bool) or not isinstance(good, int) or good < 0:
            raise ConfigError(f"the loss scale's state cannot be restored: good is {good!r}; it must be a count")
        if self.dynamic:
            # A count of a run that doubled less often would be past its end here; it then doubles at the next step.
            self.scale, self.good = float(state["scale"]), good
