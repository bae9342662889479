"""Curves of loss in 16 bits: their distance from our fp32 curve, against that of PyTorch's own bf16 from its fp32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mpishard.models.gpt2 import Gpt2
from tests.scripts.measuring import module

curves, precision = module("curves"), module("precision")
TASK = curves.Task(Gpt2(layers=2, width=48, heads=4, sequence=32, vocabulary=256), batch=8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_bf16_and_fp16_stay_as_near_to_fp32_as_pytorch() -> None:
    """200 steps on the default corpus; 1.0 (bf16) and 0.1 (fp16) times PyTorch's distance when this was written."""
    mine = {kind: curves.ours(TASK, kind) for kind in curves.OURS}
    others = {kind: curves.theirs(TASK, kind) for kind in ("fp32", precision.PYTORCH)}
    assert (TASK.steps, len(mine["fp16"])) == (200, 200)
    assert mine["fp32"][-1] < mine["fp32"][0] - 2, "it learns"
    # The same run: all that differs is the order of sums.
    assert curves.difference(mine["fp32"], others["fp32"]) < 1e-5
    found = precision.ratios(mine, others)
    assert set(found) == {"bf16", "fp16"}
    assert max(found.values()) <= precision.BAR, found
    assert min(found.values()) > 0, "16 bits were used"
