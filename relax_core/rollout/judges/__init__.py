"""Calls judges: models that score answers (LLM as a judge). A judge runs in engines of the run or at a URL.

Start reading in `judge_pool.py`.
"""
