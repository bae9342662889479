"""The configuration from where its values come: checked before anything starts.

Values come from a preset, then a TOML file, then ``--set section.key=value``; the later wins.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mpishard.errors import ConfigError
from mpishard.shard.dealing import deal
from mpishard.train.sections import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = [
    "check_ranks",
    "dump_toml",
    "expectation",
    "load",
    "presets",
    "sections",
    "toml_value",
]


def sections() -> dict[str, type[BaseModel]]:
    """Return the class of each section, by name, in the order of the file."""
    return {name: type(field.default) for name, field in Config.model_fields.items()}


def check_ranks(config: Config, size: int) -> int:
    """Return the micro-batches of each of ``size`` ranks in a step, which they share evenly.

    Raises:
        ConfigError: they cannot; the message lists the numbers of ranks that can.
    """
    return deal(config.train.global_batch, config.train.micro_batch, size, "train.")


def presets() -> dict[str, str]:
    """Return what each preset is, by name: the comment in its first line."""
    files = sorted(_preset_files().items())
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in files}


def load(
    config_file: Path | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
) -> Config:
    """Return the settings of a preset, changed by a TOML file, changed by ``section.key=value`` entries.

    All of them change ``base``, the settings of a run that goes on.
    Values of ``overrides`` are TOML; what is no TOML value is taken as text, so quotes are not needed.

    Raises:
        ConfigError: a name is unknown, a value is not what its key expects, or values do not fit together.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    origins: dict[str, str] = {}
    if base is not None:
        _merge(base, "the checkpoint", values, origins)
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
