"""A model as data: units (what is stored together) and stages (what is computed together)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from mpishard.errors import EngineError
from mpishard.nn.layer import Layer, LossLayer, ParamSpec

__all__ = ["AnyLayer", "Model", "Stage", "Unit"]

AnyLayer: TypeAlias = "Layer | LossLayer"


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and released together.

    Attributes:
        name: the unit's name in schedules, errors and reports.
        prefix: put before a spec's name to make the parameter's public name.
        specs: the parameters, in the order in which they lie in memory.
        keep: stays gathered from its first to its last use in a step (a root unit that both ends of the
            model read); else it is gathered anew whenever its turn comes.
    """

    name: str
    prefix: str
    specs: tuple[ParamSpec, ...]
    keep: bool = False


@dataclass(frozen=True)
class Stage:
    """A computation and the units it has parameters from.

    Attributes:
        units: units whose parameters forward reads and whose gradients backward makes.
        backward_units: units whose *values* backward reads (an embedding's reads none).
    """

    name: str
    layer: AnyLayer
    units: tuple[str, ...]
    backward_units: tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """Units, and stages in forward order; the last stage is the loss.

    Attributes:
        sample_shape: shape of one sample: (T,) tokens, or (F,) features.
        sample_dtype: its element type, ``int64`` for tokens.
        target_shape: shape of one sample's targets (int64): (T,), or () for one class.
        public_prefix: put before every parameter's public name in files.
        ignored: ends of names in public files that are no parameters (buffers that other tools store).
        ties: (alias, name) of parameters that public files may hold a second time under another name.
    """

    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    sample_shape: tuple[int, ...]
    sample_dtype: str
    target_shape: tuple[int, ...]
    public_prefix: str = ""
    ignored: tuple[str, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()
    _units: dict[str, Unit] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._units.update({unit.name: unit for unit in self.units})
        used: set[tuple[str, str]] = set()
        for stage in self.stages:
            if isinstance(stage.layer, LossLayer) != (stage is self.stages[-1]):
                raise EngineError(f"stage {stage.name}: the last stage, and no other, is a LossLayer")
            used |= {(self.owner(stage, spec.name).name, spec.name) for spec in stage.layer.param_specs()}
        for unit in self.units:
            names = [spec.name for spec in unit.specs]
            if twice := [name for name in names if names.count(name) > 1]:
                raise EngineError(f"unit {unit.name} holds parameter {twice[0]} twice; names are unique within a unit")
            for spec in unit.specs:
                if (unit.name, spec.name) not in used:
                    raise EngineError(f"parameter {unit.prefix}{spec.name} of unit {unit.name} is used by no stage")

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(_size(spec) for unit in self.units for spec in unit.specs)

    def unit(self, name: str) -> Unit:
        """Return the unit of that name."""
        return self._units[name]

    def owner(self, stage: Stage, param: str) -> Unit:
        """Return the unit from which a stage has the parameter its layer calls ``param``.

        Raises:
            EngineError: none of the stage's units holds it.
        """
        for name in stage.units:
            if any(spec.name == param for spec in self._units[name].specs):
                return self._units[name]
        raise EngineError(f"stage {stage.name} has no unit with parameter {param}; its units: {', '.join(stage.units)}")


def _size(spec: ParamSpec) -> int:
    size = 1
    for extent in spec.shape:
        size *= extent
    return size
