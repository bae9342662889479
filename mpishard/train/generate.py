"""Text from a checkpoint: the model alone is loaded, sharded over the ranks, with no optimiser state."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mpishard.checkpoint import find_weights, load, load_weights, newest
from mpishard.comm.base import Communicator
from mpishard.comm.together import same_on_all_ranks, together
from mpishard.data.tokenizer import ByteTokenizer
from mpishard.errors import CheckpointError, ConfigError
from mpishard.models.gpt2 import gpt2
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings
from mpishard.train.directory import checkpoints
from mpishard.train.public import public_sizes
from mpishard.train.room import check_room, planned
from mpishard.train.sample import sample

__all__ = ["Request", "encode_prompt", "generate", "model_directory"]


@dataclass(frozen=True)
class Request:
    """What to generate.

    Attributes:
        text, numbers: the prompt, as text for a model of bytes or as token numbers; one of them.
        count: tokens to generate.
        temperature, top_k, seed: as in :func:`~mpishard.train.sample.sample`.
    """

    text: str | None
    numbers: tuple[int, ...] | None
    count: int
    temperature: float
    top_k: int
    seed: int


def model_directory(path: Path) -> Path:
    """Return the directory with ``config.json`` and ``model.safetensors``.

    It is ``path``, that of the file ``path``, or a run's newest checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    found = newest(checkpoints(path)) if checkpoints(path).is_dir() else find_weights(path).parent
    if found is None:
        raise CheckpointError(f"{path}: holds no complete checkpoint; let the run save one (checkpoint.every)")
    for name in ("config.json", "model.safetensors"):
        if not (found / name).is_file():
            raise CheckpointError(
                f"{path}: holds no {name}; name a run directory, a checkpoint, or a directory of GPT-2 weights"
            )
    return found


def encode_prompt(request: Request, vocabulary: int) -> list[int]:
    """Return the prompt's tokens.

    Raises:
        ConfigError: it is empty, is text for a model that knows other tokens than bytes, or names a token that the
            model does not know.
    """
    if request.numbers is not None:
        tokens = list(request.numbers)
    elif vocabulary != 256:
        raise ConfigError(
            f"the model knows {vocabulary} tokens, and text is known as 256 bytes alone; give the prompt as numbers "
            "of its tokenizer, with --prompt-tokens"
        )
    else:
        # Bytes that are no text in this locale are bytes all the same.
        tokens = ByteTokenizer().encode(os.fsencode(request.text or "")).tolist()
    if not tokens:
        raise ConfigError("the prompt is empty; it must hold at least one token, as in --prompt 'def '")
    if bad := [token for token in tokens if not 0 <= token < vocabulary]:
        raise ConfigError(f"the prompt holds token {bad[0]}; the model knows 0 .. {vocabulary - 1}")
    return tokens


def generate(source: Path, request: Request, comm: Communicator, told: Callable[[int], None]) -> list[int]:
    """Return the prompt and the tokens after it; ``told`` gets each new token. Collective.

    Raises:
        ConfigError: on all ranks, for a checkpoint that cannot be read or a prompt that the model does not know.
    """
    folder = together(comm, lambda: model_directory(source))
    sizes = together(comm, lambda: public_sizes(folder / "config.json"))
    prompt = together(comm, lambda: encode_prompt(request, sizes.vocabulary))
    same_on_all_ranks(comm, [f"{folder}", f"{sizes}", f"{request}"])
    # The window is no longer than what there will be to see, and than the positions that the model knows.
    positions = sizes.positions or sizes.sequence
    window = min(positions, len(prompt) + request.count)
    model = gpt2(replace(sizes, sequence=window, positions=positions, dropout=0.0))
    settings = Settings()
    found = together(comm, lambda: planned(model, comm, None, settings, 1))
    together(comm, lambda: check_room(found.total, comm.node.local_size, comm.ops))
    engine = Engine(model, comm, comm.ops, None, settings, micro_batch=1, global_batch=comm.size, seed=0)
    if (folder / "manifest.json").exists():
        load(engine, folder)
    else:
        load_weights(engine, folder / "model.safetensors")
    return sample(
        engine,
        prompt,
        request.count,
        temperature=request.temperature,
        top_k=request.top_k,
        seed=request.seed,
        told=told,
    )
