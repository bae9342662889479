"""Measurements of collectives and of steps over several transports in one job: docs/benchmarks.md."""

__all__: list[str] = []
