"""The mistakes that docs/writing-a-layer.md lists, made in its own layer: each is refused in the printed words."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mpishard.nn import Layer, ParamSpec
from mpishard.testing import ContractError, check_layer
from tests.cli.processes import ROOT

DOCUMENT = (ROOT / "docs/writing-a-layer.md").read_text()
LAYER = re.search(r"class GeGlu\(Layer\):\n.*?add=True\)[^\n]*\n", DOCUMENT, re.DOTALL)[0]
LAYER = re.sub(r"```.*?```python\n", "", LAYER, flags=re.DOTALL)  # what stands between its pieces
#: first column of the table -> what is replaced by what in the layer
MISTAKES = {
    "`dx` without the second product": [("                ops.matmul(db, params[self.v].T, dx, add=True)", "")],
    "`ops.matmul(h.T, dy, dw2[0])`": [("ops.matmul(h.T, dy, *dw2)", "ops.matmul(h.T, dy, dw2[0])")],
    "`return x, a, params[self.v]`": [("return x, a, b", "return x, a, params[self.v]")],
    "`h = np.empty_like(a)` in forward": [("h = ctx.scratch(a.shape)", "h = np.empty_like(a)")],
    "`ops.fill(dy, 0.0)` at the end": [("add=True)", "add=True)\n            ops.fill(dy, 0.0)")],
    "a and b from `ctx.scratch`": [("ctx.keep(", "ctx.scratch(")],
    "`ops.fill(x, 0.0)` in forward": [("        return x, a, b", "        ops.fill(x, 0.0)\n        return x, a, b")],
    "no `if dx is not None`": [("if dx is not None:", "if True:")],
    "no `if` around dW": [("if (dw := grads[self.w]) is not None:", "if [dw := grads[self.w]]:")],
    "v left out of `param_specs`": [("(self.v, into), ", "")],
    "`ops.rsqrt(a, h)`": [("ops.gelu(a, h)", "ops.rsqrt(a, h)")],
}
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", DOCUMENT.partition("| mistake | message begins |")[2], re.MULTILINE)


def layer_of(source: str) -> type[Layer]:
    names: dict[str, object] = {"Layer": Layer, "ParamSpec": ParamSpec, "np": np}
    exec(source, names)
    return names["GeGlu"]  # type: ignore[return-value]


def test_the_table_is_complete() -> None:
    assert {mistake for mistake, _ in ROWS} == set(MISTAKES)
    assert check_layer(lambda: layer_of(LAYER)("ffn", 7, 9, std=0.5), (3, 5, 7)) < 1e-7


@pytest.mark.parametrize(("mistake", "message"), ROWS)
def test_a_mistake_and_its_message(mistake: str, message: str) -> None:
    source = LAYER
    for right, wrong in MISTAKES[mistake]:
        assert right in source
        source = source.replace(right, wrong)
    layer = layer_of(source)
    with pytest.raises(ContractError) as caught:
        check_layer(lambda: layer("ffn", 7, 9, std=0.5), (3, 5, 7))
    assert str(caught.value).startswith(message)
