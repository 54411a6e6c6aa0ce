"""Runs one rank of the trainer on torch's ``meta`` device and counts its memory, products, messages and host reads.

Start with `rank.py`. `counting.py` observes every operator, `stand_ins.py` replaces what only a GPU or other ranks have,
and `allocator.py` replays the allocations by the rules of CUDA's caching allocator. A process that imports this package
has ``RELAX_TRAIN_DEVICE=meta``.
"""
