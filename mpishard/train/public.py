"""Public GPT-2 directories: the ``config.json`` beside the weights, and what a configuration must say to fit it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from mpishard.checkpoint import find_weights, read_beside
from mpishard.errors import CheckpointError
from mpishard.models.gpt2 import Gpt2, sizes_from
from mpishard.train.config import toml_value
from mpishard.train.model import sizes_of
from mpishard.train.sections import ModelConfig

__all__ = ["check_weights", "public_sizes"]


def public_sizes(path: Path) -> Gpt2:
    """Return the sizes that a ``config.json`` describes.

    Raises:
        CheckpointError: it cannot be read, is not what was saved with the checkpoint in which it lies, or describes
            another kind of model.
    """
    content = read_beside(path)
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: is no JSON; copy or save the checkpoint again") from None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: is no table; copy or save the checkpoint again")
    return sizes_from(found, str(path))


def check_weights(model: ModelConfig) -> None:
    """Compare the settings with the ``config.json`` beside the weights to begin with, where there is one.

    Not all that it says shows in the shapes of tensors: heads and the form of GELU do not.

    Raises:
        CheckpointError: they differ, or it describes another kind of model; the settings to give are named.
    """
    path = find_weights(Path(model.init_from)).parent / "config.json"
    if not os.path.lexists(path):
        return
    theirs, ours = public_sizes(path), sizes_of(model)
    pairs = {
        "layers": (theirs.layers, ours.layers),
        "width": (theirs.width, ours.width),
        "heads": (theirs.heads, ours.heads),
        "vocabulary": (theirs.vocabulary, ours.vocabulary),
        "positions": (theirs.positions, ours.positions or ours.sequence),
        "gelu": ("tanh" if theirs.gelu_tanh else "exact", "tanh" if ours.gelu_tanh else "exact"),
    }
    if wrong := [f"model.{key}={toml_value(its)} (not {own})" for key, (its, own) in pairs.items() if its != own]:
        raise CheckpointError(f"{path}: describes another model than the settings; set {', '.join(wrong)}")
