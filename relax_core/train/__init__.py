"""The Megatron back end. No Ray here.

Importing this package puts a finder on the import path that retargets ``megatron.core`` to the CPU where there is no
CUDA (device.py). The finder itself imports nothing heavy; torch comes in only when ``megatron.core`` does.
"""

from relax_core.train.megatron_on_cpu import device_loader as device

device.install()
