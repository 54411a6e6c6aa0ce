"""Builds the Megatron model and computes log-probs from its hidden states.

Start with `gpt.py`, then `logprobs.py`.
"""
