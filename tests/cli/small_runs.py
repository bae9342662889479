"""Runs of the program that take no time: their data, weights and arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mpishard.data.tokens import write_tokens
from mpishard.models.gpt2 import Gpt2, gpt2
from tests.cli.processes import fresh

VOCABULARY = 29


def tokens(folder: Path, name: str = "train", windows: int = 40, vocabulary: int = VOCABULARY) -> Path:
    numbers = np.random.default_rng(3).integers(0, vocabulary, windows * 9 + 1).astype(np.uint8)
    write_tokens(folder / f"{name}.tokens", [numbers], vocabulary)
    return folder / f"{name}.tokens"


def training(folder: Path, *settings: str, **files: Path) -> list[str]:
    """Arguments of a small run into ``folder/run``; settings given later win."""
    paths = {name: files.get(name) or tokens(folder, name) for name in ("train", "heldout")}
    small = {"model.layers": 1, "model.width": 6, "model.heads": 2, "model.sequence": 9, "model.vocabulary": VOCABULARY}
    small |= {"train.steps": 2, "train.global_batch": 4, "train.micro_batch": 1}
    chosen = [f"{key}={value}" for key, value in small.items()]
    chosen += [f"data.{name}={path}" for name, path in paths.items()]
    options = [word for setting in [*chosen, *settings] for word in ("--set", setting)]
    return ["train", *options, "--run-dir", str(folder / "run")]


def weights(folder: Path, **changes: np.ndarray | None) -> Path:
    """A GPT-2's weights as a public file; a change replaces a tensor, or leaves it out."""
    rng = np.random.default_rng(1)
    model = gpt2(Gpt2(layers=1, width=6, heads=2, sequence=9, vocabulary=VOCABULARY))
    found = {
        u.prefix + s.name: rng.standard_normal(s.shape).astype(np.float32) for u in model.units for s in u.specs
    }
    for name, array in changes.items():
        found.pop(name) if array is None else found.update({name: array})
    save_file(found, folder / "model.safetensors")
    return folder / "model.safetensors"


def finished(folder: Path) -> Path:
    """The directory of a run of two steps, with its checkpoint."""
    done = fresh("-m", "mpishard", *training(folder))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
