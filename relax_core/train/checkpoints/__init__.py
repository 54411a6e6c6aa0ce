"""Writes and reads checkpoints.

Start with `checkpoint_store.py` (folders), then `model_checkpoint.py` (tensors).
"""
