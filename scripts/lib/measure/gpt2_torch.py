"""GPT-2 as PyTorch users write it: modules, ``scaled_dot_product_attention``, a head tied to the embedding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mpishard.models.gpt2 import Gpt2

__all__ = ["Block", "Model", "fill", "groups"]


class Block(nn.Module):
    """A transformer block; x (B, T, C)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_proj(functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    """Returns the mean cross-entropy of the targets (B, T) of tokens (B, T).

    ``wide_logits`` computes it in fp32 whatever the logits are, which costs two more copies of them.
    """

    def __init__(self, sizes: Gpt2, wide_logits: bool = False) -> None:
        super().__init__()
        self.wide_logits = wide_logits
        self.wte = nn.Embedding(sizes.vocabulary, sizes.width)
        self.wpe = nn.Embedding(sizes.positions or sizes.sequence, sizes.width)
        self.h = nn.ModuleList(Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = functional.linear(self.ln_f(x), self.wte.weight)
        logits = logits.float() if self.wide_logits else logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


#: modules whose matrices public GPT-2 files keep as (inputs, outputs), with the names that they have there
PUBLIC = {"c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}


def fill(model: Model, read: Callable[[str], np.ndarray]) -> None:
    """Give every parameter the values that ``read`` returns for its public name."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            parts = name.split(".")
            turned = parts[-2] in PUBLIC
            value = torch.from_numpy(read(".".join(PUBLIC.get(part, part) for part in parts)))
            param.copy_(value.T if turned and value.ndim == 2 else value)


def groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Return the parameters as AdamW takes them: matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim == 2], "weight_decay": decay},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
