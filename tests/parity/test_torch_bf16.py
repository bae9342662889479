"""bfloat16 against PyTorch's bfloat16 on the CPU: both are compared with float64, and ours may not be further from it.

Errors are relative to a tensor's Frobenius norm, and means over several draws of all values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from mpishard.array.arena import Arena
from mpishard.array.constants import IGNORE
from mpishard.array.dtypes import DTYPES
from mpishard.array.numpy_ops import NumpyOps
from mpishard.nn.block import Block
from mpishard.nn.embedding import Embedding
from mpishard.nn.head import TiedHead
from mpishard.shard.runner import StepContext
from tests.parity import torch_gpt2

#: our error, of PyTorch's; 1.12 was the worst when this was written
FACTOR = 1.5
DRAWS = 5
BF16, F32 = DTYPES["bfloat16"], np.dtype(np.float32)

Values = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rounded(values: np.ndarray) -> np.ndarray:
    """Values that bfloat16 holds, in float64."""
    return values.astype(F32).astype(BF16).astype(float)


def narrow(values: Values) -> Values:
    return {name: value.astype(BF16) for name, value in values.items()}


def tensors(values: Values, kind: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value).to(kind).requires_grad_() for name, value in values.items()}


def gradients(values: dict[str, torch.Tensor]) -> Values:
    return {f"d {name}": value.grad.double().numpy() for name, value in values.items() if value.grad is not None}


def context() -> StepContext:
    return StepContext(Arena(NumpyOps(), {"saved": 1 << 24, "workspace": 1 << 24}, poison=True), BF16, 0)


def error(found: np.ndarray, truth: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(float) - truth) / np.linalg.norm(truth))


def compare(
    draw: Callable[[np.random.Generator], object],
    ours: Callable[[object], Values],
    theirs: Callable[[object, torch.dtype], Values],
) -> float:
    """Return the largest ratio of our error to PyTorch's, of any tensor."""
    errors: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in range(DRAWS):
        problem = draw(np.random.default_rng(seed))
        truth, found, others = theirs(problem, torch.float64), ours(problem), theirs(problem, torch.bfloat16)
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            errors[name].append((error(found[name], value), error(others[name], value)))
    worst = 0.0
    for name, pairs in errors.items():
        mine, other = np.sqrt(np.mean(np.square(pairs), axis=0))
        assert mine <= FACTOR * other, f"{name}: {mine:.2e} from float64, PyTorch {other:.2e}"
        worst = max(worst, mine / other)
    return worst


# --- a block


def draw_block(rng: np.random.Generator, shape: tuple[int, int, int], layer: Block) -> dict[str, Values]:
    params = {
        spec.name: rounded(spec.value + (2 / spec.shape[0] ** 0.5 if len(spec.shape) == 2 else 0.3) * 0.5 * noise)
        for spec in layer.param_specs()
        for noise in [rng.standard_normal(spec.shape)]
    }
    x, dy = rounded(rng.standard_normal(shape)), rounded(rng.standard_normal(shape))
    return {"params": params, "x": {"x": x}, "dy": {"dy": dy}}


def our_block(problem: dict[str, Values], layer: Block) -> Values:
    params, ops, ctx = narrow(problem["params"]), NumpyOps(), context()
    x, dy = problem["x"]["x"].astype(BF16), problem["dy"]["dy"].astype(BF16)
    y, dx = np.empty_like(x), np.empty_like(x)
    grads = {name: (np.empty_like(param), False) for name, param in params.items()}
    saved = layer.forward(ops, ctx, params, x, y)
    layer.backward(ops, ctx, params, grads, saved, dy, dx)
    return {"y": y, "d x": dx, **{f"d {name}": array for name, (array, _) in grads.items()}}


def their_block(problem: dict[str, Values], kind: torch.dtype, heads: int, approximate: str) -> Values:
    leaves = tensors(problem["params"] | problem["x"], kind)
    y = torch_gpt2.block(leaves, leaves["x"], heads, approximate)
    y.backward(torch.from_numpy(problem["dy"]["dy"]).to(kind))
    return {"y": y.detach().double().numpy(), **gradients(leaves)}


@pytest.mark.parametrize("tanh", [True, False], ids=["tanh", "exact"])
@pytest.mark.parametrize("rows", [0, 8], ids=["at once", "in blocks"])
@pytest.mark.parametrize(("shape", "heads"), [((2, 33, 48), 4), ((1, 65, 64), 1)])
def test_a_block(shape: tuple[int, int, int], heads: int, rows: int, tanh: bool) -> None:
    layer = Block(shape[-1], heads, tanh=tanh, attention_block=rows)
    approximate = "tanh" if tanh else "none"
    compare(
        lambda rng: draw_block(rng, shape, layer),
        lambda problem: our_block(problem, layer),
        lambda problem, kind: their_block(problem, kind, heads, approximate),
    )


# --- a model

LAYERS, HEADS, WIDTH, LENGTH, BATCH, VOCABULARY = 2, 4, 48, 33, 3, 97


def parts() -> tuple[Embedding, list[Block], TiedHead]:
    blocks = [Block(WIDTH, HEADS, attention_block=8) for _ in range(LAYERS)]
    return Embedding(VOCABULARY, LENGTH + 2, WIDTH), blocks, TiedHead(VOCABULARY, WIDTH, chunk=20)


def draw_model(rng: np.random.Generator, spread: float) -> dict[str, Values]:
    embedding, blocks, head = parts()
    specs = {spec.name: spec for layer in (embedding, head) for spec in layer.param_specs()}
    specs |= {f"h.{i}.{spec.name}": spec for i, block in enumerate(blocks) for spec in block.param_specs()}
    params = {
        name: rounded(spec.value + (spread * spec.std if spec.std else 0.1) * rng.standard_normal(spec.shape))
        for name, spec in specs.items()
    }
    tokens, targets = rng.integers(0, VOCABULARY, (2, BATCH, LENGTH))
    targets.reshape(-1)[::5] = IGNORE
    return {"params": params, "batch": {"tokens": tokens, "targets": targets}}


def our_model(problem: dict[str, Values]) -> Values:
    """The layers as the engine runs them; the tied table's gradient is gathered in float32."""
    params, ops, ctx = narrow(problem["params"]), NumpyOps(), context()
    tokens, targets = problem["batch"]["tokens"], problem["batch"]["targets"]
    embedding, blocks, head = parts()
    found = {name: np.empty(p.shape, F32 if name == "wte.weight" else BF16) for name, p in params.items()}
    grads = {name: (array, False) for name, array in found.items()}
    flow = [np.empty((BATCH, LENGTH, WIDTH), BF16) for _ in range(LAYERS + 1)]
    losses, count = np.empty(tokens.size, F32), int((targets != IGNORE).sum())
    embedding.forward(ops, ctx, params, tokens, flow[0])
    saved = []
    own = [{name.removeprefix(f"h.{i}."): p for name, p in params.items()} for i in range(LAYERS)]
    targeted = [{name.removeprefix(f"h.{i}."): g for name, g in grads.items()} for i in range(LAYERS)]
    for i, block in enumerate(blocks):
        saved.append(block.forward(ops, ctx, own[i], flow[i], flow[i + 1]))
    dy, dx = np.empty_like(flow[0]), np.empty_like(flow[0])
    head.loss(ops, ctx, params, grads, flow[-1], targets, losses, 1 / count, dy)
    for i, block in reversed(list(enumerate(blocks))):
        block.backward(ops, ctx, own[i], targeted[i], saved[i], dy, dx)
        dy, dx = dx, dy
    embedding.backward(ops, ctx, {}, grads | {"wte.weight": (found["wte.weight"], True)}, tokens, dy, None)
    loss = {"loss": np.array(losses.astype(float).sum() / count)}
    return loss | {f"d {name}": array for name, array in found.items()}


def their_model(problem: dict[str, Values], kind: torch.dtype) -> Values:
    leaves = tensors(problem["params"], kind)
    tokens, targets = (torch.from_numpy(problem["batch"][name]) for name in ("tokens", "targets"))
    loss = torch_gpt2.mean_loss(leaves, tokens, targets, layers=LAYERS, heads=HEADS, tanh=True)
    loss.backward()
    return {"loss": np.array(loss.item()), **gradients(leaves)}


@pytest.mark.parametrize("spread", [1.0, 8.0], ids=["initial", "spread"])
def test_a_model(spread: float) -> None:
    compare(lambda rng: draw_model(rng, spread), our_model, their_model)
