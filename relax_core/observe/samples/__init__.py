"""Keeps the samples of a run in files that only grow, and reads them: tokens, rewards, versions, advantages.

Start reading in `sample_records.py`, which defines what the files hold.
"""
