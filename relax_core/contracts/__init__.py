"""The types and protocols that every room shares. They import nothing of Relax outside this folder.

Start reading in `tree.py`, the token tree; `bus.py`, `engine.py` and `train.py` follow, and for plug-ins
`algorithm.py`, `reward.py` and `env.py`.
"""
