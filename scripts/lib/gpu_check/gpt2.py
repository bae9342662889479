"""Tokens a second, utilisation, and what a step spends outside matrix products, of GPT-2 at sequence 1024."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from gpu_check.arrays import Clock
from gpu_check.models import ATTENTION_BLOCKS, KINDS, STEPS, WARM_UP, flops_a_token, micro_batch, parameters, sizes_of
from gpu_check.rates import peak, rates
from gpu_check.report import Report, Task
from mpishard.array.backend import Draw
from mpishard.array.cupy_ops import CupyOps
from mpishard.array.dtypes import DTYPES, Array
from mpishard.comm.local import LocalCommunicator
from mpishard.models.gpt2 import gpt2
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings

__all__ = ["check"]

_PATTERN = 1 << 20


class _Ops(CupyOps):
    """Initial values that repeat, so that a large model starts at once; a list of products; when a host waits first."""

    products: list[tuple[Any, ...]] | None = None
    waited_at = 0.0

    def _normal(self, out: Array, draw: Draw, std: float) -> None:
        patterns = self.__dict__.setdefault("_patterns", {})
        if std not in patterns:
            patterns[std] = self.empty(_PATTERN, DTYPES["float32"])
            super()._normal(patterns[std], Draw(1, 2, 3, 0), std)
        for start in range(0, out.size, _PATTERN):
            count = min(_PATTERN, out.size - start)
            self.copy(patterns[std][:count], out[start : start + count])

    def _matmul(self, a: Array, b: Array, out: Array, add: bool) -> None:
        if self.products is not None:
            self.products.append((a, b, out, add))
        super()._matmul(a, b, out, add)

    def fetch(self, x: Array) -> Array:
        self.waited_at = self.waited_at or time.perf_counter()
        return super().fetch(x)


def check(task: Task, report: Report, name: str) -> None:
    begin = time.monotonic()
    ops = _Ops(task.device)
    best = rates(task, ops)
    sizes = sizes_of(task, name)
    report.figures["parameters"] = parameters(sizes)
    table = report.table(
        f"{name}: {parameters(sizes):,} parameters, sequence {sizes.sequence}, one GPU, AdamW",
        *("type", "micro-batch", "attention rows", "tokens/s", "step ms", "of measured rate", "of peak"),
        *("outside products", "queued in ms", "launches", "GiB"),
        note="Utilisation: (6 P + 12 L C T) tokens/s over the matrix rate measured here in the same type, and over the "
        f"vendor's peak. {WARM_UP} steps to warm up, {STEPS} timed together by events; one micro-batch a step. Outside "
        "products: 1 minus the time of the step's matrix products queued alone, in order, on the same arrays. Queued "
        "in: the host's time until it first waits; near the step's time, the host is the limit. Attention rows: query "
        "rows at once, 0 for all. Weights begin as one stretch of normal numbers repeated; random tokens.",
    )
    took = 0.0
    for kind in KINDS:
        micro, nbytes = micro_batch(task, name, kind, ops)
        if not micro:
            what = f"{nbytes / 2**30:.1f} GiB for one sequence, and {ops.room / 2**30:.1f} are free"
            report.notes.append(f"{kind} was not run: it needs {what}.")
            continue
        factor = 1.2 if kind == KINDS[0] else 7.0
        for rows in ATTENTION_BLOCKS:
            left = task.seconds - (time.monotonic() - begin)
            if took * factor > left:
                report.notes.append(f"{kind} with {rows} attention rows was not run: {left:.0f} s are left.")
                continue
            since, factor = time.monotonic(), 1.2
            found = _measure(task, ops, name, kind, micro, rows)
            took = time.monotonic() - since
            speed = found["tokens/s"] * flops_a_token(sizes)
            most = peak(ops.gpu.name, kind)
            found |= {"of measured rate": speed / best[kind], "of peak": speed / most if most else None}
            block = sizes_of(task, name, rows).attention_block
            table.row(kind, micro, block, *(found[column] for column in table.columns[3:]))
            report.require(found["loss"] > 0, f"{kind}: the loss is {found['loss']}")
            if found["tokens/s"] > report.figures.get(kind, {}).get("tokens/s", 0.0):
                report.figures[kind] = found | {"micro-batch": micro, "attention rows": rows}


def _measure(task: Task, ops: _Ops, name: str, kind: str, micro: int, rows: int) -> dict[str, Any]:
    sizes = sizes_of(task, name, rows)
    engine = Engine(
        gpt2(sizes),
        LocalCommunicator(ops),
        ops,
        AdamW(),
        Settings(),
        micro_batch=micro,
        global_batch=micro,
        seed=1,
        dtype_name=kind,
    )
    tokens = np.random.default_rng(2).integers(0, sizes.vocabulary, (micro, sizes.sequence + 1))

    def feed(_: int, inputs: Array, targets: Array) -> None:
        inputs[...], targets[...] = tokens[:, :-1], tokens[:, 1:]

    for step in range(WARM_UP):
        ops.products = [] if step == WARM_UP - 1 else None
        ops.counters.reset()
        engine.step(feed, lr=1e-4)
    products, launches, ops.products = ops.products or [], ops.counters.launches, None
    clock, queued = Clock(ops), []
    clock.start()
    for _ in range(STEPS):
        ops.waited_at, since = 0.0, time.perf_counter()
        result = engine.step(feed, lr=1e-4)
        queued.append(ops.waited_at - since)
    seconds = clock.stop() / STEPS

    def again() -> None:
        for product in products:
            ops.matmul(*product)

    inside = clock.best(again, 1, 2)
    held = sum(engine.memory().values())
    products.clear()
    engine.close()
    del engine
    gc.collect()  # its memory is given back before the next one takes its own
    return {
        "tokens/s": micro * sizes.sequence / seconds,
        "step ms": seconds * 1e3,
        "outside products": 1 - inside / seconds,
        "queued in ms": min(queued) * 1e3,
        "launches": launches,
        "GiB": held / 2**30,
        "loss": result.loss,
    }
