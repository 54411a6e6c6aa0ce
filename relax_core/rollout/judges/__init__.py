"""Asks judges: models that give verdicts on answers, in engines of the run or at a URL.

Start reading in `judge_pool.py`.
"""
