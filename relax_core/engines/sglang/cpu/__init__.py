"""Replacements for what SGLang lacks on a CPU; they are active only in a server whose environment has no GPU.

Start reading in ``shims.py``.
"""
