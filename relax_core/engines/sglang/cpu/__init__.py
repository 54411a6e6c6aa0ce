"""Replaces what SGLang lacks on a CPU; it is active only in a server whose environment has no GPU.

Start reading in ``sgl_kernel/__init__.py``.
"""
