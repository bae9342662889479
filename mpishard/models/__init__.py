"""Models made of layers: ``mpishard.models.gpt2`` and ``mpishard.models.mlp``."""
