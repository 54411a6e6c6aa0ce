"""Trains a model with Megatron-core.

Start with `megatron_rank.py`, then `policy_backend.py` and `micro_batches.py`.

Importing this package installs an import finder (`megatron_on_cpu.py`). Without CUDA the finder makes ``megatron.core``
run on a CPU. The finder imports torch only when ``megatron.core`` is imported. This package does not import Ray.
"""

from relax_core.train.megatron_on_cpu import install

install()
