"""Holds rewards that check whether a response follows instructions that a program can verify.

Start reading in `ifeval.py`; instruction_checks.py has what both benchmarks share.
"""
