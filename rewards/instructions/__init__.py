"""Contains rewards that check whether a response follows verifiable instructions.

Start reading in `ifeval.py`. instruction_checks.py has the shared code of IFEval and IFBench.
"""
