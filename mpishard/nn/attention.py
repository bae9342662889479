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

[Note: recomputation]
With ``recompute`` only x is kept: q k v, the heads' outputs and lse are scratch of forward, and backward makes them
again from x by the same operations on arrays of the same shapes, so no bit of a gradient changes. Selective
recomputation (Korthikanti et al. 2022, section 5) keeps q k v and drops what has T x T elements a head. Here nothing
has, since blocks see to that already; what can still be dropped is 4 C + H numbers a token, at the price of c_attn's
product once more besides that of the scores. Where whole blocks are recomputed too, it saves nothing: what the one
block that is in backward would keep is its scratch instead.

Shape legend: B sequences, T positions, C features, H heads, D = C / H, R rows of a block, K keys they see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from mpishard.array.dtypes import Array, DType, accumulator
from mpishard.array.ops import Ops
from mpishard.nn.layer import Context, Grads, Layer, Params, ParamSpec, Saved
from mpishard.nn.linear import Linear

__all__ = ["CausalSelfAttention"]

_Take: TypeAlias = "Callable[[tuple[int, ...], DType | None], Array]"  # ctx.keep or ctx.scratch


class CausalSelfAttention(Layer):
    """x (B, T, C) -> y (B, T, C); parameters ``name.c_attn`` (C, 3C: q, k, v) and ``name.c_proj`` (C, C).

    Args:
        block: query rows worked at once, at most half of T; 0 takes all T.
        recompute: keep x alone for backward, which makes the rest again.
        std, std_out: deviations of the initial weights of c_attn and c_proj.
    """

    def __init__(
        self,
        name: str,
        width: int,
        heads: int,
        *,
        block: int = 64,
        recompute: bool = False,
        std: float = 0.02,
        std_out: float = 0.02,
    ) -> None:
        self.width, self.heads, self.block, self.recompute = width, heads, block, recompute
        self.scale = (width // heads) ** -0.5
        self.c_attn = Linear(f"{name}.c_attn", width, 3 * width, std=std)
        self.c_proj = Linear(f"{name}.c_proj", width, width, std=std_out)

    def param_specs(self) -> tuple[ParamSpec, ...]:
        """Those of the two linear layers."""
        return self.c_attn.param_specs() + self.c_proj.param_specs()

    def _heads(self, x: Array, parts: int) -> list[Array]:
        """View one sequence's (T, parts * C) as (H, T, D) for each part."""
        split = x.reshape(len(x), parts, self.heads, -1)
        return [split[:, p].swapaxes(0, 1) for p in range(parts)]

    def _rows(self, length: int) -> int:
        return min(self.block, -(-length // 2)) if self.block else length

    def _blocks(self, length: int) -> list[tuple[int, int]]:
        rows = self._rows(length)
        return [(start, min(start + rows, length)) for start in range(0, length, rows)]

    def forward(self, ops: Ops, ctx: Context, params: Params, x: Array, y: Array) -> Saved:
        """Saves x itself, and unless it recomputes q k v (B, T, 3C), the heads' outputs (B, T, C) and lse (B, H, T)."""
        kept = None if self.recompute else self._made(ctx.keep, x)
        with ctx.frame():
            made = kept or self._made(ctx.scratch, x)
            self._attend(ops, ctx, params, x, made)
            self.c_proj.forward(ops, ctx, params, made[1], y)
        return x, kept

    def _made(self, take: _Take, x: Array) -> tuple[Array, Array, Array]:
        """Room for what :meth:`_attend` makes of x."""
        batch, length, width = x.shape
        lse = (batch, self.heads, length)
        return take((batch, length, 3 * width), None), take(x.shape, None), take(lse, accumulator(x.dtype))

    def _attend(self, ops: Ops, ctx: Context, params: Params, x: Array, made: tuple[Array, Array, Array]) -> None:
        """Write q k v, the heads' outputs and lse of x: in forward, and again in backward where it recomputes."""
        qkv, heads, lse = made
        length = x.shape[1]
        self.c_attn.forward(ops, ctx, params, x, qkv)
        with ctx.frame():
            room = ctx.scratch((self.heads * self._rows(length) * length,))
            for b in ops.alike(len(x)):
                q, k, v = self._heads(qkv[b], 3)
                (o,) = self._heads(heads[b], 1)
                for first, last in self._blocks(length):
                    p = self._scores(ops, q, k, first, last, room)
                    ops.causal_softmax(p, lse[b, :, first:last], first, self.scale)
                    ops.matmul(p, v[:, :last], o[:, first:last])

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
        x, kept = saved
        batch, length, _ = x.shape
        blocks, kind = self._blocks(length), accumulator(x.dtype)
        with ctx.frame():
            made = kept or self._made(ctx.scratch, x)
            if kept is None:
                self._attend(ops, ctx, params, x, made)
            qkv, heads, lse = made
            dheads = ctx.scratch(x.shape)
            dqkv = ctx.scratch(qkv.shape)
            delta = ctx.scratch((batch, length, self.heads), kind)
            size = self.heads * self._rows(length) * length
            room, room2 = ctx.scratch((size,)), ctx.scratch((size,))
            gathered = ctx.scratch((1, *qkv.shape[1:]), kind) if len(blocks) > 1 and kind != x.dtype else None
            self.c_proj.backward(ops, ctx, params, grads, heads, dy, dheads)
            rows = (batch * length, self.heads, -1)
            ops.row_dot(dheads.reshape(rows), heads.reshape(rows), delta.reshape(rows[:2]))
            for b in ops.alike(batch):
                q, k, v = self._heads(qkv[b], 3)
                dq, dk, dv = self._heads(dqkv[b] if gathered is None else gathered[0], 3)
                (do,) = self._heads(dheads[b], 1)
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
                    ops.copy(gathered, dqkv[b : b + 1])
            self.c_attn.backward(ops, ctx, params, grads, x, dqkv, dx)
