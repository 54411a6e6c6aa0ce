"""Reads what the kernel of this host counts of a thread, for the trainer and the engine, which share no other code.

Start reading in `core_wait.py`.
"""
