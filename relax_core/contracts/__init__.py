"""The types and protocols that every room shares. They import nothing of Relax outside this folder.

Start reading in tree.py, the token tree; then bus.py, engine.py, train.py, and the plug-ins' algorithm.py, reward.py
and env.py.
"""
