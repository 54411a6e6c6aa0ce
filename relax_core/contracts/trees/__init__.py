"""Holds what a token tree is made of: its chains of rows, kept sets of tokens, rotary positions.

Start reading in `chains.py`; the tree itself is in `relax_core/contracts/tree.py`.
"""
