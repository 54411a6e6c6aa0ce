"""Holds rewards that check whether a response follows instructions that a program can verify.

Start reading in `ifeval.py`; instruction_checks.py holds the shared code of both benchmarks.
"""
