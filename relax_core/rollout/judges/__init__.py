"""Asks judges: models that give verdicts on answers, in engines of their own or behind an address.

Start reading in `judge_pool.py`.
"""
