"""Optimisers on flat shards, and the learning rate."""
