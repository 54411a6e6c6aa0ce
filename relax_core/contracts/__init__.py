"""The types and protocols that all packages of Relax share. They import nothing of Relax outside this folder.

Start reading in `tree.py`, the token tree, then `bus.py`, `engine.py` and `train.py`. `algorithm.py`, `reward.py` and
`env.py` are the contracts of plug-ins.
"""
