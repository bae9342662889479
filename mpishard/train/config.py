"""The configuration: one frozen class per section, defaults in the fields, checked before anything starts.

Values come from a preset, then a TOML file, then ``--set section.key=value``; the later wins.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from mpishard.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = [
    "CommConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "ModelConfig",
    "OptimConfig",
    "ShardConfig",
    "TrainConfig",
    "check_ranks",
    "dump_toml",
    "expectation",
    "load",
    "presets",
    "sections",
    "toml_value",
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """The GPT: its shape, its initial values, and the blocks in which it is computed."""

    layers: int = Field(default=4, ge=1, le=10_000, description="transformer blocks")
    width: int = Field(
        default=128, ge=1, le=100_000_000, description="features of the residual stream; a multiple of heads"
    )
    heads: int = Field(default=4, ge=1, le=100_000_000, description="attention heads of a block")
    sequence: int = Field(default=128, ge=1, le=100_000_000, description="tokens in a sequence")
    vocabulary: int = Field(default=256, ge=1, le=100_000_000, description="tokens known; 256 for text as bytes")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of activations that are dropped")
    gelu: Literal["tanh", "exact"] = Field(default="tanh", description="form of GELU; GPT-2 has tanh")
    attention_block: int = Field(default=64, ge=0, description="query rows computed at once; 0 = the whole sequence")
    head_chunk: int = Field(default=256, ge=1, description="tokens whose logits and loss are computed at once")
    init_std: float = Field(default=0.02, gt=0, le=100, description="standard deviation of the initial weights")

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.width % self.heads:
            raise ConfigError(
                f"model.width is {self.width} and model.heads is {self.heads}; "
                "the width must be a multiple of the heads, so change one of them"
            )
        return self


class DataConfig(_Section):
    """Where the tokens come from. Both files, or neither for the default corpus: Python's own source as bytes."""

    train: str = Field(default="", description="token file to train on; empty = the default corpus")
    heldout: str = Field(default="", description="token file of held-out text; empty = the default corpus")
    epochs: int = Field(default=0, ge=0, description="passes over the training file; 0 = repeat without end")

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        for name, path in (("train", self.train), ("heldout", self.heldout)):
            if "\0" in path or path.encode(errors="replace").decode() != path:
                raise ConfigError(f"data.{name} is {path!r}; it must be a path in UTF-8: rename the file")
        if bool(self.train) != bool(self.heldout):
            given, absent = ("train", "heldout") if self.train else ("heldout", "train")
            raise ConfigError(
                f"data.{given} is set and data.{absent} is empty; name both files "
                "('mpishard data build' makes both), or neither for the default corpus"
            )
        return self


class OptimConfig(_Section):
    """AdamW, and the learning rate: a linear rise, then a half cosine down to the last step."""

    lr: float = Field(default=1e-3, gt=0, description="highest learning rate")
    lr_min: float = Field(default=0.1, ge=0, le=1, description="last learning rate, as a fraction of lr")
    warmup: int = Field(default=20, ge=0, description="steps in which the learning rate rises to lr")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment per step")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the second moment per step")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    decay: float = Field(default=0.1, ge=0, description="weight decay of matrices, per unit of learning rate")
    clip: float = Field(default=1.0, ge=0, description="largest norm of the gradient; 0 = no clipping")


class ShardConfig(_Section):
    """How parameters, gradients and moments are spread over the ranks. It changes no bit of the result."""

    strategy: Literal["full_shard", "no_shard"] = Field(
        default="full_shard",
        description="full_shard keeps 1/N of everything on each rank (ZeRO-3), no_shard a whole copy",
    )
    prefetch: int = Field(default=1, ge=0, description="units gathered ahead of the one that computes")
    recompute: Literal["none", "block"] = Field(
        default="none", description="block keeps only the input of each block and computes the rest again in backward"
    )


class TrainConfig(_Section):
    """How long, in what batches, and what is measured on the way."""

    steps: int = Field(default=200, ge=1, description="steps of the optimizer")
    global_batch: int = Field(default=16, ge=1, le=10_000_000, description="sequences in a step, over all ranks")
    micro_batch: int = Field(
        default=4, ge=1, le=10_000_000, description="sequences in one pass on one rank; divides global_batch"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="selects initial weights, data order and dropout")
    heldout_every: int = Field(default=0, ge=0, description="steps between held-out losses; 0 = only at the end")
    heldout_batches: int = Field(default=8, ge=1, description="global batches in a held-out loss, at most")
    log_every: int = Field(default=10, ge=1, description="steps between lines of the log")
    sample: int = Field(default=0, ge=0, description="bytes of text generated at the end; needs model.vocabulary 256")

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.global_batch % self.micro_batch:
            raise ConfigError(
                f"train.global_batch is {self.global_batch} and train.micro_batch is {self.micro_batch}; "
                f"the micro-batch must divide the global batch: use one of {_divisors(self.global_batch)}"
            )
        return self


class CommConfig(_Section):
    """How the ranks talk."""

    transport: Literal["auto", "mpi", "local"] = Field(
        default="auto", description="auto is mpi under mpiexec and local (one rank, no MPI) without"
    )


class DebugConfig(_Section):
    """Checks that cost time."""

    poison: bool = Field(default=False, description="fill released and not yet arrived buffers with NaN")


class Config(_Section):
    """Everything that a training run was asked to do."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    shard: ShardConfig = ShardConfig()
    train: TrainConfig = TrainConfig()
    comm: CommConfig = CommConfig()
    debug: DebugConfig = DebugConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if not self.data.train and self.model.vocabulary < 256:
            raise ConfigError(
                f"model.vocabulary is {self.model.vocabulary} and the default corpus is of bytes; "
                "set model.vocabulary to at least 256, or data.train and data.heldout to files of your own"
            )
        if self.train.sample and self.model.vocabulary != 256:
            raise ConfigError(
                f"train.sample is {self.train.sample} and model.vocabulary is {self.model.vocabulary}; "
                "text can be made of bytes alone, so set train.sample to 0 or the vocabulary to 256"
            )
        return self


def sections() -> dict[str, type[BaseModel]]:
    """Return the class of each section, by name, in the order of the file."""
    return {name: type(field.default) for name, field in Config.model_fields.items()}


def check_ranks(config: Config, size: int) -> None:
    """Check that ``size`` ranks can share a step evenly.

    Raises:
        ConfigError: they cannot; the message lists the numbers of ranks that can.
    """
    micro_batches = config.train.global_batch // config.train.micro_batch
    if micro_batches % size:
        raise ConfigError(
            f"{micro_batches} micro-batches a step (train.global_batch {config.train.global_batch} / "
            f"train.micro_batch {config.train.micro_batch}) cannot be dealt evenly to {size} ranks; "
            f"use {_divisors(micro_batches)} ranks, or change the batches"
        )


def presets() -> dict[str, str]:
    """Return what each preset is, by name: the comment in its first line."""
    files = sorted(_preset_files().items())
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in files}


def load(config_file: Path | None = None, preset: str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a preset, changed by a TOML file, changed by ``section.key=value`` entries.

    Values of ``overrides`` are TOML; what is no TOML value is taken as text, so quotes are not needed.

    Raises:
        ConfigError: a name is unknown, a value is not what its key expects, or values do not fit together.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    origins: dict[str, str] = {}
    if preset is not None:
        known = _preset_files()
        if preset not in known:
            raise ConfigError(f"there is no preset {preset!r}{_hint(preset, known)}; there are {', '.join(known)}")
        _merge(_parse(known[preset], f"preset {preset}"), f"preset {preset}", values, origins)
    if config_file is not None:
        _merge(_parse(_read(config_file), str(config_file)), str(config_file), values, origins)
    for override in overrides:
        _merge(_parse_override(override), "--set", values, origins)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first, *others = error.errors()
        key = ".".join(map(str, first["loc"][:2]))
        field = sections()[key.partition(".")[0]].model_fields[key.partition(".")[2]]
        more = f"; {len(others)} more settings are wrong" if others else ""
        raise ConfigError(
            f"{key} is {toml_value(first['input'])} in {origins[key]}; it must be {expectation(field)}{more}"
        ) from None


def dump_toml(config: Config) -> str:
    """Return the configuration as TOML that :func:`load` reads back to an equal one."""
    lines = []
    for name, entries in config.model_dump().items():
        lines += [f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in entries.items()), ""]
    return "\n".join(lines)


def toml_value(value: object) -> str:
    """Return a text, number or truth value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


def expectation(field: FieldInfo) -> str:
    """Return what a field accepts, in words: ``a whole number, at least 1``."""
    choices = get_args(field.annotation)
    if choices:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    kind = next(text for type_, text in words.items() if field.annotation is type_)
    bounds = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [
        f"{word} {getattr(item, bound)}"
        for item in field.metadata
        for bound, word in bounds.items()
        if getattr(item, bound, None) is not None
    ]
    return ", ".join([kind, " and ".join(limits)] if limits else [kind])


def _merge(table: Mapping[str, Any], origin: str, values: dict[str, dict[str, Any]], origins: dict[str, str]) -> None:
    known = sections()
    for section, entries in table.items():
        if section not in known:
            raise ConfigError(
                f"there is no section [{section}] ({origin}){_hint(section, known)}; there are {', '.join(known)}"
            )
        if not isinstance(entries, dict):
            raise ConfigError(f"{section} is {toml_value(entries)} in {origin}; it must be a section, [{section}]")
        for key, value in entries.items():
            if key not in known[section].model_fields:
                raise ConfigError(_unknown_key(section, key, origin))
            values[section][key] = value
            origins[f"{section}.{key}"] = origin


def _unknown_key(section: str, key: str, origin: str) -> str:
    full = {f"{name}.{field}": field for name, model in sections().items() for field in model.model_fields}
    own = {name: field for name, field in full.items() if name.startswith(f"{section}.")}
    # the key of another section, else a likely slip in this one, else in any
    near = [name for name, field in full.items() if field == key]
    for candidates in (own, full):
        close = difflib.get_close_matches(key, candidates.values(), n=1)
        near += [name for name, field in candidates.items() if field in close]
    hint = f", did you mean {near[0]}?" if near else ""
    return f"there is no key {section}.{key} ({origin}){hint}; 'mpishard train --help' lists all"


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]}?" if near else ""


def _parse_override(override: str) -> dict[str, Any]:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {override} cannot be read; it must be section.key=value, as in train.steps=100")
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # no TOML, a number of thousands of digits, or thousands of brackets
        table = {"value": text.strip()}
    # a line break in the text could smuggle in a second key
    return {section: {key: table["value"] if len(table) == 1 else text}}


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: is no TOML ({error}); mend that line") from None
    return table


def _read(path: Path) -> str:
    if path.is_fifo():  # opening it would wait for a writer
        raise ConfigError(f"{path}: is no regular file; name a TOML file with --config")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a TOML file with --config") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; name a TOML file with --config") from None


def _preset_files() -> dict[str, str]:
    folder = resources.files("mpishard.train") / "presets"
    files = sorted((item for item in folder.iterdir() if item.name.endswith(".toml")), key=lambda item: item.name)
    return {item.name.removesuffix(".toml"): item.read_text(encoding="utf-8") for item in files}


def _divisors(number: int) -> str:
    found = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    found = sorted({*found, *(number // n for n in found)})
    if len(found) == 1:
        return str(found[0])
    shown = [str(n) for n in found] if len(found) <= 12 else [*map(str, found[:11]), "...", str(found[-1])]
    return f"{', '.join(shown[:-1])} or {shown[-1]}"
