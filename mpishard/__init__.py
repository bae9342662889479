"""Fully sharded data parallelism on MPI.

In a program of one's own::

    engine = mpishard.full_shard(model, optimizer, MPI.COMM_WORLD, global_batch=32, micro_batch=4)
    engine.step(mpishard.batch(inputs, targets), lr=3e-4)

Importing this package starts neither MPI nor a GPU, and loads no array library; the names of the library
interface are loaded when they are first used, and so are the rooms: ``mpishard.nn``, ``mpishard.models``,
``mpishard.optim``, ``mpishard.comm``, ``mpishard.shard``, ``mpishard.checkpoint``, ``mpishard.testing``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishard.comm.launch import install_abort_hook
    from mpishard.shard.feed import batch
    from mpishard.shard.library import full_shard

__version__ = "0.1.0"

__all__ = ["__version__", "batch", "full_shard", "install_abort_hook"]

#: Where the names of the library interface are. A module's ``__getattr__`` (PEP 562) loads them.
_HOMES = {
    "batch": "mpishard.shard.feed",
    "full_shard": "mpishard.shard.library",
    "install_abort_hook": "mpishard.comm.launch",
}


def __getattr__(name: str) -> object:
    """Load a name of the library interface."""
    if name in _HOMES:
        value: object = getattr(import_module(_HOMES[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
