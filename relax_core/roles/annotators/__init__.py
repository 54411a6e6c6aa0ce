"""Roles between rollout and trainer, which add columns to groups: advantages, log-probs and teachers' log-probs.

Start reading in `column_worker.py`, the loop that most of them share.
"""
