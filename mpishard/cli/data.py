"""``mpishard data``: make token files and look at them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

__all__ = ["build", "data", "inspect"]


@click.group(no_args_is_help=False)
def data() -> None:
    """Make token files, and look at them."""


@data.command()
@click.option(
    "--source",
    "sources",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Text file, or folder of UTF-8 files; may be given many times. Without it: Python's standard library.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where the two files go.")
@click.option(
    "--heldout-fraction",
    type=float,
    default=0.05,
    show_default=True,
    metavar="SHARE",
    help="Share of the files (of the bytes, for a single file) that is held out; between 0 and 1.",
)
def build(sources: Sequence[Path], out: Path, heldout_fraction: float) -> int:
    """Make train.tokens and heldout.tokens, one token per byte, from text. Files of these names are replaced."""
    from mpishard.data.corpus import build_corpus
    from mpishard.data.tokens import TokenFile

    corpus = build_corpus(out, sources or None, heldout_fraction)
    train, heldout = len(TokenFile(corpus.train)), len(TokenFile(corpus.heldout))
    share = heldout / (train + heldout)
    click.echo(f"{corpus.train}: {train} tokens")
    click.echo(f"{corpus.heldout}: {heldout} tokens, {share:.1%}")
    if corpus.left_out:
        click.echo(f"left out: {corpus.left_out} files that are not UTF-8 text")
    if not heldout_fraction / 3 < share < heldout_fraction * 3:
        click.echo(
            f"note: {heldout_fraction:.1%} was to be held out, and files are held out whole; "
            "with few files the share is what it is: join them into one file to cut it exactly"
        )
    return 0


@data.command()
@click.argument("file", type=click.Path(path_type=Path))
def inspect(file: Path) -> int:
    """Print what a token file holds, and verify its checksum."""
    from mpishard.data.tokens import TokenFile

    tokens = TokenFile(file)
    tokens.verify()
    click.echo(f"tokens      {len(tokens)}")
    click.echo(f"vocabulary  {tokens.vocabulary}")
    click.echo(f"type        {tokens.tokens.dtype.name}")
    click.echo(f"checksum    {tokens.checksum.hex()} (verified)")
    if tokens.vocabulary == 256:
        from mpishard.data.tokenizer import ByteTokenizer

        click.echo(f"begins      {ByteTokenizer().decode(tokens.tokens[:60])!r}")
    return 0
