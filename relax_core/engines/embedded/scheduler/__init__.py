"""Holds the embedded engine's decode thread: the queue, the slots, sampling and scoring.

Start reading in ``scheduler.py``, then in ``decoder.py``.
"""
