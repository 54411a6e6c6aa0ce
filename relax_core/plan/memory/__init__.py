"""Computes peak memory by phase, on CPU cores and on GPUs, and the bytes that are transferred.

Start reading in `memory_terms.py`.
"""
