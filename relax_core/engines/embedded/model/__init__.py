"""Holds the embedded engine's model: fused weights, forward pass, KV cache, and updates of the weights.

Start reading in ``decoder_model.py``.
"""
