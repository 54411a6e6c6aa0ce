"""Holds what trainer, engines and encoder share about vision towers: settings, rows of an item, patches, modules.

Start reading in `tower_settings.py`; only `tower.py` and `patches.py` import torch.
"""
