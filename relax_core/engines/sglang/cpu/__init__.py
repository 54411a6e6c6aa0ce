"""Replaces the kernels that SGLang lacks on a CPU; it is active only in a server without a GPU.

Start reading in ``sgl_kernel/__init__.py``.
"""
