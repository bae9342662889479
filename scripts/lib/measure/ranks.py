"""What one rank does between its marks, steps of mpishard or of FSDP2: python -m measure.ranks TASK.

[Note: where the start is]
``start`` is marked when everything that a training program has before its first tensor is there: modules are imported,
the ranks are connected, one matrix product has made the buffers of the BLAS, and one collective those of the transport.
``end`` comes after the last step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random

from measure.process import Marks, forget_peak
from mpishard.models.gpt2 import Gpt2

__all__ = ["fsdp2", "ours", "tokens_of"]

LEARNING_RATE = 1e-4
PRODUCT = 512  # rows and columns of the matrix product before the start
COLLECTIVE = 1 << 18  # elements of the collective before the start


def tokens_of(sizes: Gpt2, step: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and targets (samples, T) of a step, alike on every rank."""
    windows = np.random.default_rng(step).integers(0, sizes.vocabulary, (samples, sizes.sequence + 1))
    return windows[:, :-1].copy(), windows[:, 1:].copy()


def ours(folder: Path, sizes: Gpt2, steps: int, micro_batch: int, options: dict[str, Any]) -> None:
    """Train with mpishard; ``options`` are those of ``full_shard``."""
    from mpi4py import MPI

    import mpishard
    from mpishard.comm.mpi import library
    from mpishard.models.gpt2 import gpt2
    from mpishard.optim import AdamW

    world = MPI.COMM_WORLD
    full_shard, batch = mpishard.full_shard, mpishard.batch  # loads them
    square = np.ones((PRODUCT, PRODUCT), np.float32)
    square = square @ square
    world.Allgather(square.reshape(-1)[:COLLECTIVE], np.empty(COLLECTIVE * world.size, np.float32))
    del square
    marks = Marks(folder, world.rank)
    _start(marks, world.Barrier)
    samples = micro_batch * world.size
    engine = full_shard(gpt2(sizes), AdamW(), world, global_batch=samples, micro_batch=micro_batch, **options)
    losses = [engine.step(batch(*tokens_of(sizes, step, samples)), lr=LEARNING_RATE).loss for step in range(steps)]
    world.Barrier()
    found = {"memory": engine.memory(), "losses": losses, "library": library()}
    marks("end", **found)
    world.Barrier()  # nobody ends while another measures: shared pages would become its own
    engine.close()


def fsdp2(folder: Path, sizes: Gpt2, steps: int, micro_batch: int, options: dict[str, Any]) -> None:
    """Train with PyTorch's FSDP2 over gloo: bf16 parameters, fp32 reduction, fp32 masters, fused AdamW."""
    import torch
    import torch._dynamo  # an optimiser loads it when it is made
    import torch.profiler  # and this in its first step
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from measure.gpt2_torch import Model

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    torch.ones(PRODUCT, PRODUCT) @ torch.ones(PRODUCT, PRODUCT)
    distributed.all_reduce(torch.ones(COLLECTIVE))
    marks = Marks(folder, rank)
    _start(marks, distributed.barrier)
    with torch.device("meta"):
        model = Model(sizes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            shard = param.to_local()
            shard.normal_(std=0.02) if param.ndim == 2 else shard.fill_(name.endswith("weight"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        own = slice(rank * micro_batch, (rank + 1) * micro_batch)
        inputs, targets = (torch.from_numpy(tokens[own]) for tokens in tokens_of(sizes, step, size * micro_batch))
        loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().float()
        distributed.all_reduce(mean)
        losses.append(mean.item() / size)
        del loss
    distributed.barrier()
    marks("end", losses=losses, library=f"PyTorch {torch.__version__}")
    distributed.barrier()
    distributed.destroy_process_group()


def _start(marks: Marks, barrier: Callable[[], object]) -> None:
    gc.collect()
    barrier()
    marks("start")
    forget_peak()
    barrier()


def main(arguments: Sequence[str]) -> None:
    task = json.loads(arguments[0])
    kinds = {"ours": ours, "fsdp2": fsdp2}
    run = kinds[task["kind"]]
    run(Path(task["folder"]), Gpt2(**task["sizes"]), task["steps"], task["micro_batch"], task["options"])


if __name__ == "__main__":
    main(sys.argv[1:])
