"""One line for each kernel: compiled, executed, compared. Printed with -s, and written to $MPISHARD_KERNEL_TABLE."""

from __future__ import annotations

import os
from pathlib import Path

from mpishard.array import kernels
from tests.array import kernel_proofs_elementwise, kernel_proofs_rows, kernel_proofs_shards  # noqa: F401 - register
from tests.array.kernel_proof import ARCHITECTURES, PROOFS, compiled, prove


def line(kernel: kernels.Kernel) -> tuple[str, bool]:
    """Return a kernel's line of the table, and whether all in it is as it should be."""
    pairs = kernels.type_pairs(kernel.file)
    done = [
        architecture
        for architecture in ARCHITECTURES
        if all(
            log == "" and f".text.{kernel.name}\0".encode() in code
            for build, (log, code) in compiled().items()
            if (build.file, build.architecture) == (kernel.file, architecture)
        )
    ]
    if kernel.name not in PROOFS:
        return f"kernel {kernel.name}  compiled {' '.join(done) or 'nowhere'}  not executed", False
    try:
        outcomes = [prove(kernel.name, pair) for pair in pairs]
    except AssertionError as error:
        return f"kernel {kernel.name}  compiled {' '.join(done) or 'nowhere'}  failed: {error}", False
    worst = max(outcomes, key=lambda outcome: outcome.error / outcome.bound if outcome.bound else 0.0)
    text = f"{worst.error:.1e} (bound {worst.bound:.0e})" if worst.bound else "0 (bound 0: every bit)"
    cases = sum(outcome.cases for outcome in outcomes)
    return (
        f"kernel {kernel.name}  compiled {' '.join(done) or 'nowhere'}  executed {cases} cases  "
        f"compared worst error {text}",
        done == list(ARCHITECTURES) and all(outcome.cases for outcome in outcomes),
    )


def test_every_kernel_is_compiled_executed_and_compared() -> None:
    lines = [line(kernel) for kernel in kernels.KERNELS.values()]
    table = "\n".join(text for text, _ in lines) + "\n"
    print(f"\n{table}", end="")
    if path := os.environ.get("MPISHARD_KERNEL_TABLE"):
        Path(path).write_text(table)
    assert [text for text, good in lines if not good] == []
