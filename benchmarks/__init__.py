"""Benchmarks: the commands ``python -m benchmarks.<name>`` measure the numbers in the README."""
