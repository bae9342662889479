"""An engine on one rank, seen from outside: parameters and gradients by their public names."""

from __future__ import annotations

import numpy as np

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings


def engine_for(
    sizes: Gpt2,
    *,
    batch: int,
    micro_batch: int = 0,
    dtype_name: str = "float64",
    recompute: str = "none",
    poison: bool = True,
) -> Engine:
    """An engine with memory poisoned; ``micro_batch`` 0 takes the batch at once."""
    ops = NumpyOps()
    return Engine(
        gpt2(sizes),
        LocalCommunicator(ops),
        ops,
        AdamW(),
        Settings(recompute=recompute),
        micro_batch=micro_batch or batch,
        global_batch=batch,
        seed=11,
        dtype_name=dtype_name,
        poison=poison,
    )


def named(engine: Engine, array: str) -> dict[str, np.ndarray]:
    """Views of ``param``, or of ``grad`` or an optimiser's state of what is trained, in the parameters' shapes."""
    found = {}
    for part in engine.state.values():
        if array not in part.arrays and not part.trained:
            continue
        for slot in part.layout.slots:
            flat = part.arrays[array][slot.offset : slot.offset + slot.size]
            found[part.unit.prefix + slot.name] = flat.reshape(slot.shape)
    return found


def summed_gradients(engine: Engine) -> dict[str, np.ndarray]:
    """Gradients of the summed loss of the step that was run last."""
    return {name: gradient / engine._scale for name, gradient in named(engine, "grad").items()}


def widen(engine: Engine, seed: int = 5, std: float = 0.3) -> None:
    """Move all parameters well away from their initial values, biases too, so that every term of a gradient shows."""
    rng = np.random.default_rng(seed)
    for param in named(engine, "param").values():
        param += std * rng.standard_normal(param.shape)


class Batch:
    """Sequences of tokens with targets, of which ``ignored`` are not counted."""

    def __init__(self, sizes: Gpt2, batch: int, ignored: str = "none", seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, sizes.vocabulary, (batch, sizes.sequence))
        self.targets = rng.integers(0, sizes.vocabulary, (batch, sizes.sequence))
        flat = self.targets.reshape(-1)
        flat[{"none": slice(0, 0), "some": slice(0, None, 3), "all": slice(None)}[ignored]] = -100

    def __call__(self, micro: int, inputs: np.ndarray, targets: np.ndarray) -> None:
        rows = slice(micro * inputs.shape[0], (micro + 1) * inputs.shape[0])
        inputs[...] = self.tokens[rows]
        targets[...] = self.targets[rows]
