"""Causal multi-head self-attention (Vaswani et al. 2017, section 3.2), worked in blocks of query rows.

[Note: blocks]
For each sequence, ``block`` query rows of all heads at a time see the keys up to their own position, so the
T x T probabilities never exist at once. Forward keeps ``lse``, the log of each row's softmax denominator, and
backward makes the probabilities of a block again from it (Dao et al. 2022, sections 3.1 and B.2).
Backward takes the blocks from the last to the first: the last one sees every key, so it writes dk and dv and
the others add.

[Note: sixteen bits]
``lse`` and ``delta`` have the accumulator's type. Where there are several blocks and dk and dv would have 16 bits, they
are gathered in the accumulator's type, one sequence at a time, and rounded once.

Shape legend: B sequences, T positions, C features, H heads, D = C / H, R rows of a block, K keys they see.
"""

from __future__ import annotations

from mpishard.array.dtypes import Array, accumulator
from mpishard.array.ops import Ops
from mpishard.nn.layer import Context, Grads, Layer, Params, ParamSpec, Saved
from mpishard.nn.linear import Linear

__all__ = ["CausalSelfAttention"]


class CausalSelfAttention(Layer):
    """x (B, T, C) -> y (B, T, C); parameters ``name.c_attn`` (C, 3C: q, k, v) and ``name.c_proj`` (C, C).

    Args:
        block: query rows worked at once, at most half of T; 0 takes all T.
        std, std_out: deviations of the initial weights of c_attn and c_proj.
    """

    def __init__(
        self, name: str, width: int, heads: int, *, block: int = 64, std: float = 0.02, std_out: float = 0.02
    ) -> None:
        self.width, self.heads, self.block = width, heads, block
        self.scale = (width // heads) ** -0.5
        self.c_attn = Linear(f"{name}.c_attn", width, 3 * width, std=std)
        self.c_proj = Linear(f"{name}.c_proj", width, width, std=std_out)

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Those of the two linear layers."""
        return self.c_attn.param_specs() + self.c_proj.param_specs()

    def _heads(self, x: Array, parts: int) -> list[list[Array]]:
        """View (B, T, parts * C) as [sequence][part] of (H, T, D)."""
        batch, length = x.shape[:2]
        split = x.reshape(batch, length, parts, self.heads, -1)
        return [[split[b, :, p].swapaxes(0, 1) for p in range(parts)] for b in range(batch)]

    def _rows(self, length: int) -> int:
        return min(self.block, -(-length // 2)) if self.block else length

    def _blocks(self, length: int) -> list[tuple[int, int]]:
        rows = self._rows(length)
        return [(start, min(start + rows, length)) for start in range(0, length, rows)]

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves x itself, q k v (B, T, 3C), the heads' outputs (B, T, C) and lse (B, H, T)."""
        batch, length, width = x.shape
        qkv = ctx.keep((batch, length, 3 * width))
        heads = ctx.keep(x.shape)
        lse = ctx.keep((batch, self.heads, length), accumulator(x.dtype))
        self.c_attn.forward(ops, ctx, params, x, qkv)
        blocks = self._blocks(length)
        with ctx.frame():
            room = ctx.scratch((self.heads * self._rows(length) * length,))
            for (q, k, v), (o,), log in zip(self._heads(qkv, 3), self._heads(heads, 1), lse):
                for first, last in blocks:
                    p = self._scores(ops, q, k, first, last, room)
                    ops.causal_softmax(p, log[:, first:last], first, self.scale)
                    ops.matmul(p, v[:, :last], o[:, first:last])
        self.c_proj.forward(ops, ctx, params, heads, y)
        return x, qkv, heads, lse

    def _scores(self, ops: Ops, q: Array, k: Array, first: int, last: int, room: Array) -> Array:
        """``q @ k.T`` (H, R, K) of query rows first..last, in ``room``."""
        scores = room[: self.heads * (last - first) * last].reshape(self.heads, last - first, last)
        ops.matmul(q[:, first:last], k[:, :last].swapaxes(1, 2), scores)
        return scores

    def backward(
        self, ops: Ops, ctx: Context, params: Params, grads: Grads, saved: Saved, dy: Array, dx: Array | None
    ) -> None:
        """With p the probabilities: dv = p.T do; ds = p * (do v.T - delta) * scale; dq = ds k; dk = ds.T q;
        delta = the row sums of do * o."""
        x, qkv, heads, lse = saved
        batch, length, _ = x.shape
        blocks, kind = self._blocks(length), accumulator(x.dtype)
        with ctx.frame():
            dheads = ctx.scratch(x.shape)
            dqkv = ctx.scratch(qkv.shape)
            delta = ctx.scratch((batch, length, self.heads), kind)
            size = self.heads * self._rows(length) * length
            room, room2 = ctx.scratch((size,)), ctx.scratch((size,))
            gathered = ctx.scratch((1, *qkv.shape[1:]), kind) if len(blocks) > 1 and kind != x.dtype else None
            self.c_proj.backward(ops, ctx, params, grads, heads, dy, dheads)
            rows = (batch * length, self.heads, -1)
            ops.row_dot(dheads.reshape(rows), heads.reshape(rows), delta.reshape(rows[:2]))
            for b in range(batch):
                q, k, v = self._heads(qkv, 3)[b]
                own = dqkv[b : b + 1]
                ((dq, dk, dv),) = self._heads(own if gathered is None else gathered, 3)
                (do,) = self._heads(dheads, 1)[b]
                for first, last in reversed(blocks):
                    add = last != length
                    p = self._scores(ops, q, k, first, last, room)
                    ops.causal_softmax(p, lse[b, :, first:last], first, self.scale, replay=True)
                    ops.matmul(p.swapaxes(1, 2), do[:, first:last], dv[:, :last], add)
                    ds = self._scores(ops, do, v, first, last, room2)
                    ops.softmax_backward(p, ds, delta[b, first:last].T, self.scale)
                    ops.matmul(ds, k[:, :last], dq[:, first:last])
                    ops.matmul(ds.swapaxes(1, 2), q[:, first:last], dk[:, :last], add)
                if gathered is not None:
                    ops.copy(gathered, own)
            self.c_attn.backward(ops, ctx, params, grads, x, dqkv, dx)
