"""Holds the SGLang server process that the run starts, and Relax's changes inside it.

Start reading in ``sglang_process.py``.
"""
