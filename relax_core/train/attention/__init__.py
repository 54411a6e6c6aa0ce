"""Computes attention over tree-packed streams.

Start with `tree_attention.py`, which chooses between the two others.
"""
