"""The options by which commands take settings, and help that lists every one, read from the configuration itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["ConfiguredCommand", "device_option", "setting_rows", "settings_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: ``--device``: where the arrays are
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where to compute; auto is cuda where CuPy finds a GPU.",
)


def settings_options(command: _Command) -> _Command:
    """Give a command ``--config``, ``--preset`` and ``--set``: (config_file, preset, overrides)."""
    for option in (
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="One setting; may be given many times.",
        ),
        click.option("--preset", metavar="NAME", help="Settings to begin with; listed below."),
        click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="TOML file of settings.",
        ),
    ):
        command = option(command)
    return command


class ConfiguredCommand(click.Command):
    """A command whose ``--help`` ends with the presets and all settings."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the presets, then one block of settings per section."""
        from mpishard.train.config import presets, sections

        with formatter.section("Presets"):
            formatter.write_dl(list(presets().items()))
        for name, section in sections().items():
            with formatter.section(f"Settings [{name}]"):
                formatter.write_text(" ".join((section.__doc__ or "").split()))
                formatter.write_dl(list(setting_rows(name)), col_max=26)


def setting_rows(section: str) -> Iterator[tuple[str, str]]:
    """Yield each key of a section, as ``section.key``, with its description, what it accepts and its default."""
    from mpishard.train.config import expectation, sections, toml_value

    for key, field in sections()[section].model_fields.items():
        yield f"{section}.{key}", f"{field.description} ({expectation(field)}) [default: {toml_value(field.default)}]"
