"""Benchmarks, each a command that measures numbers quoted in the README: ``python -m benchmarks.<name>``."""
