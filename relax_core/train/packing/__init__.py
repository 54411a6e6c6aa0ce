"""Packs token trees into micro-batches and streams of rows.

Start with `micro_batches.py`, then `tree_packing.py`.
"""
