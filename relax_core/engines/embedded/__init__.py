"""Holds the embedded engine: one process that decodes batches on a CPU and serves SGLang's HTTP protocol on loopback.

Start reading in ``assembly.py``, which builds the engine from its parts.
"""
