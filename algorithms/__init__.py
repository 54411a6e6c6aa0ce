"""Contains RL algorithms, one per file. Every file defines a ``SPEC``. The registry finds it by the file's name.

Start reading in `grpo.py`. functional/ has the shared maths, policy_gradient/ the shared settings and loss terms.
"""
