"""Checkpoints: standard safetensors files that all ranks write and read at once, and a manifest.

::

    save(engine, folder / "step-00000100", configuration={"lr": 0.001})
    manifest = load(engine, newest(folder))     # on any number of ranks
    load_weights(engine, Path("model.safetensors"))
"""

from mpishard.checkpoint.directory import complete, newest, read_beside, read_manifest
from mpishard.checkpoint.loading import load
from mpishard.checkpoint.manifest import Manifest, Tensor
from mpishard.checkpoint.saving import save
from mpishard.checkpoint.weights import find_weights, load_weights

__all__ = [
    "Manifest",
    "Tensor",
    "complete",
    "find_weights",
    "load",
    "load_weights",
    "newest",
    "read_beside",
    "read_manifest",
    "save",
]
