"""Engines that join and leave a run while it trains.

Start reading in ``engine_changes.py``.
"""
