"""Curves of loss: the same small GPT, initial weights, data, AdamW and learning rates, in mpishard and in PyTorch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import mpishard
from mpishard.data.corpus import standard_library_text
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.optim import AdamW, WarmupCosine
from mpishard.shard.engine import Engine

__all__ = ["OURS", "THEIRS", "Task", "difference", "ours", "theirs"]

OURS = ("fp32", "bf16", "fp16")
#: ``fsdp2`` is MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32) on one rank: parameters and activations
#: in bf16, masters and moments in fp32. ``autocast`` is torch.autocast over fp32 parameters: matrix products in bf16,
#: normalisation, softmax, loss and the sums between blocks in fp32.
THEIRS = ("fp32", "fsdp2", "autocast")


SMALL = Gpt2(layers=2, width=64, heads=4, sequence=64, vocabulary=256)


@dataclass(frozen=True)
class Task:
    """What all curves have in common."""

    sizes: Gpt2 = SMALL
    batch: int = 8
    steps: int = 200
    warmup: int = 20
    peak: float = 1e-3
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return WarmupCosine(self.peak, 0.1, self.warmup, self.steps)(step)

    def data(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes of text and those that follow (batch, T)."""
        rng = np.random.default_rng((self.seed, step))
        starts = rng.integers(0, len(_text()) - self.sizes.sequence - 1, self.batch)
        windows = np.stack([_text()[start : start + self.sizes.sequence + 1] for start in starts]).astype(np.int64)
        return windows[:, :-1].copy(), windows[:, 1:].copy()


@cache
def _text() -> np.ndarray:
    """The bytes of the default corpus, of 4 MiB of it."""
    return np.frombuffer(standard_library_text(1 << 22), np.uint8)


def _engine(task: Task, kind: str, **options: Any) -> Engine:
    own = {"global_batch": task.batch, "micro_batch": task.batch, "seed": task.seed, "device": "cpu"}
    return mpishard.full_shard(gpt2(task.sizes), AdamW(), dtype=kind, **{**own, **options})


def ours(task: Task, kind: str, **options: Any) -> list[float]:
    """Return the loss of every step in ``fp32``, ``bf16`` or ``fp16``; ``options`` are those of ``full_shard``."""
    engine = _engine(task, kind, **options)
    return [engine.step(mpishard.batch(*task.data(step)), lr=task.rate(step)).loss for step in range(task.steps)]


def theirs(task: Task, kind: str) -> list[float]:
    """Return the loss of every step in PyTorch; the kinds are :data:`THEIRS`."""
    import torch

    from measure.gpt2_torch import Model, fill, groups

    model = Model(task.sizes, wide_logits=True)
    fill(model, _engine(task, "fp32").parameter)
    losses = []
    with _sharded(model) if kind == "fsdp2" else nullcontext():
        adamw = AdamW()
        betas = (adamw.beta1, adamw.beta2)
        optimizer = torch.optim.AdamW(groups(model, adamw.decay), lr=0.0, betas=betas, eps=adamw.eps, fused=True)
        for step in range(task.steps):
            for group in optimizer.param_groups:
                group["lr"] = task.rate(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                loss = model(*map(torch.from_numpy, task.data(step)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), adamw.limit)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@contextmanager
def _sharded(model: Any) -> Iterator[None]:
    """Shard a model over this process alone."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in model.h:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            yield
        finally:
            distributed.destroy_process_group()


def difference(one: list[float], other: list[float]) -> float:
    """Return the mean absolute difference of two curves."""
    return float(np.mean(np.abs(np.subtract(one, other))))
