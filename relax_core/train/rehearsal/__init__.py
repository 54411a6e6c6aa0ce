"""Runs one rank of the trainer on torch's ``meta`` device and counts its memory, products, messages and host reads.

Start with `rank.py`. `counting.py` observes every operator, and `stand_ins.py` replaces GPU kernels and other ranks.
`counts.py` extrapolates the counts of short models to the complete model. `timeline.py` lengthens the allocation traces
of short models, and `allocator.py` replays a trace by the rules of CUDA's caching allocator. The process that runs a
rehearsal has ``RELAX_TRAIN_DEVICE=meta``.
"""
