"""Models made of layers."""
