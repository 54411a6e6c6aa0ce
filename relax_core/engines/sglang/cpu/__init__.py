"""Replaces the kernels that SGLang lacks on a CPU. The package is used only by servers without a GPU.

Start reading in ``sgl_kernel/__init__.py``.
"""
