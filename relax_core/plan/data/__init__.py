"""Checks the data of a run before it starts, and derives the length of the context.

Start reading in `data_check.py`.
"""
