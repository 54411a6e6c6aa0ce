"""Describes model families: the architecture and the towers of the model in a Hugging Face folder.

Only `delta_rule.py` and `tower_passes.py` import torch. Start reading in `builtin_families.py`. Trainer, embedded
engine and memory plan use the same `Architecture`.
"""
