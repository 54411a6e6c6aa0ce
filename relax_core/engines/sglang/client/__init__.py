"""Holds the client of an SGLang server: requests, weights, and the check of a server that the run attaches to.

Start reading in ``sglang_client.py``.
"""
