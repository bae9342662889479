"""How a kernel is proved without a GPU: compiled with NVRTC, and its text run on the CPU and compared.

Every launch writes into arrays with guard bytes around them, is repeated with blocks and threads taken backwards, and
where any grid is right with others; all must give the same bits. Each proof runs once in a session, whoever asks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from cupy_backends.cuda.libs import nvrtc

from mpishard.array import kernels
from mpishard.array.dtypes import accumulator, dtype
from tests.standin import emulate

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
BEFORE = "sm_75"  # has no bfloat16, and float16 as its 16 bits
GUARD = 256  # bytes
PATTERN = 0xA5
#: NVRTC's warnings are on; these are remarks that it keeps to itself, and what ptxas would not say either: conversions
#: (68, 69, 2361), code that is never reached (111), comparisons that are always true (186), parameters without use
#: (826), qualifiers without meaning (2259), registers and arrays that go to memory.
STRICT = (
    "--diag-warn=68,69,111,186,826,2259,2361",
    "--ptxas-options=--warn-on-spills",
    "--ptxas-options=--warn-on-local-memory-usage",
)
#: for what is computed in float32 throughout
NO_DOUBLE = "--ptxas-options=--warn-on-double-precision-use"
SINGLE = ("elementwise.cu", "rows.cu", "embedding.cu")


class Types(NamedTuple):
    """The element types of one build."""

    T: np.dtype
    G: np.dtype
    A: np.dtype


class At(NamedTuple):
    """A pointer to an element inside an array."""

    array: np.ndarray
    element: int


class Build(NamedTuple):
    """One file, pair of types and architecture."""

    file: str
    pair: tuple[str, str]
    architecture: str


@dataclass
class Outcome:
    """What a proof has seen: launches compared, the worst error and its bound."""

    cases: int = 0
    error: float = 0.0
    bound: float = 0.0


@dataclass(frozen=True)
class Proof:
    """``run(types, check)`` makes arguments and checks launches; ``bound`` is that of float32 accumulation."""

    kernel: str
    run: Callable[[Types, Check], None]
    bound: float
    any_grid: bool


PROOFS: dict[str, Proof] = {}


def proof(kernel: str, bound: float = 0.0, any_grid: bool = False) -> Callable[[Callable[[Types, Check], None]], None]:
    """Register the proof of a kernel; ``bound`` 0 says that every bit is compared."""

    def register(run: Callable[[Types, Check], None]) -> None:
        assert kernel not in PROOFS, kernel
        PROOFS[kernel] = Proof(kernel, run, bound, any_grid)

    return register


def types_of(pair: tuple[str, str]) -> Types:
    return Types(dtype(pair[0]), dtype(pair[1]), accumulator(dtype(pair[0])))


def builds() -> list[Build]:
    return [
        Build(file, pair, architecture)
        for file in kernels.FILES
        for pair in kernels.type_pairs(file)
        for architecture in (*ARCHITECTURES, *[BEFORE] * ("float16" in pair and "bfloat16" not in pair))
    ]


def nvrtc_compile(code: str, options: tuple[str, ...]) -> tuple[str, bytes]:
    """Return NVRTC's log and the machine code, empty where it does not compile."""
    program = nvrtc.createProgram(code, "kernels.cu", [], [])
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        return f"{error}\n{nvrtc.getProgramLog(program)}", b""
    return nvrtc.getProgramLog(program).replace("\0", "").strip(), nvrtc.getCUBIN(program)


@cache
def compiled() -> dict[Build, tuple[str, bytes]]:
    """Return the log and the machine code of every build."""

    def compile_one(build: Build) -> tuple[str, bytes]:
        options = (*kernels.options(*build.pair), f"-arch={build.architecture}", *STRICT)
        if build.file in SINGLE and "float64" not in build.pair:
            options += (NO_DOUBLE,)
        return nvrtc_compile(kernels.source(build.file), options)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(builds(), pool.map(compile_one, builds()), strict=True))


@dataclass
class Check:
    """Launches one kernel for one pair of types and compares."""

    proof: Proof
    pair: tuple[str, str]
    outcome: Outcome = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        self.kernel = kernels.KERNELS[self.proof.kernel]
        self.types = types_of(self.pair)
        self.library = emulate.library(self.kernel.file, *self.pair)
        self.rng = np.random.default_rng(zlib.crc32(repr((self.proof.kernel, self.pair)).encode()))
        if self.proof.bound:
            self.outcome.bound = 1e-13 if self.types.A.itemsize == 8 else self.proof.bound

    def normal(self, *shape: int, kind: np.dtype | None = None) -> np.ndarray:
        """Standard normal numbers of type T, or of ``kind``."""
        return self.rng.standard_normal(shape).astype(kind or self.types.T)

    def __call__(
        self, grid: int, expected: dict[str, np.ndarray], exact: bool = False, floor: float = 1.0, **arguments: Any
    ) -> None:
        """Launch with these arguments and compare all that is written.

        Args:
            grid: blocks; where any grid is right, others are tried.
            expected: what the written arrays become: fp64 references, or bits of the arrays' type where ``exact``.
            exact: whether bits are compared.
            floor: errors are relative to what is expected, or to this where that is smaller.
            arguments: arrays (or :class:`At`) and plain numbers, by the parameters' names.
        """
        where = f"{self.kernel.name} {self.pair} {self.outcome.cases}"
        found = self._launch(grid, False, arguments)
        assert set(found) == set(expected), f"{where}: compares {set(expected)} and writes {set(found)}"
        again = [(grid, True)] + ([(1, False), (grid + 3, True)] if self.proof.any_grid else [])
        for other_grid, backwards in again:
            for name, array in self._launch(other_grid, backwards, arguments).items():
                same = array.tobytes() == found[name].tobytes()
                assert same, f"{where}: {name} depends on the grid or the threads' order"
        for name, array in found.items():
            assert array.shape == expected[name].shape, f"{where}: {name}"
            if exact:
                self._same_bits(f"{where} {name}", array, expected[name])
            else:
                self._near(f"{where} {name}", array, expected[name], floor)
        self.outcome.cases += 1

    def _launch(self, grid: int, backwards: bool, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
        """Run on copies; return what is written, after a look at the guards and at what is only read."""
        copies: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        values, written = [], {}
        assert set(arguments) == {p.name for p in self.kernel.parameters}, f"{self.kernel.name}: {set(arguments)}"
        for parameter in self.kernel.parameters:
            given = arguments[parameter.name]
            kind = {"T": self.types.T, "G": self.types.G, "A": self.types.A}.get(parameter.type)
            if not parameter.pointer:
                scalar = {"i64": np.int64, "u64": np.uint64, "int": np.int32, "double": np.float64}
                values.append((kind.type if kind is not None else scalar[parameter.type])(given))
                continue
            if given is None:
                values.append(0)
                continue
            array, element = given if isinstance(given, At) else (given, 0)
            wanted = kind if kind is not None else np.dtype({"i64": "i8", "u64": "u8", "double": "f8"}[parameter.type])
            assert array.dtype == wanted, f"{self.kernel.name}: {parameter.name} was given as {array.dtype}"
            if id(array) not in copies:
                copies[id(array)] = guarded(array)
            copy = copies[id(array)][1]
            values.append(copy.ctypes.data + element * copy.itemsize)
            if parameter.written:
                written[parameter.name] = array
        self.library.launch(self.kernel.name, grid, kernels.BLOCK, values, backwards)
        changed = {id(array) for array in written.values()}
        for key, (raw, copy) in copies.items():
            inside = slice(GUARD, GUARD + copy.nbytes)
            outside = np.delete(raw, inside)
            assert (outside == PATTERN).all(), f"{self.kernel.name} {self.pair}: written beside an array"
            original = next(a.array if isinstance(a, At) else a for a in arguments.values() if is_array(a, key))
            assert key in changed or copy.tobytes() == original.tobytes(), f"{self.kernel.name}: writes what it reads"
        return {name: copies[id(array)][1] for name, array in written.items()}

    def _same_bits(self, where: str, found: np.ndarray, expected: np.ndarray) -> None:
        assert found.dtype == expected.dtype, where
        words = f"u{found.itemsize}"
        differ = np.ascontiguousarray(found).view(words) != np.ascontiguousarray(expected).view(words)
        if found.dtype.kind not in "iu":
            with np.errstate(invalid="ignore"):  # signalling NaNs
                differ &= ~(np.isnan(found) & np.isnan(expected))  # payloads are the hardware's
        places = np.argwhere(differ)[:3].tolist()
        assert not differ.any(), f"{where}: {found[differ][:3]} is to be {expected[differ][:3]} at {places}"

    def _near(self, where: str, found: np.ndarray, expected: np.ndarray, floor: float) -> None:
        wide = found.astype(np.float64)
        assert (np.isnan(wide) == np.isnan(expected)).all(), f"{where}: NaN"
        fine = np.isfinite(expected)
        assert (wide[~fine & ~np.isnan(expected)] == expected[~fine & ~np.isnan(expected)]).all(), f"{where}: infinity"
        wide, expected = wide[fine], expected[fine]
        away = np.abs(wide - expected)
        if found.itemsize == 2:  # one rounding: half a unit of its eight or eleven bits; float16's last is 2**-24
            bits, least = (9, -1074) if found.dtype == dtype("bfloat16") else (12, -25)
            away = np.maximum(away - np.ldexp(1.0, np.maximum(np.frexp(expected)[1] - bits, least)), 0.0)
        error = float((away / np.maximum(np.abs(expected), floor)).max(initial=0.0))
        self.outcome.error = max(self.outcome.error, error)
        assert error <= self.outcome.bound, f"{where}: error {error:.2e}, bound {self.outcome.bound:.0e}"


def is_array(given: Any, key: int) -> bool:
    return id(given.array if isinstance(given, At) else given) == key


def guarded(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return raw bytes and in them a copy of an array, with guard bytes on both sides."""
    raw = np.full(array.nbytes + 2 * GUARD, PATTERN, np.uint8)
    copy = raw[GUARD : GUARD + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return raw, copy


@cache
def prove(kernel: str, pair: tuple[str, str]) -> Outcome:
    """Run a kernel's proof for a pair of types."""
    check = Check(PROOFS[kernel], pair)
    check.proof.run(check.types, check)
    return check.outcome
