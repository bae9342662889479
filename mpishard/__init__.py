"""Fully sharded data parallelism on MPI.

Importing this package starts neither MPI nor a GPU, and loads no array library; the rooms below do what
they need when they are opened: ``mpishard.comm``, ``mpishard.nn``, ``mpishard.models``, ``mpishard.shard``,
``mpishard.train``.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
