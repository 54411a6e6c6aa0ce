"""Holds RL algorithms, one file each. Every file defines a ``SPEC`` that the registry finds by the file's name.

Start reading in `grpo.py`. functional/ holds the shared maths, and policy_gradient/ the shared settings and loss terms.
"""
