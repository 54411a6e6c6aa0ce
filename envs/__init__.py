"""Holds environments, one file each. Every file defines a ``SPEC`` that the registry finds by the file's name.

Start reading in `single_turn.py`. `number_guess.py` is an env of several turns, and `calculator.py` is an env with a
tool.
"""
