"""Makes the lanes of a run over time from its files: trainer, ranks, rollout workers, engines, recoveries, orders.

Start reading in `run_timeline.py`.
"""
