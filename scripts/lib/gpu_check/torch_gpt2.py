"""The same GPT-2 in PyTorch, written plainly: its tokens a second beside ours in one run."""

from __future__ import annotations

import gc
import math
import time
from typing import Any

from gpu_check.models import KINDS, STEPS, WARM_UP, micro_batch, sizes_of
from gpu_check.report import Report, Skip, Task
from mpishard.array.cupy_ops import CupyOps
from mpishard.models.gpt2 import Gpt2

__all__ = ["check"]


def check(task: Task, report: Report, name: str) -> None:
    try:
        import torch
    except ImportError as error:
        raise Skip(f"PyTorch is not installed ({error})") from None
    if not torch.cuda.is_available() and not task.small:
        raise Skip(f"PyTorch {torch.__version__} sees no GPU")
    device = torch.device("cuda", task.device) if torch.cuda.is_available() else torch.device("cpu")
    ours = task.known.get(name, {})
    micros = {kind: ours.get(kind, {}).get("micro-batch") or _micro(task, name, kind) for kind in KINDS}
    table = report.table(
        f"{name} in PyTorch {torch.__version__}",
        *("type", "micro-batch", "tokens/s", "step ms", "ours, tokens/s", "ours / PyTorch"),
        note=f"Eager, scaled_dot_product_attention, fused AdamW, gradients clipped; bfloat16: autocast over fp32 "
        f"weights; float32 without TF32. {WARM_UP} steps to warm up, {STEPS} timed.",
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for kind in KINDS:
        if not micros[kind]:
            report.notes.append(f"{kind} was not run: one sequence does not fit.")
            continue
        try:
            seconds = _measure(torch, device, sizes_of(task, name), kind, micros[kind])
        except torch.cuda.OutOfMemoryError:
            report.notes.append(f"{kind}: PyTorch has no room for a micro-batch of {micros[kind]}.")
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        speed = micros[kind] * sizes_of(task, name).sequence / seconds
        mine = ours.get(kind, {}).get("tokens/s")
        table.row(kind, micros[kind], speed, seconds * 1e3, mine, mine / speed if mine else None)
        report.figures[kind] = {"tokens/s": speed, "micro-batch": micros[kind]}


def _micro(task: Task, name: str, kind: str) -> int:
    """The micro-batch that the part of the same model would take."""
    return micro_batch(task, name, kind, CupyOps(task.device))[0]


def _model(torch: Any, sizes: Gpt2) -> Any:
    nn, functional = torch.nn, torch.nn.functional
    width, heads = sizes.width, sizes.heads

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            parts = self.c_attn(self.ln_1(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.attn_proj(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.mlp_proj(functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(sizes.vocabulary, width), nn.Embedding(sizes.sequence, width)
            self.blocks = nn.ModuleList(Block() for _ in range(sizes.layers))
            self.ln_f = nn.LayerNorm(width)
            for name, weight in self.named_parameters():
                if weight.ndim == 2:
                    last = name.endswith("_proj.weight")
                    nn.init.normal_(weight, std=0.02 / math.sqrt(2 * sizes.layers) if last else 0.02)

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = self.ln_f(x) @ self.wte.weight.T
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Model()


def _measure(torch: Any, device: Any, sizes: Gpt2, kind: str, micro: int) -> float:
    """Return the seconds of a step."""
    torch.manual_seed(1)
    with device:
        model = _model(torch, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(sizes.vocabulary, (micro, sizes.sequence + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=kind == "bfloat16"):
            loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARM_UP):
        step()
    wait()
    since = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    return (time.perf_counter() - since) / STEPS
