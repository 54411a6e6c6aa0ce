"""Benchmarks: commands that measure the numbers quoted in the README, ``python -m benchmarks.<name>``."""
