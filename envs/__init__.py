"""Holds environments, one file each. Every file defines a ``SPEC`` that the registry finds by the file's name.

Start reading in `single_turn.py`; number_guess.py shows an env of several turns, and calculator.py an env with a tool.
"""
