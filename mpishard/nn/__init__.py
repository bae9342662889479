"""Layers with hand-written backward passes, and models as data."""
