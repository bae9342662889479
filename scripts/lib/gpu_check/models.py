"""The GPT-2 models of the figures, what they cost by formula, and the micro-batch that memory holds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from gpu_check.report import Task
from mpishard.comm.local import LocalCommunicator
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.optim.adamw import AdamW
from mpishard.shard.forecast import forecast
from mpishard.shard.precision import precision
from mpishard.shard.schedule import Settings
from mpishard.shard.world import World

__all__ = [
    "ATTENTION_BLOCKS",
    "KINDS",
    "MODELS",
    "STEPS",
    "WARM_UP",
    "flops_a_token",
    "micro_batch",
    "parameters",
    "sizes_of",
]

KINDS = ("bfloat16", "float32")
WARM_UP, STEPS = 2, 3
#: Query rows that attention works at once; both are run, and the faster one is the figure.
ATTENTION_BLOCKS = (0, 512)
#: name -> (sizes, micro-batches to try, the largest first)
MODELS = {
    "gpt2-124m": (Gpt2(12, 768, 12, 1024, 50257, head_chunk=4096), (16, 8, 4, 2, 1)),
    "gpt2-1.5b": (Gpt2(48, 1600, 25, 1024, 50257, head_chunk=4096), (8, 4, 2, 1)),
}
_SMALL = Gpt2(2, 32, 2, 32, 97, head_chunk=16)
#: Bytes that stay free beside the plan: kernels of the libraries, and what other programs take meanwhile
_SLACK = 3 * 2**29


def sizes_of(task: Task, name: str, attention_block: int = 0) -> Gpt2:
    sizes: Gpt2 = task.size(MODELS[name][0], _SMALL)
    return replace(sizes, attention_block=attention_block and task.size(attention_block, 16))


def parameters(sizes: Gpt2) -> int:
    return sum(math.prod(spec.shape) for unit in gpt2(sizes).units for spec in unit.specs)


def flops_a_token(sizes: Gpt2) -> float:
    """6 P + 12 L C T: forward and backward of a token (Chowdhery et al. 2022, appendix B), attention counted whole."""
    return 6.0 * parameters(sizes) + 12.0 * sizes.layers * sizes.width * sizes.sequence


def micro_batch(task: Task, name: str, kind: str, ops: Any) -> tuple[int, int]:
    """Return (the largest micro-batch that memory holds, the bytes of the plan), or (0, the bytes of the smallest)."""
    model, settings, nbytes = gpt2(sizes_of(task, name)), Settings(), 0
    types, states, world = precision(kind, ""), AdamW().states, World.of(LocalCommunicator(ops), settings, None)
    for micro in task.size(MODELS[name][1], (2, 1)):
        found = forecast(model, states, settings, types, world, micro_batch=micro, ops_bytes=ops.own_bytes)
        nbytes = found.total
        if nbytes + task.size(_SLACK, 0) <= ops.room:
            return micro, nbytes
    return 0, nbytes
