"""Holds the commands of `relax` beside the run itself: list, doctor, explain, eval, engines.

Each command stands in a module of its own; start reading in ``listing.py``, the shortest.
"""
