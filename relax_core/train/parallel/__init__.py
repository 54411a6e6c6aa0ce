"""Arranges ranks and rows in a parallel layout.

Start with `layout_arithmetic.py`, then `process_group.py`.
"""
