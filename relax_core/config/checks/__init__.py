"""Checks a typed configuration: ranges, combinations of keys, paths.

Start reading in `validate.py`, which calls the other checks.
"""
