"""Distributes prompts over several engines: routing, lost engines, stragglers, aborted samples.

Start reading in ``engine_pool.py``.
"""
