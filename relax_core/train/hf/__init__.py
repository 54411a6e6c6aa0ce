"""Maps weights between Hugging Face names and a Megatron model.

Start with `weight_rules.py`, then `hf_weights.py`.
"""
