"""What schedules need to know of a model: names, no arrays."""

from __future__ import annotations

from dataclasses import replace

from mpishard.nn.model import Model, Unit
from mpishard.shard.instructions import FROZEN, Outline, StageOutline, UnitOutline

__all__ = ["outline_of", "separated"]


def separated(model: Model) -> Model:
    """Return the model with the frozen parameters of each unit that also has others in a unit of their own.

    So they are gathered beside the others, and need no gradients and no optimiser states. Public names stay.
    """
    parts: dict[str, tuple[Unit, ...]] = {}
    for unit in model.units:
        frozen = tuple(spec for spec in unit.specs if not spec.trainable)
        parts[unit.name] = (unit,)
        if frozen and len(frozen) < len(unit.specs):
            rest = tuple(spec for spec in unit.specs if spec.trainable)
            parts[unit.name] = (replace(unit, specs=rest), replace(unit, name=unit.name + FROZEN, specs=frozen))
    if all(len(each) == 1 for each in parts.values()):
        return model

    def names(units: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(unit.name for name in units for unit in parts[name])

    stages = (
        replace(stage, units=names(stage.units), backward_units=names(stage.backward_units)) for stage in model.stages
    )
    return replace(model, units=tuple(unit for each in parts.values() for unit in each), stages=tuple(stages))


def outline_of(model: Model) -> Outline:
    """Return the names of a model's units and stages, and which stage gives a gradient to which parameter."""
    trainable = {unit.name: tuple(s.name for s in unit.specs if s.trainable) for unit in model.units}
    stages = []
    for stage in model.stages:
        owned = [(model.owner(stage, spec.name).name, spec.name) for spec in stage.layer.param_specs()]
        params = tuple((unit, name) for unit, name in owned if name in trainable[unit])
        stages.append(StageOutline(stage.name, stage.units, stage.backward_units, params))
    names = {unit.name for unit in model.units}
    units = []
    for unit in model.units:
        lead = unit.name.removesuffix(FROZEN)
        beside = lead if lead != unit.name and lead in names else ""
        units.append(UnitOutline(unit.name, unit.keep, trainable[unit.name], beside))
    return Outline(tuple(units), tuple(stages))
