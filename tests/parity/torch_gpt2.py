"""GPT-2 in PyTorch, written plainly from the paper and the names of its public checkpoints: no code in common."""

from __future__ import annotations

import math

import torch
from torch.nn import functional


def block(p: dict[str, torch.Tensor], x: torch.Tensor, heads: int, approximate: str) -> torch.Tensor:
    """x (B, T, C); linear layers store (inputs, outputs), as TensorFlow's Conv1D did."""
    batch, length, width = x.shape
    size = width // heads
    normal = functional.layer_norm(x, (width,), p["ln_1.weight"], p["ln_1.bias"], 1e-5)
    fused = normal @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"]
    q, k, v = (part.view(batch, length, heads, size).transpose(1, 2) for part in fused.split(width, dim=2))
    scores = q @ k.transpose(2, 3) / math.sqrt(size)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v
    mixed = mixed.transpose(1, 2).reshape(batch, length, width)
    x = x + mixed @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]
    normal = functional.layer_norm(x, (width,), p["ln_2.weight"], p["ln_2.bias"], 1e-5)
    hidden = functional.gelu(normal @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"], approximate=approximate)
    return x + hidden @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]


def mean_loss(
    params: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor, *, layers: int, heads: int, tanh: bool
) -> torch.Tensor:
    """Mean cross-entropy of the targets that are not -100."""
    x = params["wte.weight"][tokens] + params["wpe.weight"][: tokens.shape[1]]
    for i in range(layers):
        start = f"h.{i}."
        own = {name[len(start) :]: p for name, p in params.items() if name.startswith(start)}
        x = block(own, x, heads, "tanh" if tanh else "none")
    x = functional.layer_norm(x, x.shape[-1:], params["ln_f.weight"], params["ln_f.bias"], 1e-5)
    logits = x @ params["wte.weight"].T
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
