"""The types and protocols that all packages of Relax share. This package imports no other package of Relax.

Start reading in `tree.py`, the token tree, then `bus.py`, `engine.py` and `train.py`. `algorithm.py`, `reward.py` and
`env.py` are contracts of plug-ins.
"""
