"""Every kernel, for every pair of types, run on the CPU from the text that a GPU runs, and compared."""

from __future__ import annotations

import pytest

from mpishard.array import kernels
from tests.array import kernel_proofs_elementwise, kernel_proofs_rows, kernel_proofs_shards  # noqa: F401 - register
from tests.array.kernel_proof import PROOFS, prove

RUNS = [(name, pair) for name, kernel in kernels.KERNELS.items() for pair in kernels.type_pairs(kernel.file)]


@pytest.mark.parametrize(("name", "pair"), RUNS, ids=lambda part: part if isinstance(part, str) else "-".join(part))
def test_kernel(name: str, pair: tuple[str, str]) -> None:
    outcome = prove(name, pair)
    assert outcome.cases > 0
    assert outcome.error <= outcome.bound


def test_a_proof_for_each_kernel() -> None:
    assert set(PROOFS) == set(kernels.KERNELS)
