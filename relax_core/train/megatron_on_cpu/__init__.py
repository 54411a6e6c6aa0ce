"""Runs unmodified megatron.core on a CPU.

Start with `device_loader.py`.
"""
