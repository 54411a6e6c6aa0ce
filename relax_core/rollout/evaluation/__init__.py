"""Evaluates weight versions on held-out data rows and estimates accuracy, pass@k and maj@k.

Start reading in `evaluator.py`; `eval_metrics.py` holds the statistics.
"""
