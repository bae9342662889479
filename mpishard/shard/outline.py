"""What schedules need to know of a model: names, no arrays."""

from __future__ import annotations

from mpishard.nn.model import Model
from mpishard.shard.instructions import Outline, StageOutline, UnitOutline

__all__ = ["outline_of"]


def outline_of(model: Model) -> Outline:
    """Return the names of a model's units and stages, and which stage gives a gradient to which parameter."""
    trainable = {unit.name: tuple(s.name for s in unit.specs if s.trainable) for unit in model.units}
    stages = []
    for stage in model.stages:
        owned = [(model.owner(stage, spec.name).name, spec.name) for spec in stage.layer.param_specs()]
        params = tuple((unit, name) for unit, name in owned if name in trainable[unit])
        stages.append(StageOutline(stage.name, stage.units, stage.backward_units, params))
    return Outline(tuple(UnitOutline(u.name, u.keep, trainable[u.name]) for u in model.units), tuple(stages))
