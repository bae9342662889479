"""Final norm, tied output projection and cross-entropy as one computation, in chunks of tokens.

[Note: chunks]
Logits of one chunk (n, V) exist at a time; their gradient overwrites them, and is used up before the next
chunk. So the logits of a micro-batch are never whole. The number of tokens in a chunk depends on the micro-batch's
shape alone, so it changes no bit from one number of ranks to another.
"""

from __future__ import annotations

from mpishard.array.dtypes import Array, accumulator
from mpishard.array.ops import Ops
from mpishard.nn.layer import Context, Grads, LossLayer, Params, ParamSpec
from mpishard.nn.norm import LayerNorm

__all__ = ["TiedHead"]


class TiedHead(LossLayer):
    """x (B, T, C), targets (B, T) -> losses (N,): logits = ln_f(x) @ wte.T.

    Losses, and the norm's statistics, have the accumulator's type. The gradient of wte is a sum over chunks, rounded
    after each of them: where the others have 16 bits, give it the accumulator's type.

    Args:
        chunk: tokens whose logits exist at once, at most half of a micro-batch's.
    """

    def __init__(self, vocabulary: int, width: int, *, chunk: int = 256, std: float = 0.02) -> None:
        self.vocabulary, self.width, self.chunk, self.std = vocabulary, width, chunk, std
        self.ln_f = LayerNorm("ln_f", width)

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """The final norm, and the token embedding again (tied: Press & Wolf 2017)."""
        tied = ParamSpec("wte.weight", (self.vocabulary, self.width), std=self.std, decay=True)
        return *self.ln_f.param_specs(), tied

    def outputs(self) -> int:
        """V."""
        return self.vocabulary

    def loss(
        self,
        ops: Ops,
        ctx: Context,
        params: Params,
        grads: Grads | None,
        x: Array,
        targets: Array,
        losses: Array,
        scale: float,
        dx: Array | None,
    ) -> None:
        """dlogits = scale * (softmax - onehot); dwte = sum over chunks of dlogits.T @ ln_f(x)."""
        x, targets = x.reshape(-1, self.width), targets.reshape(-1)
        table = params["wte.weight"]
        dtable, add = (grads and grads["wte.weight"]) or (None, False)
        count = targets.size
        chunk = max(1, min(self.chunk, -(-count // 2)))
        with ctx.frame():
            normal = ctx.scratch(x.shape)
            mean, rstd = self._statistics(ctx, x)
            room = ctx.scratch((chunk, self.vocabulary))
            norm = (params[self.ln_f.weight], params[self.ln_f.bias])
            ops.layernorm(x, *norm, normal, mean, rstd, self.ln_f.eps)
            for part in ops.alike(-(-count // chunk)):
                start = part * chunk
                rows = slice(start, min(start + chunk, count))
                logits = room[: rows.stop - start]
                ops.matmul(normal[rows], table.T, logits)
                ops.cross_entropy(logits, targets[rows], losses[rows], scale, grads is not None)
                if dtable is not None:
                    ops.matmul(logits.T, normal[rows], dtable, add or start > 0)
                if grads is not None:
                    # This chunk's normalised rows have been used for the last time.
                    ops.matmul(logits, table, normal[rows])
            if grads is not None:
                self.ln_f.backward(ops, ctx, params, grads, (x, mean, rstd), normal, dx)

    @staticmethod
    def _statistics(ctx: Context, x: Array) -> tuple[Array, Array]:
        """Room for mean and rstd (N,) of x (N, C)."""
        kind = accumulator(x.dtype)
        return ctx.scratch(x.shape[:1], kind), ctx.scratch(x.shape[:1], kind)

    def predict(self, ops: Ops, ctx: Context, params: Params, x: Array, logits: Array) -> None:
        """Logits (N, V) of x (N, C)."""
        with ctx.frame():
            normal = ctx.scratch(x.shape)
            mean, rstd = self._statistics(ctx, x)
            ops.layernorm(x, params[self.ln_f.weight], params[self.ln_f.bias], normal, mean, rstd, self.ln_f.eps)
            ops.matmul(normal, params["wte.weight"].T, logits)
