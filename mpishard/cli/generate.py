"""``mpishard generate``."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path

import click

from mpishard.cli.options import device_option
from mpishard.errors import ConfigError

__all__ = ["generate"]


@click.command()
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A run directory (its newest checkpoint), a checkpoint, or a directory of GPT-2 weights with its config.json.",
)
@click.option("--prompt", metavar="TEXT", help="Text to go on from, for a model whose tokens are bytes.")
@click.option("--prompt-tokens", metavar="NUMBERS", help="Tokens to go on from, as in '464 3290'.")
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="Tokens to generate.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0, max=1e6),
    default=0.8,
    show_default=True,
    help="Divides the logits; 0 takes the most likely token each time.",
)
@click.option(
    "--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="Draw among the k most likely; 0 = all."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Selects what is drawn.")
@device_option
def generate(
    source: Path,
    prompt: str | None,
    prompt_tokens: str | None,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    device: str | None,
) -> int:
    """Generate text from a checkpoint.

    On one rank or several (mpiexec -n 4 mpishard generate ...); the model is sharded over them, and any number of
    ranks gives the same text. Tokens that are bytes are printed as text, others as numbers.
    """
    if (prompt is None) == (prompt_tokens is None):
        raise ConfigError("one of --prompt and --prompt-tokens is needed; give the text, or numbers of its tokens")
    if temperature != temperature:
        raise ConfigError("--temperature is nan; it must be a number, at least 0")
    numbers = None if prompt_tokens is None else _numbers(prompt_tokens)

    from mpishard.cli.job import ending_all, start
    from mpishard.train.generate import Request
    from mpishard.train.generate import generate as run

    comm = start("auto", device or "auto")
    printer = _Printer(prompt) if comm.rank == 0 else None
    with ending_all(comm):
        run(
            source,
            Request(prompt, numbers, tokens, temperature, top_k, seed),
            comm,
            printer.show if printer else lambda token: None,
        )
        if printer:
            printer.end()
    comm.close()
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    words = text.replace(",", " ").split()
    if bad := [word for word in words if not word.isdecimal() or len(word) > 18]:
        shown = bad[0] if len(bad[0]) <= 40 else f"{bad[0][:37]}..."
        raise ConfigError(f"--prompt-tokens holds {shown!r}; it must be whole numbers, as in '464 3290'")
    return tuple(map(int, words))


class _Printer:
    """Prints tokens as they come: bytes as text, after the prompt, or numbers."""

    def __init__(self, prompt: str | None) -> None:
        self._prompt = prompt
        self._begun = False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, token: int) -> None:
        """Print one token."""
        if self._prompt is None:
            print(("" if not self._begun else " ") + str(token), end="", flush=True)
        else:
            start = "" if self._begun else self._prompt
            print(start + self._decoder.decode(bytes([token])), end="", flush=True)
        self._begun = True

    def end(self) -> None:
        """Print what is left of a character, and a line break."""
        print(self._decoder.decode(b"", True), flush=True)
        sys.stdout.flush()
