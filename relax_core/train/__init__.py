"""Trains a model with Megatron-core.

Start with `megatron_rank.py`, then `policy_backend.py` and `micro_batches.py`.

The import of this package installs an import finder that lets ``megatron.core`` run without CUDA
(`megatron_without_cuda.py`). The finder imports torch only when ``megatron.core`` is imported. This package imports no
Ray.
"""

from relax_core.train.megatron_without_cuda import install

install()
