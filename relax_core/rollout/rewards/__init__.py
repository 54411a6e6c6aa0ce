"""Scores responses with the run's reward: in the event loop, in threads, or in worker processes with a time limit.

Start reading in `reward_pool.py`.
"""
