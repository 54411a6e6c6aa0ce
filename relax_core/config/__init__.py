"""Composes, types and validates the configuration of a run.

Start reading in `compose.py`; `schema.py` has the type of every key.
"""
