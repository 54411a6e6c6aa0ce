"""Transfers a published weight version to one engine.

Start with `base.py`, then `choice.py` and `collective.py`.
"""
