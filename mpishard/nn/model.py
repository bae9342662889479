"""A model as data: units (what is stored together) and stages (what is computed together)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeAlias

from mpishard.errors import ConfigError, EngineError
from mpishard.nn.layer import Layer, LossLayer, ParamSpec

__all__ = ["AnyLayer", "Model", "Stage", "Unit", "freeze"]

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


def freeze(model: Model, patterns: Sequence[str]) -> Model:
    """Return the model with all parameters frozen whose public name matches one of ``patterns``.

    Args:
        patterns: shell patterns (``*``, ``?``, ``[ab]``) of whole public names, such as ``h.[0-3].*``, ``wpe.weight``
            or ``*.bias``; upper and lower case differ. None of them freezes nothing.

    The model's own layers serve the new one too. What was frozen before stays frozen.

    Raises:
        ConfigError: a pattern matches no name, or nothing is left to train.
    """
    if isinstance(patterns, str):
        raise ConfigError(f"frozen is the text {patterns!r}; it must be a list of patterns, such as [{patterns!r}]")
    names = [unit.prefix + spec.name for unit in model.units for spec in unit.specs]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"frozen pattern {pattern!r} matches no parameter{_hint(pattern, names, model)}; "
                "patterns are of whole names, with * for any letters"
            )
    frozen = replace(model, units=tuple(_frozen(unit, patterns) for unit in model.units))
    if patterns and not any(spec.trainable for unit in frozen.units for spec in unit.specs):
        raise ConfigError(
            f"frozen patterns {', '.join(map(repr, patterns))} leave nothing to train; "
            f"leave out one of them, or name fewer of the {len(names)} parameters"
        )
    return frozen


def _frozen(unit: Unit, patterns: Sequence[str]) -> Unit:
    def trained(name: str) -> bool:
        return not any(fnmatchcase(unit.prefix + name, pattern) for pattern in patterns)

    return replace(unit, specs=tuple(replace(s, trainable=s.trainable and trained(s.name)) for s in unit.specs))


def _hint(pattern: str, names: Sequence[str], model: Model) -> str:
    """What may have been meant: all of a unit or layer, a name as public files have it, or names that look alike."""
    bare = pattern.removeprefix(model.public_prefix)
    near = [meant for meant in (f"{pattern}.*", bare) if any(fnmatchcase(name, meant) for name in names)]
    near += [name for alias, name in model.ties if fnmatchcase(alias, pattern)]
    near = near or difflib.get_close_matches(pattern, names, n=2)
    return f", did you mean {' or '.join(near)}?" if near else ""
