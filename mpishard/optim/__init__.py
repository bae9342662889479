"""Optimisers on flat shards, and the learning rate."""

from mpishard.optim.adamw import AdamW
from mpishard.optim.rate import WarmupCosine

__all__ = ["AdamW", "WarmupCosine"]
