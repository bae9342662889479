"""A corpus of bytes from text files; by default the source of Python's own standard library.

Held-out text is chosen by whole files: a file is held out when the hash of its relative name says so. So the
held-out text is of files that training never sees, and a file that is added moves no other from one side to the other.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mpishard.array.dtypes import Array
from mpishard.data.tokenizer import ByteTokenizer
from mpishard.data.tokens import TokenFile, write_tokens
from mpishard.errors import ConfigError, DataError

__all__ = [
    "HELDOUT_FRACTION",
    "Corpus",
    "Document",
    "build_corpus",
    "ensure_default_corpus",
    "standard_library",
    "standard_library_text",
]

HELDOUT_FRACTION = 0.05
_CHUNK = 1 << 20
#: folders of the standard library that hold other people's packages, tests (often odd encodings), or no text
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """The two token files of a corpus, and how many files in its folders were no UTF-8 text."""

    train: Path
    heldout: Path
    left_out: int = 0


@dataclass(frozen=True)
class Document:
    """A stretch of bytes of one file; ``name`` is its path below the source, with ``/``."""

    name: str
    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, at most 1 MiB at a time.

        Raises:
            DataError: the file cannot be read, or became shorter.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                left = self.size
                while left:
                    data = file.read(min(left, _CHUNK))
                    if not data:
                        raise DataError(f"{self.path}: became shorter while it was read; leave it alone and try again")
                    left -= len(data)
                    yield data
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}); name text files that can be") from None


def standard_library(limit: int = 0) -> list[Document]:
    """Return the ``.py`` files of the running Python's standard library, sorted by name, without its tests.

    ``limit`` (bytes, 0 = all) ends the list before the file that would go beyond it. Installed packages are left
    out, and so are generated files that differ from machine to machine.

    Raises:
        DataError: there is no source, as in a Python that is shipped in one archive.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        document
        for document in _walk(root, _SKIPPED)
        if document.name.endswith(".py") and not document.name.startswith(("_sysconfigdata", "sitecustomize"))
    ]
    kept: list[Document] = []
    total = 0
    for document in found:
        total += document.size
        if limit and total > limit:
            break
        kept.append(document)
    if not kept:
        raise DataError(
            f"{root}: {len(found)} source files of the standard library were found and none fits in {limit} bytes; "
            "name your own text: mpishard data build --source PATH --out DIR"
        )
    return kept


def standard_library_text(limit: int = 0) -> bytes:
    """Return the text of :func:`standard_library`, file after file."""
    return b"".join(chunk for document in standard_library(limit) for chunk in document.chunks())


def build_corpus(
    directory: Path,
    sources: Sequence[Path] | None = None,
    heldout_fraction: float = HELDOUT_FRACTION,
    limit: int = 0,
) -> Corpus:
    """Write ``train.tokens`` and ``heldout.tokens``, one token per byte, into ``directory``.

    Args:
        directory: where to; made if need be.
        sources: UTF-8 files, and folders, of which every UTF-8 file that is not hidden is taken.
            None: the standard library. Where all of it is a single file, its tail is held out.
        heldout_fraction: share of the files (of the bytes, for a single file), between 0 and 1.
        limit: bytes of the standard library to use, 0 = all.

    Raises:
        ConfigError: the fraction is not between 0 and 1.
        DataError: a source is missing, cannot be read or is a file that is not UTF-8, or there is too little text.
    """
    if not 0.0 < heldout_fraction < 1.0:
        raise ConfigError(f"the held-out fraction is {heldout_fraction}; it must lie between 0 and 1, 0.05 say")
    documents, left_out = (standard_library(limit), 0) if sources is None else _documents(sources)
    train, heldout = _split(documents, heldout_fraction)
    corpus = Corpus(directory / "train.tokens", directory / "heldout.tokens", left_out)
    write_tokens(corpus.heldout, _tokens(heldout), ByteTokenizer.vocabulary)
    write_tokens(corpus.train, _tokens(train), ByteTokenizer.vocabulary)
    return corpus


def ensure_default_corpus(directory: Path, limit: int = 0) -> Corpus:
    """Return the default corpus in ``directory``; build it unless both files are there and whole.

    To be called by one rank, before the others open the files. Killed half way, it starts anew the next time;
    two jobs that build at once write the same bytes.

    Raises:
        DataError: see :func:`build_corpus`.
    """
    corpus = Corpus(directory / "train.tokens", directory / "heldout.tokens")
    try:
        for path in (corpus.train, corpus.heldout):
            TokenFile(path).verify()
    except DataError:
        return build_corpus(directory, limit=limit)
    return corpus


def _walk(root: Path, skipped: frozenset[str]) -> list[Document]:
    """Return every file below ``root`` that is neither hidden nor a link, sorted by name."""

    def unreadable(error: OSError) -> NoReturn:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); make it readable or name other sources")

    documents = []
    for parent, folders, files in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in files:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                documents.append(Document(path.relative_to(root).as_posix(), path, 0, path.stat().st_size))
    return sorted(documents, key=lambda document: document.name)


def _documents(sources: Sequence[Path]) -> tuple[list[Document], int]:
    """Return what the sources hold, and how many files of folders were left out."""
    documents: list[Document] = []
    left_out = 0
    for source in sources:
        if source.is_dir():
            found = _walk(source, frozenset())
            texts = [document for document in found if _text_end(document) is None]
            documents += texts
            left_out += len(found) - len(texts)
        elif source.is_file():
            documents.append(Document(source.name, source, 0, source.stat().st_size))
            if (end := _text_end(documents[-1])) is not None:
                raise DataError(
                    f"{source}: is not UTF-8 text from byte {end} on; convert it, with iconv say, or write its tokens "
                    "with mpishard.data.tokens.write_tokens"
                )
        else:
            raise DataError(f"{source}: there is no such file or folder; name text files or folders of them")
    # a file that is named twice must not be trained on and held out
    return list({document.path.resolve(): document for document in documents}.values()), left_out


def _text_end(document: Document) -> int | None:
    """Return the first byte that is no UTF-8; None where all of it is text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    pending = 0  # bytes of a character that the chunk before did not end
    try:
        for chunk in document.chunks():
            decoder.decode(chunk)
            read += len(chunk)
            pending = len(decoder.getstate()[0])
        decoder.decode(b"", True)
    except UnicodeDecodeError as error:
        return read - pending + error.start
    return None


def _split(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    documents = [document for document in documents if document.size]
    total = sum(document.size for document in documents)
    if total < 2:
        raise DataError(f"{total} bytes of text were found; a corpus needs text to train on and text to hold out")
    if len(documents) == 1:
        return _cut_tail(documents[0], fraction)
    ranked = sorted(documents, key=lambda document: (_score(document.name), document.name))
    # at least one file on each side, however few there are
    held = sum(_score(document.name) < fraction for document in ranked)
    held = min(max(held, 1), len(ranked) - 1)
    heldout = set(ranked[:held])
    return [d for d in documents if d not in heldout], [d for d in documents if d in heldout]


def _score(name: str) -> float:
    """Return a number in [0, 1) that depends on nothing but the name."""
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / (1 << 48)


def _cut_tail(document: Document, fraction: float) -> tuple[list[Document], list[Document]]:
    cut = min(max(int(document.size * (1.0 - fraction)), 1), document.size - 1)
    cut += document.start
    head = Document(document.name, document.path, document.start, cut)
    return [head], [Document(document.name, document.path, cut, document.stop)]


def _tokens(documents: Iterable[Document]) -> Iterator[Array]:
    encode = ByteTokenizer().encode
    return (encode(chunk) for document in documents for chunk in document.chunks())
