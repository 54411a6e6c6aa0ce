"""Runs one rank of the trainer on torch's ``meta`` device and counts its memory, products, messages and host reads.

Start with `rank.py`. `counting.py` observes every operator, and `stand_ins.py` replaces what only a GPU or other ranks
have. `counts.py` extrapolates from short models, `timeline.py` lengthens their traces of allocations, and
`allocator.py` replays a trace by the rules of CUDA's caching allocator. The rehearsing process has
``RELAX_TRAIN_DEVICE=meta``.
"""
