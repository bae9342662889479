"""What is compared: transports, each with the algorithms it has, and which of them the others are measured against.

A variant is written TRANSPORT or TRANSPORT:ALGORITHM: ``mpi`` and ``mpi:auto`` are one; ``mpi:native`` is the MPI
library's own collective, ``node:shared`` an all-gather into one copy that all ranks read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpishard.comm.segments import ALGORITHMS, ORDERED
from mpishard.errors import ConfigError

__all__ = ["DTYPE_NAMES", "KNOWN", "NATIVE", "SHARED", "Variant", "asked", "listed", "parse_baseline"]

#: transports that can be measured
KNOWN = ("mpi", "node", "hierarchical", "staged", "nccl")
NATIVE, SHARED = "native", "shared"
#: transports whose algorithms ``--algorithms`` chooses
_CHOICE = ("mpi",)
#: algorithms by transport, where there are more than ``auto``
_ALGORITHMS = {"mpi": ALGORITHMS, "node": ("auto", SHARED)}
#: names of element types, as written and as in :data:`mpishard.array.dtypes.DTYPES`
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


class Variant(NamedTuple):
    """A transport and an algorithm of it."""

    transport: str
    algorithm: str = "auto"

    @property
    def name(self) -> str:
        """As it is written: the algorithm only where one was asked for."""
        return self.transport if self.algorithm == "auto" else f"{self.transport}:{self.algorithm}"

    @property
    def native(self) -> bool:
        """Whether it is the MPI library's own."""
        return self.algorithm == NATIVE

    @property
    def ordered(self) -> bool:
        """Whether its sums are in rank order, so that every bit is known."""
        return self.algorithm in (*ORDERED, SHARED)

    @property
    def shared(self) -> bool:
        """Whether ranks gather into one copy."""
        return self.algorithm == SHARED

    def differs(self, op: str) -> bool:
        """Return whether ``op`` is another one with this algorithm than with ``auto``."""
        return (op == "all_gather") == self.shared or self.algorithm in ("auto", NATIVE)


def listed(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the words between commas, each once.

    Raises:
        ConfigError: there are none, or one is not in ``known``.
    """
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise ConfigError(f"{option} is empty; give one or more of {', '.join(known)}, between commas")
    for word in words:
        if word not in known:
            raise ConfigError(f"{option}: {word!r} is not known; choose among {', '.join(known)}")
    return words


def _variant(option: str, text: str) -> tuple[Variant, bool]:
    """Return what a name means, and whether it names an algorithm."""
    transport, colon, algorithm = text.strip().partition(":")
    if transport not in KNOWN:
        raise ConfigError(f"{option}: transport {transport!r} is not known; choose among {', '.join(KNOWN)}")
    if not colon:
        return Variant(transport), False
    has = _ALGORITHMS.get(transport, ("auto",))
    if algorithm not in has:
        raise ConfigError(f"{option}: algorithm {algorithm!r} is not one of {transport}; choose among {', '.join(has)}")
    return Variant(transport, algorithm), True


def asked(
    transports: str, algorithms: str | None = None, usual: Sequence[str] = ("auto", NATIVE)
) -> tuple[Variant, ...]:
    """Return what ``--transports`` and ``--algorithms`` ask for: ``mpi`` with each algorithm, the others as they are.

    Args:
        algorithms: None for the usual ones.
        usual: by default ``auto`` and the library's own.

    Raises:
        ConfigError: a name is not known, or algorithms were chosen of a transport that has none.
    """
    names = [name for name in transports.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--transports is empty; give one or more of {', '.join(KNOWN)}, between commas")
    chosen = usual if algorithms is None else listed("--algorithms", algorithms, ALGORITHMS)
    found: list[Variant] = []
    for name in names:
        variant, exact = _variant("--transports", name)
        if exact or variant.transport not in _CHOICE:
            found.append(variant)
        else:
            found += [Variant(variant.transport, each) for each in chosen]
    if algorithms is not None and not any(variant.transport in _CHOICE for variant in found):
        raise ConfigError(
            f"--algorithms is {algorithms} and --transports {transports} has none to choose; add mpi, or leave it out"
        )
    return tuple(dict.fromkeys(found))


def parse_baseline(text: str) -> Variant:
    """Return the variant that the others are measured against.

    Raises:
        ConfigError: its name is not known.
    """
    return _variant("--baseline", text)[0]
