"""Optimisers on flat shards, the learning rate, and the loss scale."""

from mpishard.optim.adamw import AdamW
from mpishard.optim.rate import WarmupCosine
from mpishard.shard.loss_scale import LossScale

__all__ = ["AdamW", "LossScale", "WarmupCosine"]
