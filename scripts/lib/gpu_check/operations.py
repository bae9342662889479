"""Every operation over its table of cases: the GPU's results beside NumPy's."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gpu_check.arrays import from_device, on_device
from gpu_check.report import Report, Skip, Task
from mpishard.array.cupy_ops import CupyOps
from mpishard.array.dtypes import DTYPES, accumulator
from mpishard.array.numpy_ops import NumpyOps

__all__ = ["check", "op_cases"]

ROOT = Path(__file__).resolve().parents[3]
KINDS = ("float32", "float64", "bfloat16", "float16")
#: Of the accumulator's type, times the length of the case's sums, times its largest value.
BOUND = {"float32": 2e-6, "float64": 2e-14}
#: Two results that are rounded to 16 bits may fall to neighbours: a whole unit of the last place, relative to a number
#: that is not below the second one.
UNITS = {"bfloat16": (2.0**-7, 0.0), "float16": (2.0**-10, 2.0**-14)}
#: Operations of one rounding, or of a defined order of roundings: the same bits as NumPy.
SAME_BITS = {
    *("add", "adamw", "copy", "dropout", "embedding", "embedding_backward", "exact_sum", "fill"),
    *("fingerprint", "multiply", "normal", "ordered_sum"),
}


def op_cases() -> list[Any]:
    """Return the cases of this checkout's tests, which need NumPy alone.

    Raises:
        Skip: they are not there.
    """
    if not (ROOT / "tests" / "array" / "op_cases.py").exists():
        raise Skip("tests/array/op_cases.py is not beside the scripts; run this from a checkout")
    # A distribution that installed its own folder "tests" would come first, since this one is no package.
    package = ModuleType("tests")
    package.__path__ = [str(ROOT / "tests")]
    sys.modules.setdefault("tests", package)
    from tests.array.op_cases import CASES

    return list(CASES)


def check(task: Task, report: Report) -> None:
    ops = CupyOps(task.device)
    cases = op_cases()
    if task.small:
        cases = [case for i, case in enumerate(cases) if case.op not in {c.op for c in cases[:i]}]
    table = report.table(
        "Operations on the GPU beside NumPy's",
        *("operation", "runs", "same bits", *(f"error/bound {kind}" for kind in KINDS)),
        note=f"Bounds: {BOUND['float32']:g} for float32 (and sums of 16 bits), {BOUND['float64']:g} for float64, of "
        "the largest value and more for long sums, as in the tests; a 16-bit result may be one unit of its last "
        f"place away. These must have NumPy's bits: {', '.join(sorted(SAME_BITS))}.",
    )
    for name in sorted({case.op for case in cases}):
        runs = same = 0
        worst: dict[str, float | None] = dict.fromkeys(KINDS)
        for case in cases:
            for kind, wide in _types(case) if case.op == name else ():
                arguments = _arguments(case, kind, wide)
                if not offered(name, arguments):
                    continue
                error, equal, problem = _compare(ops, case, arguments, kind)
                runs, same = runs + 1, same + equal
                worst[kind] = max(worst[kind] or 0.0, error)
                label = f"{case} in {kind}{', sums in float32' if wide else ''}"
                report.require(not problem, f"{label}: {problem}")
                report.require(error <= 1.0, f"{label}: {error:.3g} times the bound from NumPy's result")
                report.require(equal or name not in SAME_BITS, f"{label}: other bits than NumPy's")
        table.row(name, runs, same, *worst.values())
    report.figures["runs"] = sum(row[1] for row in table.rows)


def _types(case: Any) -> list[tuple[str, bool]]:
    kinds = [(kind, False) for kind in KINDS if kind in case.kinds]
    return kinds + [(kind, True) for kind in UNITS if case.either and kind in case.kinds]


def _arguments(case: Any, kind: str, wide: bool) -> dict[str, Any]:
    arguments = dict(case.make(np.random.default_rng(1), DTYPES[kind]))
    for name in case.either if wide else ():
        if arguments[name] is not None:
            arguments[name] = arguments[name].astype(accumulator(DTYPES[kind]))
    return arguments


def offered(name: str, arguments: dict[str, Any]) -> bool:
    """Whether the GPU has kernels for the types of a case."""
    if name == "ordered_sum":
        return all(accumulator(block.dtype) == arguments["out"].dtype for block in arguments["blocks"])
    if name == "adamw" and arguments["cast"] is not None:
        return bool(accumulator(arguments["cast"].dtype) == arguments["param"].dtype)
    return True


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    """Name -> array; of lists under name.0, name.1, ..."""
    found = {}
    for name, value in arguments.items():
        several = {f"{name}.{i}": item for i, item in enumerate(value)} if isinstance(value, list) else {name: value}
        found |= {label: item for label, item in several.items() if hasattr(item, "strides")}
    return found


def _compare(ops: Any, case: Any, arguments: dict[str, Any], kind: str) -> tuple[float, bool, str]:
    """Return the largest error over its bound, whether all bits are equal, and what else is wrong."""
    on_gpu = {name: on_device(ops, value) for name, value in arguments.items()}
    expected = case.reference(**{name: _widened(value) for name, value in arguments.items()})
    rounded = expected.pop("rounded", 0.0)
    on_host = copy.deepcopy(arguments)
    with np.errstate(all="ignore"):
        answer = getattr(NumpyOps(), case.op)(**on_host)
    found_answer = getattr(ops, case.op)(**on_gpu)
    if found_answer != answer:
        return 0.0, False, f"it gives {found_answer} and NumPy {answer}"
    worst, same, problem = 0.0, True, ""
    for name, want in _flat(on_host).items():
        got = from_device(ops, _flat(on_gpu)[name])
        if got.tobytes() == want.tobytes():
            continue
        if name not in expected:
            problem = f"it changed its argument {name}"
        counts = ~np.isnan(np.asarray(expected.get(name, 0.0), float))  # NaN: values that mean nothing
        wide, ours = (case.read(a) if case.read else a.astype(float) for a in (want, got))
        if np.isnan(ours[counts]).any():
            return float("inf"), False, f"{name} has NaN"
        limit = BOUND[accumulator(DTYPES[kind]).name] * case.loose * max(1.0, abs(wide[counts]).max(initial=0.0))
        unit, least = UNITS.get(want.dtype.name, (0.0, 0.0))
        limits = limit + unit * np.maximum(abs(wide) + abs(rounded), least)
        worst = max(worst, float((abs(ours - wide) / limits)[counts].max(initial=0.0)))
        # Zero has two signs, which compare equal, and an accumulator without rounding many ways to write one sum.
        same = same and bool((ours == wide)[counts].all())
    return worst, same, problem


def _widened(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind not in "iu":
        return value.astype(np.float64)
    return [_widened(item) for item in value] if isinstance(value, list) else copy.copy(value)
